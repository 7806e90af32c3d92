"""What a tier is: a place below the arena that keeps sealed objects, whole, and may lose any of them at any time.

The contract of every `Tier`:

- **Threads.** Every method may be called from any thread, and several at once. None is called from the event loop: they
  block. `close` is called once, when no other call is running; nothing is called after it.
- **Atomic.** What `store` reports as `Outcome.DONE` can be found and loaded from then on; what it does not, or what a
  crash interrupted, is either wholly there or not at all.
- **Lossy.** A tier may forget an object whenever it likes: to make room, because its medium failed, after a power cut.
  It says so where it can (`take_evicted`). It never gives other bytes than those it was given: every `load` proves the
  bytes against the object's own checksums (XXH3-64 a segment) and the record against a checksum of its own, and
  answers `Outcome.CORRUPT`, forgetting the object, when that fails. ``into`` then holds garbage.
- **Memory.** ``data`` and ``into`` belong to the caller, who keeps them alive, and ``data`` unchanged, during the call
  only. ``into`` may be written to at any time during the call.
- **Errors.** A problem with one object is that object's `Outcome`. When the medium as a whole fails (disk full or
  unreadable, server unreachable) a method raises `OSError`, and for all the caller knows it did nothing, something or
  everything it was asked to. A tier raises nothing else; `Guard` makes even that a miss.
- **Idempotent.** Storing what is there already is `DONE` and cheap; storing another object under the same key replaces
  the old one at once. Deleting what is not there is fine.

A tier key (`tier_key`) names an object of a tenant. Times of expiry are seconds of the wall clock, because a tier
outlives the pool's process; what has expired counts as absent.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_TIER_KEY_BYTES = 2 + 4 * 256 + 64
MOST_EVICTED = 100_000
"""Keys remembered for `Tier.take_evicted`, at most."""


class Outcome(Enum):
    """What became of one object in a `Tier.store` or `Tier.load`."""

    DONE = "done"
    ABSENT = "absent"
    """Not there, or not any more."""
    CORRUPT = "corrupt"
    """There, but not the bytes that were stored. It has been forgotten."""
    FAILED = "failed"
    """The medium failed on this object."""
    REFUSED = "refused"
    """It will never fit."""


class Shape(NamedTuple):
    """What must be known of an object besides its bytes and their checksums.

    ``size`` bytes in ``layers`` x ``segments`` equal segments; ``expires_at``: Unix time, 0 for never.
    """

    size: int
    layers: int = 1
    segments: int = 1
    expires_at: float = 0.0


class Item(NamedTuple):
    """An object to store: ``sums`` holds a little-endian u64 a segment, ``data`` is ``shape.size`` bytes."""

    key: bytes
    shape: Shape
    sums: bytes
    data: memoryview


class Loaded(NamedTuple):
    """``sums``: as in `Item`; empty unless the outcome is `Outcome.DONE`."""

    outcome: Outcome
    sums: bytes = b""


class Usage(NamedTuple):
    """What a tier holds, as far as it knows; a tier that is shared with other pools may not."""

    objects: int
    size_bytes: int


class Tier(Protocol):
    """See the module's docstring. ``kind``: ``disk``, ``folder`` or ``s3``; ``where``: for messages."""

    kind: str
    where: str

    def store(self, items: Sequence[Item]) -> list[Outcome]:
        """Keep these objects; an outcome each. Keys are distinct."""

    def find(self, keys: Sequence[bytes], *, prefix: bool = False) -> list[Shape | None]:
        """Which objects are there. With ``prefix``, nothing behind the first absent one need be looked for."""

    def load(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[Loaded]:
        """Copy objects to where they are wanted and verify them. One of another size than its view is absent."""

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget these objects; how many there were."""

    def purge(self, tenant: str) -> int:
        """Forget every object of a tenant; how many there were."""

    def keys(self) -> Iterator[bytes]:
        """The keys of what is there, in no order; what comes or goes meanwhile may be missed."""

    def usage(self) -> Usage:
        """How much is there. Cheap."""

    def take_evicted(self) -> list[bytes]:
        """What was dropped to make room since this was last called, as far as the tier knows; a bounded list."""

    def close(self) -> None:
        """Let go of files, connections and locks. What was stored stays."""


def tier_key(tenant: str, key: bytes) -> bytes:
    """The name of a tenant's object in a tier. No two pairs share one."""
    encoded = tenant.encode()
    return len(encoded).to_bytes(2, "big") + encoded + key


def split_tier_key(name: bytes) -> tuple[str, bytes]:
    """The tenant and the key of a `tier_key`."""
    end = 2 + int.from_bytes(name[:2], "big")
    return name[2:end].decode(), name[end:]
