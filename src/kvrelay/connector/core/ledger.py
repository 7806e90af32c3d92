"""The scheduler's side of the connector, as a pure state machine.

It decides, for every request, what to look up, how many tokens to claim, what to load and into which blocks, what to
save and when, which finished requests' blocks the engine must keep, and what to say in the proof of a hand-over. The
shell feeds it the engine's calls and the pool's answers, with the time, and carries out what it returns.

Two facts of the engine shape it. A finished request whose load is under way is kept by the engine itself until the load
is reported, so answering "keep its blocks" then would free them twice. And after a failed load the engine asks again
from zero, so a failure must be remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.connector.core.matching import load_end
from kvrelay.connector.core.orders import LoadKind, LoadOrder, RankReport, SaveOrder, StepOrders
from kvrelay.connector.core.proofs import proof_of
from kvrelay.connector.core.requests import Entry, Event, HandOver, Phase
from kvrelay.connector.core.sync_loads import SyncLoads
from kvrelay.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kvrelay.connector.core.growth import Growth
    from kvrelay.connector.core.orders import Placed
    from kvrelay.connector.core.sync_loads import Ended
    from kvrelay.connector.core.tables import Tables
    from kvrelay.identity.core.chunks import Chunk
    from kvrelay.types import Proof


class Finish(Struct, frozen=True):
    """What a request's end means."""

    hold: bool
    """The engine must keep the blocks until the workers report the saves done."""


