"""What a client holds of objects it writes and reads in segments: grants it fills, prefixes it leased."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import BadRequestError, ProtocolError

if TYPE_CHECKING:
    from kvrelay.wire import messages as m


class StagePart(Struct, frozen=True):
    """``count`` whole segments, from segment ``first`` on, of a granted object."""

    grant: m.Grant
    spec: m.Spec
    first: int
    count: int

    @property
    def segment_bytes(self) -> int:
        """Size of one segment."""
        return self.spec.size // (self.spec.layers * self.spec.segments)

    @property
    def size(self) -> int:
        """Bytes of the run."""
        return self.count * self.segment_bytes


class Prefix:
    """The objects of the longest prefix of some keys that the pool holds, leased to this client if ``lease`` is not 0.

    ``sealed``: how many of them, from the first on, are sealed. ``ready``: layers known to be whole in all of them that
    have so many (grows with `wait`); segments of those layers can be fetched.
    """

    def __init__(self, matched: m.Matched) -> None:
        self.lease = matched.lease
        self.sealed = matched.sealed
        self.views = matched.views
        self.ready = 0
        self._sums = [array("Q") for _ in matched.views]
        if matched.sums:
            self.note_ready(self.layers, matched.sums)

    def __len__(self) -> int:
        return len(self.views)

    @property
    def layers(self) -> int:
        """Layers the objects have: the most any of them has."""
        return max((view.layers for view in self.views), default=0)

    def note_ready(self, layers: int, sums: bytes) -> None:
        """Take the checksums of layers ``[ready, layers)`` of all objects, as far as each has these.

        Raises:
            ProtocolError: they are not as many as that, or no layer more than before.
        """
        counts = [(min(layers, view.layers) - min(self.ready, view.layers)) * view.segments for view in self.views]
        if layers <= self.ready or len(sums) != 8 * sum(counts):
            raise ProtocolError(f"{len(sums)} bytes of checksums came for layers {self.ready} to {layers}")
        at = 0
        for count, known in zip(counts, self._sums, strict=True):
            known.frombytes(sums[at : at + 8 * count])
            at += 8 * count
        self.ready = layers

    def segment_bytes(self, index: int) -> int:
        """Size of a segment of the ``index``-th object."""
        view = self.views[index]
        return view.size // (view.layers * view.segments)

    def sums(self, span: m.Range) -> array[int]:
        """Checksums of a run of segments.

        Raises:
            BadRequestError: there are no such segments, or they have not been waited for.
        """
        if not 0 <= span.index < len(self.views) or span.first < 0 or span.count < 1:
            raise BadRequestError(
                f"{span.count} segments from {span.first} on of object {span.index}: legal are one or more, from 0 on, "
                f"of objects 0 to {len(self.views) - 1}"
            )
        known = self._sums[span.index][span.first : span.first + span.count]
        if len(known) < span.count:
            raise BadRequestError(
                f"segments {span.first} to {span.first + span.count - 1} of object {span.index}: only "
                f"{self.ready} layers have been waited for"
            )
        return known
