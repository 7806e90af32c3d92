"""W3C Trace Context: reading and writing ``traceparent``, and whether a request is traced.

The client decides where it says: its sampled flag is kept. A request without a trace begins one, of which a fixed share
is sampled by the trace's id, as OpenTelemetry's `TraceIdRatioBased` does, so that all parts of a deployment agree.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable

TRACEPARENT = b"traceparent"
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_LOW = (1 << 64) - 1


class Trace(Struct, frozen=True):
    """The trace a request belongs to."""

    trace_id: int
    span_id: int
    """Of the request's own span."""
    parent_id: int
    """Of the client's span; 0 if the trace begins here."""
    flags: int

    @property
    def sampled(self) -> bool:
        """Whether spans are made."""
        return bool(self.flags & _SAMPLED)

    @property
    def name(self) -> str:
        """The trace's id in hex."""
        return f"{self.trace_id:032x}"

    def traceparent(self, span_id: int) -> bytes:
        """For an engine: ``span_id`` is its parent."""
        return b"00-%032x-%016x-%02x" % (self.trace_id, span_id, self.flags)


def read_traceparent(value: bytes | None) -> tuple[int, int, int] | None:
    """Trace id, span id and flags; None of what is not valid, which is then ignored."""
    form = None if value is None else _FORM.fullmatch(value.strip())
    if form is None:
        return None
    version, trace_id, span_id, flags, more = form.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    trace, span = int(trace_id, 16), int(span_id, 16)
    return (trace, span, int(flags, 16) & 0x03) if trace and span else None


class Sampler:
    """Begins or continues a request's trace."""

    def __init__(self, ratio: float, random_bits: Callable[[int], int]) -> None:
        """``ratio``: share of the traces that begin here. ``random_bits(n)``: that many, for ids."""
        self._bound = round(ratio * (1 << 64))
        self._random_bits = random_bits

    def trace(self, traceparent: bytes | None) -> Trace:
        """``traceparent``: as the client sent it, if it did."""
        given = read_traceparent(traceparent)
        if given is not None:
            trace_id, parent_id, flags = given
            return Trace(trace_id, self.new_id(64), parent_id, flags)
        trace_id = self.new_id(128)
        return Trace(trace_id, self.new_id(64), 0, _SAMPLED if trace_id & _LOW < self._bound else 0)

    def new_id(self, bits: int) -> int:
        """Of that many bits, never 0."""
        while not (made := self._random_bits(bits)):
            pass
        return made
