"""One worker's books: which saves and loads are open, and what was reported. Pure; the shell guards it with a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.connector.core.orders import LoadKind, LoadOutcome, RankReport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrelay.connector.core.orders import LoadOrder
    from kvrelay.connector.core.tables import Tables


class Results(Struct):
    """What a step reports to the engine. Every name appears once in a request's life."""

    finished_sending: set[str]
    finished_recving: set[str]
    invalid_block_ids: set[int]
    """Blocks of the loads named that hold nothing, where the engine takes reports by block."""
    failed_recving: set[str]
    """Loads named of which nothing counts, where it does not."""
    report: RankReport


class RankLedger:
    """Open saves and loads of one rank."""

    def __init__(self, *, tables: Tables, hold_s: float) -> None:
        """``hold_s``: how long a finished request's blocks may wait for its saves."""
        self._tables = tables
        self._hold_s = hold_s
        self._open_saves: dict[str, int] = {}
        self._held: dict[str, float] = {}
        self._saves_ended: dict[str, int] = {}
        self._orders_ended: dict[int, int] = {}
        self._loads: dict[str, LoadOrder] = {}
        self._cancelled: set[str] = set()
        self._outcomes: dict[str, LoadOutcome] = {}
        self._stages: set[int] = set()
        self._unstaged: set[int] = set()
        self._staged: dict[int, LoadOutcome] = {}

    # --- saves ---

    def save_ordered(self, request_id: str) -> None:
        """A save order was taken on; `save_ended` must follow."""
        self._open_saves[request_id] = self._open_saves.get(request_id, 0) + 1

    def save_ended(self, request_id: str, number: int = 0) -> None:
        """One save order is over: its blocks will not be read again for it. ``number``: its own, if that matters."""
        if number:
            self._orders_ended[number] = 1
        left = self._open_saves[request_id] - 1
        if left:
            self._open_saves[request_id] = left
        else:
            del self._open_saves[request_id]
        self._saves_ended[request_id] = self._saves_ended.get(request_id, 0) + 1

    def hold(self, request_id: str, now: float) -> None:
        """The engine keeps a finished request's blocks until `take` names it."""
        self._held[request_id] = now + self._hold_s

    def overdue(self, now: float) -> set[str]:
        """Held requests whose saves must be given up."""
        return {request_id for request_id, until in self._held.items() if until <= now and self.saving(request_id)}

    def saving(self, request_id: str) -> bool:
        """Whether a save of the request may still read its blocks."""
        return request_id in self._open_saves

    # --- loads ---

    def load_ordered(self, order: LoadOrder) -> None:
        """A load was taken on; `load_ended` must follow."""
        self._loads[order.request_id] = order

    def cancel(self, request_id: str) -> None:
        """Nobody waits for the load's result any more; that it ended must still be reported."""
        if request_id in self._loads:
            self._cancelled.add(request_id)

    def cancelled(self, request_id: str) -> bool:
        """Whether the load may stop early."""
        return request_id in self._cancelled

    def load_ended(self, request_id: str, outcome: LoadOutcome) -> None:
        """The load is over: nothing more will be written into its blocks."""
        self._outcomes[request_id] = outcome

    def has_ended(self, request_id: str) -> bool:
        """Whether a load that was ordered is over."""
        return request_id in self._outcomes

    # --- staging ---

    def stage_ordered(self, number: int) -> None:
        """KV is to be staged; `stage_ended` must follow."""
        self._stages.add(number)

    def unstage(self, number: int) -> None:
        """Nobody waits for it any more."""
        if number in self._stages:
            self._unstaged.add(number)

    def unstaged(self, number: int) -> bool:
        """Whether staging may stop early."""
        return number in self._unstaged

    def stage_ended(self, number: int, outcome: LoadOutcome) -> bool:
        """Staging is over. Whether anybody still waits for it."""
        self._stages.discard(number)
        if number in self._unstaged:
            self._unstaged.discard(number)
            return False
        self._staged[number] = outcome
        return True

    @property
    def loading(self) -> bool:
        """Whether a load is under way."""
        return len(self._loads) > len(self._outcomes)

    @property
    def waited_for(self) -> bool:
        """Whether the engine can do nothing for some request before we report."""
        return self.loading or bool(self._held) or bool(self._stages)

    @property
    def has_results(self) -> bool:
        """Whether `take` would name a request."""
        saved = any(not self.saving(request_id) for request_id in self._held)
        return saved or bool(self._outcomes) or bool(self._staged)

    # --- reporting ---

    def take(self) -> Results:
        """Everything that ended since the last call."""
        sent = {request_id for request_id in self._held if not self.saving(request_id)}
        for request_id in sent:
            del self._held[request_id]
        invalid: set[int] = set()
        failed: set[str] = set()
        received: set[str] = set()
        for request_id, outcome in self._outcomes.items():
            order = self._loads.pop(request_id)
            self._cancelled.discard(request_id)
            if order.kind is not LoadKind.NOW:  # of those the engine hears by their invalid blocks only
                received.add(request_id)
            if outcome.valid_end >= order.end:
                continue
            if self._tables.divisible:
                invalid.update(self._missing_blocks(order, outcome.valid_end))
            else:
                failed.add(request_id)
        results = Results(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=invalid,
            failed_recving=failed,
            report=RankReport(self._saves_ended, self._outcomes, self._orders_ended, self._staged),
        )
        self._saves_ended, self._outcomes, self._orders_ended, self._staged = {}, {}, {}, {}
        return results

    def _missing_blocks(self, order: LoadOrder, valid_end: int) -> Iterable[int]:
        """Blocks of a load that hold a token at or beyond ``valid_end``."""
        (table,), (blocks,) = self._tables.tables, order.tables
        return blocks.between(max(valid_end, order.start), order.end, table.block_tokens)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the books do not balance. For tests."""
        assert all(count > 0 for count in self._open_saves.values())
        assert self._outcomes.keys() <= self._loads.keys()
        assert self._cancelled <= self._loads.keys()
        assert self._unstaged <= self._stages
        assert not self._stages & self._staged.keys()
