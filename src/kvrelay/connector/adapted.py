"""One scheduler's requests with LoRA adapters: whether what they are computed with is still what they were named by.

The engine may read an adapter's files again before any step. So in the step that first computes a request (and again
after a preemption) its adapter is *doubted* until its files were looked at; what is computed until then is not saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.connector.core.requests import Entry, Phase
from kvrelay.types import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvrelay.connector.adapters import Adapter, Adapters
    from kvrelay.connector.core.ledger import Ledger
    from kvrelay.connector.naming import Naming


class AdaptedRequests:
    """The adapters of one scheduler's requests. Owned by its thread."""

    def __init__(self, adapters: Adapters | None, ledger: Ledger, naming: Naming) -> None:
        self._adapters = adapters
        self._ledger = ledger
        self._naming = naming
        self._adapter_of: dict[str, Adapter] = {}
        self._stopped = 0
        """How many of the adapters' stops have been carried out here."""
        self._leaving: list[tuple[Entry, Adapter]] = []
        """Requests that ended in doubt."""

    @property
    def numbers(self) -> set[int]:
        """Of the adapters in use."""
        return {adapter.number for adapter in self._adapter_of.values()}

    def add(self, request_id: str, adapter: Adapter) -> None:
        """A request comes that is computed with it."""
        self._adapter_of[request_id] = adapter
        if self._adapters is not None:
            self._adapters.use(adapter)

    def preempted(self, entries: Iterable[Entry | None]) -> None:
        """They are computed again: with what their adapters' files hold by then."""
        for entry in entries:
            if entry is not None and entry.chunks and entry.request_id in self._adapter_of:
                entry.doubted = True

    def take_stopped(self) -> Sequence[str]:
        """Requests with adapters that were stopped: they have no name any more, and nothing more of them is saved."""
        if self._adapters is None or self._stopped == len(self._adapters.stopped):
            return ()
        numbers = self._adapters.stopped[self._stopped :]
        self._stopped += len(numbers)
        stopped = [request_id for request_id, adapter in self._adapter_of.items() if adapter.number in numbers]
        for entry in map(self._ledger.entry, stopped):
            if entry is not None and entry.phase is not Phase.ENDED:
                self._ledger.forget(entry, Reason.ADAPTER)
        return stopped

    def end_doubts(self, scheduled: Iterable[tuple[str, int, int]]) -> None:
        """See whether adapters are what they were named: the engine may read their files again for this step."""
        if not self._adapter_of and not self._leaving:
            return
        entries = (self._ledger.entry(request_id) for request_id, _, _ in scheduled)
        doubted = [(one, self._adapter_of[one.request_id]) for one in entries if one is not None and one.doubted]
        doubted += self._leaving
        self._leaving = []
        for _, adapter in doubted:
            self._naming.check(adapter)
        for entry, adapter in doubted:
            holds = self._naming.checked(adapter)
            if holds:
                self._ledger.trust(entry)
            elif holds is not None:
                self._ledger.forget(entry, Reason.ADAPTER)
            elif entry.phase is Phase.ENDED:
                self._leaving.append((entry, adapter))

    def finished(self, entry: Entry) -> None:
        """A request ended. What is left of it to save, if it is in doubt, waits for `end_doubts`."""
        adapter = self._adapter_of.pop(entry.request_id, None)
        if adapter is not None and entry.rest is not None and entry.doubted:
            self._leaving.append((entry, adapter))

    def forget_doubts(self) -> None:
        """Nothing that ended is to be saved any more."""
        self._leaving.clear()
