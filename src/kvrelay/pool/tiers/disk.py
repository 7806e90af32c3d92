"""The local disk: records in region files, found through an index, dropped a region at a time.

New objects are appended to the region being filled. When ``size`` is reached the oldest region goes (or one that is
mostly dead already), and with it what it holds, except for what was loaded since it was written: that is appended
again. So the disk sees large sequential writes only, room never fragments, and eviction is FIFO with a second chance.

Order of a store: data, then index. What a crash leaves is data without index, which the next start deletes. After a
power cut the index may also name data that never reached the medium: it does not match its checksums. Regions are
flushed when they are full, not before (``sync``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.pool.tiers.books import Record, Region, victim
from kvrelay.pool.tiers.core.tier import MOST_EVICTED, Loaded, Outcome, Usage, tier_key
from kvrelay.pool.tiers.directory import Identity, claim, lock
from kvrelay.pool.tiers.index import SLOT_BITS, BrokenIndexError, Index
from kvrelay.pool.tiers.record import DamagedError, pack_head, parse_head, proven_sums
from kvrelay.pool.tiers.regions import Regions, read_fully
from kvrelay.transport.checksum import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvrelay.pool.tiers.core.tier import Item, Shape
    from kvrelay.pool.tiers.index import Place

log = logging.getLogger(__name__)

IDENTITY = Identity("kvrelay disk tier", 1)
MIN_SIZE_BYTES = 1 << 20
MOST_KEPT_BYTES = 32 << 20
"""Loaded objects of a dropped region that are appended again, at most; and no more than a quarter of the region."""
FULL_DISK_TRIES = 3
"""Regions dropped for one store when the disk is full before ``size`` is reached."""
PAGE = 1_000


def default_region_bytes(size: int) -> int:
    """At most about 1,000 regions, and where they would be small, some 64."""
    return max(min(size // 64, 256 << 20), size // 1_024, 64 << 10)


class DiskTier:
    """At most ``size`` bytes of objects in a directory of its own (the index comes on top, some 150 bytes an object).

    Raises:
        ConfigError: the directory cannot be used, or another pool uses it.
    """

    kind = "disk"

    def __init__(
        self,
        path: str | Path,
        size: int,
        *,
        region_bytes: int | None = None,
        sync: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if size < MIN_SIZE_BYTES:
            raise ConfigError(f"disk tier {path}: {size} bytes is too small: at least {MIN_SIZE_BYTES}")
        self._directory = claim(path, IDENTITY)
        self.where = str(self._directory)
        self._size = size
        self._region_bytes = region_bytes or default_region_bytes(size)
        self._clock = clock
        self._lock = threading.RLock()
        self._files = Regions(self._directory, sync=sync)
        self._table: dict[int, Region] = {}
        self._used_bytes = 0
        self._dead: set[int] = set()
        """Ids that could not be removed from the index when they were deleted."""
        self._evicted: list[bytes] = []
        self._lock_fd = lock(self._directory)
        try:
            self._recover()
        except OSError as error:
            os.close(self._lock_fd)
            raise ConfigError(f"tier directory {self._directory}: {error.strerror or error}") from error
        except BaseException:
            os.close(self._lock_fd)
            raise

    # --- start ---

    def _recover(self) -> None:
        """Take over what an earlier run left whole, delete the rest."""
        try:
            self._index = Index(self._directory / "index.db")
            rows = self._index.regions()
        except BrokenIndexError as error:
            log.warning("disk tier %s starts empty: %s", self.where, error)
            with contextlib.suppress(AttributeError, OSError):
                self._index.close()
            self._wipe()
            self._index, rows = Index(self._directory / "index.db"), []
        sizes = self._files.sizes()
        self._next = max([*sizes, *(row[0] for row in rows)], default=-1) + 1
        for number, objects, live_bytes, last_slot, end in rows:
            size = sizes.get(number, 0)
            if end > size:
                self._index.forget_region(number, beyond=size)
                places = self._index.of_region(number)
            else:
                places = None
            books = (objects, live_bytes) if places is None else (len(places), sum(p.record_bytes for p in places))
            if books[0]:
                self._table[number] = Region(number, sizes.pop(number), *books, last_slot + 1)
        for number in sizes:
            self._files.drop(number)
        self._used_bytes = sum(region.size for region in self._table.values())
        while self._used_bytes > self._size and self._evict():
            pass  # it was larger last time

    def _wipe(self) -> None:
        for name in ("index.db", "index.db-wal", "index.db-shm", "index.db-journal"):
            (self._directory / name).unlink(missing_ok=True)
        for number in self._files.sizes():
            self._files.drop(number)

    def _start_over(self) -> None:
        """The index is damaged: forget everything."""
        log.warning("disk tier %s forgets everything: its index is damaged", self.where)
        with contextlib.suppress(OSError):
            self._index.close()
        with contextlib.suppress(OSError):
            self._files.finish()
        self._table.clear()
        self._dead.clear()
        self._used_bytes = 0
        self._wipe()
        self._index = Index(self._directory / "index.db")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer at a time; a damaged index is begun anew before the error goes on."""
        with self._lock:
            try:
                yield
            except BrokenIndexError:
                self._start_over()
                raise

    def _places(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Where objects are that can be used."""
        try:
            found = self._index.find(keys)
        except BrokenIndexError:
            with self._writing():
                found = self._index.find(keys)  # another thread may have begun anew meanwhile
        now = self._clock()
        return {
            key: place
            for key, place in found.items()
            if place.region in self._table and place.id not in self._dead and not 0 < place.shape.expires_at <= now
        }

    # --- storing ---

    def store(self, items: Sequence[Item]) -> list[Outcome]:
        """See `Tier.store`."""
        outcomes: list[Outcome] = []
        records: list[Record] = []
        with self._writing():
            known = self._places([item.key for item in items])
            for item in items:
                digest = checksum(item.sums)
                place = known.get(item.key)
                if place is not None and (place.shape, place.digest) == (item.shape, digest):
                    self._table[place.region].use(place)
                    outcomes.append(Outcome.DONE)
                    continue
                head = pack_head(item)
                record = Record(item.key, item.shape, digest, len(head), (head, item.data))
                if record.record_bytes > self._size:
                    outcomes.append(Outcome.REFUSED)
                    continue
                records.append(record)
                outcomes.append(Outcome.DONE)
            self._append(records)
        return outcomes

    def _append(self, records: Sequence[Record]) -> None:
        batch: list[Record] = []
        size = 0
        for record in records:
            left = self._region_bytes - (self._files.end if self._files.current is not None else 0)
            if batch and size + record.record_bytes > left:
                self._write(batch, size)
                batch, size = [], 0
            batch.append(record)
            size += record.record_bytes
        if batch:
            self._write(batch, size)

    def _write(self, batch: list[Record], size: int) -> None:
        while self._used_bytes + size > self._size and self._evict():
            pass
        for tries_left in reversed(range(FULL_DISK_TRIES)):
            try:
                return self._write_once(batch, size)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if isinstance(error, BrokenIndexError) or not full or not tries_left or not self._evict():
                    raise
        return None

    def _write_once(self, batch: list[Record], size: int) -> None:
        if self._files.current is not None and self._files.end and self._files.end + size > self._region_bytes:
            self._finish()
        if self._files.current is None:
            self._files.begin(self._next)
            self._table[self._next] = Region(self._next)
            self._next += 1
        region = self._table[self._files.current or 0]
        end = self._files.write([buffer for record in batch for buffer in record.buffers])
        replaced = self._index.put(region.places(batch, self._files.end))
        self._files.accept(end)
        region.wrote(batch, end)
        self._used_bytes += size
        self._dropped(replaced)

    def _finish(self) -> None:
        """Close the region being filled; if the medium did not take it, forget it."""
        number = self._files.current
        if number is None:
            return
        try:
            self._files.finish()
        except OSError:
            self._remove_region(self._table[number])
            raise
        if not self._table[number].objects:
            self._remove_region(self._table[number])

    # --- making room ---

    def _evict(self) -> bool:
        """Drop a region; whether there was one."""
        closed = [region for region in self._table.values() if region.number != self._files.current]
        if not closed:
            if self._files.current is None:
                return False
            self._finish()
            closed = list(self._table.values())
            if not closed:
                return True
        region = victim(closed)
        kept, lost = self._survivors(region)
        self._remove_region(region)
        self._evicted += lost[: MOST_EVICTED - len(self._evicted)]
        self._append(kept)
        return True

    def _survivors(self, region: Region) -> tuple[list[Record], list[bytes]]:
        """What of a region is worth appending again, and the keys of the rest."""
        kept: list[Record] = []
        lost: list[bytes] = []
        budget = min(MOST_KEPT_BYTES, region.size // 4)
        now = self._clock()
        with contextlib.suppress(FileNotFoundError), self._files.reading(region.number) as fd:
            for place in self._index.of_region(region.number):
                shape = place.shape
                stale = place.id in self._dead or 0 < shape.expires_at <= now
                if stale or not region.used[place.slot] or place.record_bytes > budget:
                    if not stale:
                        lost.append(place.key)
                    continue
                record = bytearray(place.record_bytes)
                try:
                    whole = read_fully(fd, bytearray(), memoryview(record), place.offset)
                except OSError:
                    whole = False
                if whole:
                    budget -= place.record_bytes
                    kept.append(Record(place.key, shape, place.digest, place.head, (memoryview(record),)))
                else:
                    lost.append(place.key)
        return kept, lost

    def _remove_region(self, region: Region) -> None:
        """Forget a region. If only its file can go, what the index says of it is ignored until the next start."""
        self._table.pop(region.number, None)
        self._used_bytes -= region.size
        self._files.drop(region.number)
        self._dead = {number for number in self._dead if number >> SLOT_BITS != region.number}
        with contextlib.suppress(OSError):
            self._index.forget_region(region.number)

    def _dropped(self, places: Sequence[Place]) -> None:
        """Objects of these places are gone from the index."""
        for place in places:
            region = self._table.get(place.region)
            if region is None:
                continue
            region.lost(place)
            if not region.objects and region.number != self._files.current:
                self._remove_region(region)

    # --- the rest ---

    def find(self, keys: Sequence[bytes], *, prefix: bool = False) -> list[Shape | None]:  # noqa: ARG002 (all at once is as cheap)
        """See `Tier.find`."""
        places = self._places(keys)
        return [places[key].shape if key in places else None for key in keys]

    def load(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[Loaded]:
        """See `Tier.load`."""
        places = self._places([key for key, _ in wanted])
        loaded = [Loaded(Outcome.ABSENT)] * len(wanted)
        by_region: dict[int, list[tuple[int, Place]]] = {}
        for number, (key, into) in enumerate(wanted):
            place = places.get(key)
            if place is not None and place.shape.size == into.nbytes:
                by_region.setdefault(place.region, []).append((number, place))
        for region, some in by_region.items():
            try:
                with self._files.reading(region) as fd:
                    for number, place in sorted(some, key=lambda pair: pair[1].offset):
                        loaded[number] = self._load(fd, place, wanted[number][1])
            except FileNotFoundError:
                self._forget([place for _, place in some])  # dropped meanwhile, or deleted by somebody
            except OSError:
                log.debug("disk tier %s: region %d cannot be opened", self.where, region, exc_info=True)
                for number, _ in some:
                    loaded[number] = Loaded(Outcome.FAILED)
        return loaded

    def _load(self, fd: int, place: Place, into: memoryview) -> Loaded:
        header = bytearray(place.head)
        try:
            if not read_fully(fd, header, into, place.offset):
                raise DamagedError("the file is too short")
            if parse_head(header).digest != place.digest:
                raise DamagedError("other checksums are where this object's were written")
            sums = proven_sums(place.key, place.shape, header, into)
        except DamagedError:
            log.debug("disk tier %s: damaged record", self.where, exc_info=True)
            self._forget([place])
            return Loaded(Outcome.CORRUPT)
        except OSError:
            log.debug("disk tier %s: unreadable record", self.where, exc_info=True)
            self._forget([place])
            return Loaded(Outcome.FAILED)
        region = self._table.get(place.region)
        if region is not None:
            region.use(place)
        return Loaded(Outcome.DONE, sums)

    def _forget(self, places: Sequence[Place]) -> int:
        """Forget objects, whatever the index's disk does; how many there were."""
        with self._writing():
            try:
                removed = self._index.remove(places)
            except BrokenIndexError:
                raise
            except OSError:
                self._dead.update(place.id for place in places)
                return len(places)
            self._dropped(removed)
            return len(removed)

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `Tier.delete`."""
        with self._writing():
            return self._forget(list(self._places(keys).values()))

    def purge(self, tenant: str) -> int:
        """See `Tier.purge`."""
        low, high = tier_key(tenant, b""), tier_key(tenant, b"\xff" * 65)
        count = 0
        with self._writing():
            while places := self._index.between(low, high, PAGE):
                low = places[-1].key
                count += self._forget(places)
        return count

    def keys(self) -> Iterator[bytes]:
        """See `Tier.keys`."""
        low = b""
        while places := self._index.between(low, None, PAGE):
            low = places[-1].key
            usable = self._places([place.key for place in places])
            yield from usable

    def usage(self) -> Usage:
        """See `Tier.usage`."""
        regions = list(self._table.values())
        return Usage(sum(region.objects for region in regions), sum(region.size for region in regions))

    def take_evicted(self) -> list[bytes]:
        """See `Tier.take_evicted`."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def flush(self) -> None:
        """Have everything stored so far on the medium; the region being filled is closed.

        Raises:
            OSError: the medium did not take it.
        """
        with self._writing():
            self._finish()

    def close(self) -> None:
        """See `Tier.close`."""
        with self._lock:
            try:
                with contextlib.suppress(OSError):
                    self._finish()
                with contextlib.suppress(OSError):
                    self._index.close()
            finally:
                os.close(self._lock_fd)