class Ledger:
    """All requests of one engine. Not thread-safe: the engine's scheduler thread owns it."""

    def __init__(
        self,
        *,
        engine: str,
        tables: Tables,
        ranks: int,
        saves: bool,
        loads: bool,
        sync_bytes: int = 0,
        sync_idle_bytes: int = 0,
        max_early: int = 0,
    ) -> None:
        """``ranks``: how many workers report; ``saves``, ``loads``: what this engine's role allows.

        ``sync_bytes``: what may be loaded synchronously in one step; 0 where the engine cannot be told which blocks a
        failed load left empty. ``sync_idle_bytes``: the same, while no other request runs. ``max_early``: loads at a
        time that may be claimed before all of them is there.
        """
        assert not sync_bytes or tables.divisible, "this engine loads asynchronously"
        self._engine = engine
        self._tables = tables
        self._ranks = ranks
        self.saves = saves
        self.loads = loads
        self._sync = SyncLoads(sync_bytes, tables.tables[0].block_tokens, sync_idle_bytes)
        self.elsewhere: Callable[[], bool] = lambda: False
        """Whether the engine runs requests that this ledger does not know."""
        self._max_early = max_early if tables.divisible else 0
        self._entries: dict[str, Entry] = {}
        self._loading_now: dict[str, Entry] = {}
        """Requests whose synchronous load is not reported yet; some may have ended meanwhile."""
        self._new_loads: list[LoadOrder] = []
        self._new_late: list[SaveOrder] = []
        self._new_held: list[str] = []
        self._new_cancelled: list[str] = []
        self._releases: list[int] = []
        self._orders = 0
        """Save orders given, of all requests."""

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, request_id: str | None) -> Entry | None:
        """What is known of a request; ``None`` if nothing."""
        return None if request_id is None else self._entries.get(request_id)

    @property
    def loading(self) -> int:
        """How many requests have a load under way."""
        return sum(entry.claim is not None for entry in self._entries.values())

    @property
    def saving(self) -> bool:
        """Whether a rank has not ended all save orders it was given."""
        return any(entry.orders_ended < entry.orders * self._ranks for entry in self._entries.values())

    # --- lookups ---

    def add(
        self,
        request_id: str,
        prompt_tokens: int,
        chunks: tuple[Chunk, ...],
        hand_over: HandOver | None,
        growth: Growth | None = None,
    ) -> Entry:
        """A new request. ``chunks``: of its prompt; empty if it has no names for them, or not yet.

        ``growth``: the chunks that what it generates will complete, if those are to be saved.
        """
        entry = Entry(
            request_id=request_id, prompt_tokens=prompt_tokens, chunks=chunks, hand_over=hand_over, growth=growth
        )
        self._entries[request_id] = entry
        return entry

    def name(self, entry: Entry, chunks: tuple[Chunk, ...], growth: Growth | None, known: Sequence[int] = ()) -> None:
        """The names of a new request's chunks are known now. ``known``: see `Entry`."""
        entry.chunks = chunks
        entry.growth = growth
        entry.known = known

    def may_look(self, entry: Entry) -> bool:
        """Whether a lookup makes sense for the request at all."""
        return self.loads and bool(entry.chunks) and not (entry.failed or entry.unread)

    def wants_look(self, entry: Entry, now: float) -> bool:
        """Whether to look (again): a lease grew old before the engine had room, or it lost the blocks it ran on.

        That it is asked about again says so: preempted requests are told of only later, when the step is scheduled.
        """
        if not self.may_look(entry) or entry.awaited:
            return False
        if entry.phase is Phase.CLAIMABLE:
            return now >= entry.look_again_at
        return entry.phase is Phase.SETTLED and entry.ran

    def look(self, entry: Entry) -> None:
        """A lookup was sent. An older lease of the request is to be released."""
        self._drop_lease(entry)
        entry.matched_end = 0
        entry.ran = False
        entry.move(Event.LOOK)

    def match(
        self,
        entry: Entry,
        chunks: int,
        lease: int,
        look_again_at: float,
        fresh: Sequence[int] = (),
        *,
        sealed: int = 0,
        size_bytes: int = 0,
        placed: Placed | None = None,
        far: bool = False,
    ) -> None:
        """The pool holds the first ``chunks`` chunks, under ``lease``; past ``look_again_at`` it is not relied on.

        ``fresh``: which of them were written for this hand-over; ``sealed``: how many of them are sealed;
        ``size_bytes``: of all together; ``placed``: where they are, if they can be read there; ``far``: they come over
        a network.
        """
        entry.early = chunks < len(entry.chunks) and self.may_follow(entry)
        if not chunks and not entry.early:
            self.settle(entry, Reason.MISS)
            return
        entry.move(Event.MATCH)
        entry.matched_end = entry.chunks[chunks - 1].end if chunks else 0
        entry.matched_bytes = size_bytes
        entry.sealed = sealed == chunks
        entry.placed, entry.far = placed, far
        entry.lease = lease
        entry.look_again_at = look_again_at
        entry.reason = Reason.NONE if chunks == len(entry.chunks) else Reason.PARTIAL if chunks else Reason.MISS
        entry.short = entry.reason
        entry.found_end = entry.matched_end
        entry.fresh = tuple(entry.chunks[at] for at in fresh if at < chunks)
        if not entry.ticket:  # under a ticket they are announced all the same, so that it protects them
            entry.next_chunk = max(entry.next_chunk, chunks)

    def may_follow(self, entry: Entry) -> bool:
        """Whether what the pool does not have of its prompt is being computed, and may be waited for.

        A prompt that ends with tokens the prefill engine generated is not: its prefill is over.
        """
        over = entry.hand_over
        if over is None or over.leg != "decode" or not over.overlapped or not entry.chunks:
            return False
        return self._max_early > 0 and entry.chunks[-1].end == entry.prompt_tokens

    def must_queue(self, entry: Entry, local: int) -> bool:
        """Whether as many loads are early already as may be: ask again later, for a place or for all of the KV."""
        if entry.phase is not Phase.CLAIMABLE or not entry.early or entry.prompt_tokens - 1 <= local:
            return False
        return sum(one.early and one.claim is not None for one in self._entries.values()) >= self._max_early

    def settle(self, entry: Entry, reason: Reason) -> None:
        """Nothing will be loaded, because of ``reason``."""
        self._drop_lease(entry)
        entry.matched_end = 0
        if entry.reason is not reason:
            entry.reason = entry.short = reason
            entry.found_end = 0
        entry.move(Event.SETTLE)

    def decline(self, entry: Entry, reason: Reason) -> None:
        """A lookup it wants cannot be made, because of ``reason``: it goes on without."""
        entry.ran = False
        if entry.phase is not Phase.SETTLED:
            self.settle(entry, reason)

    def pool_lost(self, keep: Collection[str] = ()) -> None:
        """The connection the leases and lookups belonged to is gone. ``keep``: requests not looked up on it yet."""
        self._releases.clear()
        for entry in self._entries.values():
            entry.lease = 0
            if not entry.scheduled:
                entry.next_chunk = 0
            if entry.awaited and entry.phase is Phase.CLAIMABLE:
                continue
            if entry.phase in (Phase.LOOKING, Phase.CLAIMABLE) and entry.request_id not in keep:
                self.settle(entry, Reason.POOL_DOWN)

    def leave_unread(self, entry: Entry, reason: Reason) -> None:
        """The engine takes no external KV for this new request, because of ``reason``: it is saved, never looked up."""
        entry.unread = True
        self.settle(entry, reason)

    def runs(self, entry: Entry, *, put_off: bool = False) -> None:
        """The engine computes on the request in this step. ``put_off``: what that completes is not to be saved yet."""
        entry.ran = True
        entry.put_off = len(entry.known) if put_off else None

    # --- what the engine asks ---

    def must_wait(self, local: int) -> bool:
        """Whether a request with ``local`` tokens in the prefix cache must wait for the next step.

        They may lie in blocks that a synchronous load of this step is to fill, and may yet fail to.
        """
        return self._sync.overlaps(local)

    def claimable(self, entry: Entry, local: int) -> int:
        """How many tokens beyond the ``local`` ones the engine may have loaded; ``entry.near``: synchronously.

        Changes nothing but what is noted. None if that would spare no computation: the engine computes a prompt's last
        token itself in any case, and in the very step of a synchronous load, which must not cover it.
        """
        entry.local = local
        entry.near = False
        if entry.phase is not Phase.CLAIMABLE:
            return 0
        promised = entry.prompt_tokens if entry.early else entry.matched_end
        near_end = min(promised, entry.prompt_tokens - 1)
        if near_end <= local:
            return 0
        if entry.early:
            return promised - local
        entry.near = self._is_near(entry, near_end - local)
        end = near_end if entry.near else load_end(entry.matched_end, entry.prompt_tokens, self._tables)
        return end - local

    def _is_near(self, entry: Entry, tokens: int) -> bool:
        """Whether so many of its matched tokens may be loaded synchronously."""
        prefill = entry.hand_over is not None and entry.hand_over.leg == "prefill"
        if not entry.sealed or prefill or entry.staged:
            return False
        size = entry.share_bytes(tokens)
        if entry.far:
            return self._sync.fits(size) and self._alone(entry)
        return self._sync.fits(size) or (
            entry.placed is not None and self._sync.fits(size, idle=True) and self._alone(entry)
        )

    def _alone(self, entry: Entry) -> bool:
        """Whether no other request runs."""
        return not self.runs_others(entry) and not self.elsewhere()

    def runs_others(self, entry: Entry | None = None) -> bool:
        """Whether the engine has begun to compute on a request, other than this one, that has not ended."""
        return any(one.scheduled and one.phase is not Phase.ENDED for one in self._entries.values() if one is not entry)

    def allocated(self, entry: Entry, external: int, block_ids: Sequence[Sequence[int]], now: float) -> None:
        """The engine gave the request blocks and will have ``external`` tokens loaded into them.

        ``block_ids``: the request's block tables, in the engine's order.
        """
        if entry.phase is not Phase.CLAIMABLE:
            return
        if not external:
            self.settle(entry, entry.reason)
            return
        start, end = entry.local, entry.local + external
        starts = tuple(max(start, held) for held in self._tables.held_from(block_ids, end))
        first = next(at for at, chunk in enumerate(entry.chunks) if chunk.end > start)
        wanted = tuple(chunk for chunk in entry.chunks[first:] if chunk.start < end)
        placed = None if entry.early or entry.staged else entry.placed
        entry.move(Event.CLAIM)
        entry.claim = (start, end)
        entry.claimed_at = now
        order = LoadOrder(
            request_id=entry.request_id,
            chunks=wanted,
            tables=self._tables.stretch(block_ids, starts, end),
            starts=starts,
            start=start,
            end=end,
            staged=entry.staged,
            kind=LoadKind.NOW if entry.near else LoadKind.EARLY if entry.early else LoadKind.LATER,
            ticket=entry.hand_over.id if entry.early and entry.hand_over is not None else "",
            placed=placed and placed.between(first, first + len(wanted)),
        )
        if entry.early and not entry.ticket:
            entry.next_chunk = len(entry.chunks)  # the prefill engine saves them
        if entry.early:  # what is not there yet is written for this hand-over, or missing for a reason still to come
            entry.fresh += tuple(chunk for chunk in entry.chunks if chunk.end > entry.found_end)
            entry.found_end, entry.short = entry.prompt_tokens, Reason.NONE
        if entry.near:
            self._loading_now[entry.request_id] = entry
            self._sync.claim(order, block_ids[0], entry.share_bytes(external))
        else:
            self._sync.passed_by()
        self._new_loads.append(order)

    def has_unsaved(self, entry: Entry, computed: int) -> bool:
        """Whether, once its first ``computed`` tokens are computed, a chunk is complete that was not ordered saved.

        Tokens beyond those the engine has accepted, such as drafts, do not count. While a synchronous load is under way
        none do: a rank does not know that another's failed, and what is computed from it is worth nothing. Nor does any
        while its name is in doubt.
        """
        return not self._is_unsure(entry) and self._completes(entry, computed)

    def _is_unsure(self, entry: Entry) -> bool:
        return entry.doubted or self.loads_now(entry)

    def _completes(self, entry: Entry, computed: int) -> bool:
        return self.saves and entry.next_end <= entry.certain(computed)

    def order_save(self, entry: Entry, computed: int, block_ids: Sequence[Sequence[int]]) -> SaveOrder:
        """Save every chunk that is complete with ``computed`` tokens and was not ordered yet.

        ``block_ids``: the request's block tables, in the engine's order.

        Chunks the engine found in its own prefix cache count: the pool may have lost them. Those the pool was just seen
        to hold do not, unless a ticket is to protect them.
        """
        chunks: list[Chunk] = []
        prompt = entry.next_chunk < len(entry.chunks)
        while entry.next_end <= entry.certain(computed):
            chunks.append(entry.next())
            entry.next_chunk += 1
        entry.orders += 1
        self._orders += 1
        start, end = chunks[0].start, chunks[-1].end
        starts = tuple(max(start, held) for held in self._tables.held_from(block_ids, end))
        return SaveOrder(
            request_id=entry.request_id,
            chunks=tuple(chunks),
            tables=self._tables.stretch(block_ids, starts, end),
            starts=starts,
            number=self._orders,
            ticket=entry.ticket,
            prompt=prompt,
        )

    def loads_now(self, entry: Entry) -> bool:
        """Whether a synchronous load of the request is under way: what it comes to is known after the step."""
        return self._loading_now.get(entry.request_id) is entry

    def prove(self, entry: Entry, computed: int) -> Proof:
        """What became of the prompt, when the request is first scheduled, ``computed`` tokens being there.

        ``handover`` is empty unless this is the decode leg of one.
        """
        entry.scheduled = True
        return proof_of(entry, computed, self._engine)

    def preempted(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """These lost their blocks. What they had saved is ordered again when they come back. Returns those known."""
        known = tuple(request_id for request_id in request_ids if request_id in self._entries)
        for request_id in known:
            self._entries[request_id].next_chunk = 0
        return known

    def finish(self, entry: Entry, computed: int = 0, block_ids: Sequence[Sequence[int]] = ()) -> Finish:
        """The engine finished or aborted the request, its first ``computed`` tokens being in these blocks.

        What its last step accepted was not certain when that step began: it is saved now. The last token of all is not
        in the blocks, or not yet. If that step also loaded, what it computed is saved when every rank has told how; if
        its name is in doubt, when that is over. If it was put off, it is saved only if that step is known to be over.
        """
        was = entry.phase
        self._drop_lease(entry)
        entry.move(Event.END)
        if was is Phase.LOADING and not self.loads_now(entry):
            self._new_cancelled.append(entry.request_id)
            return Finish(hold=False)
        if entry.growth is not None:
            computed = min(computed, entry.growth.known_tokens - 1)
        if not entry.in_question and self._is_unsure(entry) and self._completes(entry, computed):
            entry.held, entry.rest = True, (computed, block_ids)
            return Finish(hold=True)
        beyond = entry.growth is not None and entry.next_chunk >= len(entry.chunks)
        if not entry.in_question and (beyond or entry.put_off is not None):
            self._save_late(entry, computed, block_ids)
        if entry.orders_ended < entry.orders * self._ranks:
            entry.held = True
            self._new_held.append(entry.request_id)
            return Finish(hold=True)
        del self._entries[entry.request_id]
        return Finish(hold=False)

    def _save_late(self, entry: Entry, computed: int, block_ids: Sequence[Sequence[int]]) -> None:
        if self.has_unsaved(entry, computed):
            self._new_late.append(replace(self.order_save(entry, computed, block_ids), complete=True))

    # --- what the workers report ---

    def report(self, report: RankReport) -> list[tuple[Entry, Ended]]:
        """Progress on the ranks. Of requests that are gone, nothing is noted.

        Returns synchronous loads that ended: of these the engine says nothing, and `loaded_now` is to follow.
        """
        ended: list[tuple[Entry, Ended]] = []
        for request_id, count in report.saves_ended.items():
            if entry := self._entries.get(request_id):
                entry.orders_ended += count
        for request_id, outcome in report.loads.items():
            entry = self._loading_now.pop(request_id, None) or self._entries.get(request_id)
            if entry is None or entry.claim is None:
                continue
            entry.bytes += outcome.bytes
            entry.transfer_s = max(entry.transfer_s, outcome.transfer_s)
            if outcome.valid_end < entry.claim[1]:
                entry.failed = True
                entry.next_chunk = 0  # the pool has less than it said
                entry.reason = outcome.reason or Reason.FAILED_LOAD
            self._end_rest(entry)
            if (end := self._sync.ended(request_id, outcome)) is not None:
                ended.append((entry, end))
        return ended

    def trust(self, entry: Entry) -> None:
        """The name of a request in doubt holds."""
        entry.doubted = False
        self._end_rest(entry)

    def _end_rest(self, entry: Entry) -> None:
        """Save what a request had left when it ended, and let its blocks go after that, once it is sure whether to."""
        if entry.rest is None or self._is_unsure(entry):
            return
        if not entry.failed:
            self._save_late(entry, *entry.rest)
        self._new_held.append(entry.request_id)
        entry.rest = None

    def loaded(self, request_id: str, now: float) -> None:
        """Every rank has ended the request's load."""
        entry = self._entries.get(request_id)
        if entry is None or entry.claim is None:
            return
        self.loaded_now(entry, now - entry.claimed_at)
        if entry.phase is Phase.ENDED:
            del self._entries[request_id]

    def loaded_now(self, entry: Entry, wait_s: float) -> None:
        """The request's load is over, after ``wait_s``; the request may be, too, in the step of a synchronous load."""
        entry.claim = None
        entry.wait_s += wait_s
        self._drop_lease(entry)
        if entry.phase is not Phase.ENDED:
            entry.move(Event.LOADED)

    def sent(self, request_id: str) -> None:
        """Every rank has ended the saves of a held request: the engine frees its blocks now."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.held:
            del self._entries[request_id]

    def forget_keys(self) -> None:
        """The weights may have changed: nothing known so far may be saved or loaded under its name any more."""
        for entry in self._entries.values():
            self.forget(entry, Reason.MISS)

    def forget(self, entry: Entry, reason: Reason) -> None:
        """Nothing of a request may be saved or loaded any more, because of ``reason``."""
        entry.chunks = ()
        entry.growth = None
        entry.next_chunk = 0
        entry.failed = True
        entry.doubted = False
        self._end_rest(entry)
        if entry.phase in (Phase.NEW, Phase.LOOKING, Phase.CLAIMABLE):
            self.settle(entry, reason)

    # --- what the shell carries out ---

    def take_orders(self, saves: Iterable[SaveOrder], preempted: tuple[str, ...]) -> StepOrders:
        """Everything the workers must know this step; each order is given once."""
        orders = StepOrders(
            saves=(*saves, *self._new_late),
            loads=tuple(self._new_loads),
            held=tuple(self._new_held),
            preempted=preempted,
            cancelled=tuple(self._new_cancelled),
        )
        self._new_loads, self._new_late, self._new_held, self._new_cancelled = [], [], [], []
        self._sync.new_step()
        return orders

    def take_releases(self) -> list[int]:
        """Leases to release."""
        releases, self._releases = self._releases, []
        return releases

    def _drop_lease(self, entry: Entry) -> None:
        if entry.lease:
            self._releases.append(entry.lease)
            entry.lease = 0

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the books do not balance. For tests."""
        for request_id, entry in self._entries.items():
            assert request_id == entry.request_id
            assert entry.next_chunk >= 0
            assert entry.growth is not None or entry.next_chunk <= len(entry.chunks)
            assert entry.chunks or entry.growth is None
            assert 0 <= entry.orders_ended <= entry.orders * self._ranks
            assert not entry.lease or entry.phase in (Phase.CLAIMABLE, Phase.LOADING)
            assert (entry.phase is Phase.LOADING) <= (entry.claim is not None)
            assert entry.claim is None or entry.phase in (Phase.LOADING, Phase.ENDED)
            assert not entry.held or entry.phase is Phase.ENDED
            assert entry.rest is None or (entry.held and self._is_unsure(entry))
            assert entry.phase is not Phase.ENDED or entry.held or entry.claim is not None
            assert not self.loads_now(entry) or entry.phase in (Phase.LOADING, Phase.ENDED)
        leases = [entry.lease for entry in self._entries.values() if entry.lease] + self._releases
        assert len(leases) == len(set(leases))
