"""The objects: the catalog, and what stands beside the rows of those that are being written in segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.pool.core.catalog import State
from kvrelay.pool.core.entry import Entry

if TYPE_CHECKING:
    from kvrelay.pool.core.catalog import Catalog
    from kvrelay.wire.messages import Spec

QUARANTINE_S = 1.0
"""How long bytes rest after their shared-memory writer's connection ended: its process may not have noticed yet."""


class Store:
    """Rows, entries, and how many objects met which end."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.entries: dict[int, Entry] = {}
        """By row, from the announcement until the object is sealed, or gone and free."""
        self.sealed_total = 0
        self.aborted_total = 0

    # --- writing in segments ---

    def begin(self, tenant: int, spec: Spec, group: str, deadline: float) -> Entry | None:
        """Make room for a new object; None when there is none."""
        row = self.catalog.add(tenant, spec.key, spec.size, spec.layers, spec.segments)
        if row is None:
            return None
        offset = self.catalog.geometry(row)[0]
        entry = self.entries[row] = Entry(row, self.catalog.handle(row), spec, offset, group, deadline)
        return entry

    def entry_of(self, handle: int) -> Entry | None:
        """The open entry of a handle."""
        row = self.catalog.row_of(handle)
        entry = None if row is None else self.entries.get(row)
        return entry if entry is not None and entry.open else None

    def join(self, entry: Entry, conn: int, *, shm: bool, deadline: float) -> None:
        """Have a connection write an object, perhaps beside others."""
        if shm and conn not in entry.writers:  # one that has written its part already does not touch it again
            entry.holdouts.add(conn)
            self.catalog.hold(entry.row)
        entry.writers.add(conn)
        entry.deadline = max(entry.deadline, deadline)

    def seal(self, entry: Entry, expires: float) -> None:
        """The object is whole: its row is all there is of it from now on."""
        entry.open = False
        self.catalog.seal(entry.row, entry.sums.tobytes(), expires)
        del self.entries[entry.row]
        self.sealed_total += 1

    def stopped(self, entry: Entry, conn: int) -> None:
        """Note that a shared-memory writer does not touch this object any more."""
        if conn in entry.holdouts:
            entry.holdouts.discard(conn)
            if not entry.holdouts and self.entries.get(entry.row) is entry:
                self._freed(entry.row, freed=self.catalog.unhold(entry.row))

    # --- the end of objects ---

    def forget(self, row: int) -> None:
        """Take an object's name; its bytes follow when nobody can touch them."""
        if self.catalog.state(row) is State.WRITING:
            self.aborted_total += 1
        entry = self.entries.get(row)
        if entry is not None:
            entry.open = False
        self._freed(row, freed=self.catalog.forget(row))

    def _freed(self, row: int, *, freed: bool) -> None:
        if freed:
            self.entries.pop(row, None)

    # --- pins ---

    def pin_rows(self, rows: bytes) -> None:
        """Keep objects from eviction and their bytes from reuse."""
        self.catalog.pin_rows(rows)

    def unpin_rows(self, rows: bytes) -> None:
        """Undo one `pin_rows`."""
        for row in memoryview(self.catalog.unpin_rows(rows)).cast("I"):
            self.entries.pop(row, None)

    # --- reading ---

    def ready(self, row: int, layers: int) -> int:
        """How many of an object's ``layers`` are whole, from the first on."""
        entry = self.entries.get(row)
        if entry is not None:
            return entry.ready
        return layers if self.catalog.sums(row, 0, 1) else 0

    def sums(self, row: int, first: int, end: int) -> bytes:
        """Checksums of segments that are written, as u64."""
        entry = self.entries.get(row)
        return self.catalog.sums(row, first, end) if entry is None else entry.sums[first:end].tobytes()

    def check_integrity(self) -> None:
        """Raise AssertionError unless entries and rows agree."""
        self.catalog.check_integrity()
        for row, entry in self.entries.items():
            info = self.catalog.info(row)
            assert self.catalog.row_of(entry.handle) == row
            assert (info.key, info.offset, info.size) == (entry.key, entry.offset, entry.size)
            assert (info.layers, info.segments) == (entry.layers, entry.segments)
            assert info.state is (State.WRITING if entry.open else State.GONE)
            assert info.held == bool(entry.holdouts)
            entry.check_integrity()
