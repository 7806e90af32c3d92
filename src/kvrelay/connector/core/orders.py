"""What the scheduler's side tells the workers each step, and what they report back."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field

from kvrelay.types import Reason

if TYPE_CHECKING:
    from kvrelay.connector.core.tables import Blocks
    from kvrelay.identity.core.chunks import Chunk

_Key = TypeVar("_Key", str, int)


class SaveOrder(Struct, frozen=True):
    """Save these chunks of a request; their KV is complete when this step's forward pass is, or before."""

    request_id: str
    chunks: tuple[Chunk, ...]
    """In order. Consecutive, but for a prompt's short last chunk: the full one of the same beginning may follow it."""
    tables: tuple[Blocks, ...]
    """The blocks that hold them, of each block table of the engine."""
    starts: tuple[int, ...]
    """Of each group, the first token that is in blocks."""
    ticket: str | None
    """The hand-over that protects them, if any."""
    prompt: bool = True
    """Chunks of a prompt are among them: somebody may look for those as soon as the step ends."""
    complete: bool = False
    """Their KV is there before this step."""
    number: int = 0
    """Of all save orders of an engine."""

    @property
    def tokens(self) -> int:
        """Of all its chunks."""
        return sum([chunk.end - chunk.start for chunk in self.chunks])

    def of(self, group: int) -> tuple[Chunk, ...]:
        """Chunks of which the group's KV is wholly in blocks."""
        if self.chunks and self.chunks[0].start >= self.starts[group]:
            return self.chunks
        return tuple(chunk for chunk in self.chunks if chunk.start >= self.starts[group])


class Placed(Struct, frozen=True):
    """Where the pool holds consecutive chunks, sealed, under a lease of the scheduler's side; of one group."""

    pool: str
    """The pool process in whose arena they are."""
    offsets: bytes
    """Packed u64: where each chunk's object begins in the arena."""
    sums: bytes
    """Packed u64: checksums of all segments, object by object."""

    def between(self, first: int, end: int) -> Placed:
        """Chunks ``[first, end)`` of these, counted from 0."""
        each = len(self.sums) // len(self.offsets) * 8
        return Placed(self.pool, self.offsets[8 * first : 8 * end], self.sums[each * first : each * end])


class LoadKind(Enum):
    """When a load is done."""

    LATER = auto()
    """While steps go on; the request is scheduled when every rank has ended it."""
    NOW = auto()
    """Before the forward pass of the very step that brings the order: that pass reads what was loaded."""
    EARLY = auto()
    """As ``LATER``, but begun before everything is announced: whoever computes it says so under a ticket."""


class LoadOrder(Struct, frozen=True):
    """Load tokens ``[start, end)`` of a request from these chunks into these blocks."""

    request_id: str
    chunks: tuple[Chunk, ...]
    """Consecutive; the first holds ``start``, the last holds the token before ``end``."""
    tables: tuple[Blocks, ...]
    """The blocks to load into, of each block table of the engine."""
    starts: tuple[int, ...]
    """Of each group, the first token to load: ``start``, or a later one where there are no blocks for those before."""
    start: int
    end: int
    staged: int = 0
    """Number of the staging order that brings it into the workers' memory, or has; 0: there is none."""
    kind: LoadKind = LoadKind.LATER
    ticket: str = ""
    """Of an early load: the hand-over under which the rest is announced."""
    placed: Placed | None = None
    """Where its chunks are, if that is known: then a rank need not ask the pool."""

    def of(self, group: int) -> tuple[Chunk, ...]:
        """Chunks that hold a token of the group to be loaded."""
        return tuple(chunk for chunk in self.chunks if chunk.end > self.starts[group])


class StepOrders(Struct, frozen=True):
    """Everything for one engine step."""

    saves: tuple[SaveOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    held: tuple[str, ...] = ()
    """Finished requests whose blocks the engine keeps until a rank reports their saves done."""
    preempted: tuple[str, ...] = ()
    """Requests whose blocks are about to be given to others."""
    cancelled: tuple[str, ...] = ()
    """Aborted requests whose loads need not go on."""
    unstaged: tuple[int, ...] = ()
    """Staging orders of which nothing need be brought, or kept, any more."""
    stages: tuple[LoadOrder, ...] = ()
    """What is to be brought into the workers' own memory, and verified: these have no blocks yet."""


class LoadOutcome(Struct, frozen=True):
    """How a load ended on one rank, or, joined, on several."""

    valid_end: int
    """Tokens before this one are in place."""
    bytes: int
    transfer_s: float
    """Time spent moving and verifying bytes."""
    reason: Reason = Reason.NONE
    """Why ``valid_end`` is not what was ordered."""
    ranks: int = 1
    """How many ranks it is about."""
    took_s: float = 0.0
    """From the order's arrival until the load was over."""

    def join(self, other: LoadOutcome) -> LoadOutcome:
        """The outcome on both: only what every rank has counts, and the slowest rank sets the time."""
        worse = self if self.valid_end <= other.valid_end else other
        best_reason = worse.reason or self.reason or other.reason
        return LoadOutcome(
            valid_end=worse.valid_end,
            bytes=self.bytes + other.bytes,
            transfer_s=max(self.transfer_s, other.transfer_s),
            reason=best_reason,
            ranks=self.ranks + other.ranks,
            took_s=max(self.took_s, other.took_s),
        )


class RankReport(Struct):
    """What happened on one rank, or, joined, on several, since the last report."""

    saves_ended: dict[str, int]
    """Save orders that ended, well or not, by request."""
    loads: dict[str, LoadOutcome]
    orders_ended: dict[int, int] = field(default_factory=dict)
    """Ranks on which a save order ended, by its number."""
    stages: dict[int, LoadOutcome] = field(default_factory=dict)
    """What was brought into the ranks' own memory, by the order's number."""

    @property
    def tells(self) -> bool:
        """Whether anything happened."""
        return bool(self.saves_ended or self.loads or self.orders_ended or self.stages)

    def join(self, other: RankReport) -> RankReport:
        """Both reports as one."""
        saves = dict(self.saves_ended)
        for request_id, count in other.saves_ended.items():
            saves[request_id] = saves.get(request_id, 0) + count
        orders = dict(self.orders_ended)
        for number, ranks in other.orders_ended.items():
            orders[number] = orders.get(number, 0) + ranks
        return RankReport(
            saves_ended=saves,
            loads=_joined(self.loads, other.loads),
            orders_ended=orders,
            stages=_joined(self.stages, other.stages),
        )


def _joined(ours: dict[_Key, LoadOutcome], others: dict[_Key, LoadOutcome]) -> dict[_Key, LoadOutcome]:
    all_of_them = dict(ours)
    for key, outcome in others.items():
        known = all_of_them.get(key)
        all_of_them[key] = outcome if known is None else known.join(outcome)
    return all_of_them
