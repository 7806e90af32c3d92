"""The disk tier's index: which object is where, in SQLite.

One connection in WAL mode, behind a lock. ``locking_mode=EXCLUSIVE`` keeps the WAL's index in memory that is not mapped
from the disk, and mapping is off: a failing disk gives error codes, not SIGBUS. ``synchronous=NORMAL``: a commit is a
write, no fsync; after a power cut the index is some earlier state of itself, and what it then says of the data is
proven by the data. An object's id is ``region << 32 | slot``, so a region's objects are neighbours and leave together.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import threading
from typing import TYPE_CHECKING, NamedTuple

from kvrelay.pool.tiers.core.tier import Shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

SLOT_BITS = 32
VARIABLES = 500
"""Keys in one statement."""
CACHE_KIB = 64 << 10
_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, offset INTEGER NOT NULL, head INTEGER NOT NULL,
    size INTEGER NOT NULL, layers INTEGER NOT NULL, segments INTEGER NOT NULL, expires REAL NOT NULL,
    digest INTEGER NOT NULL
);
"""
_SELECT = "SELECT key, id, offset, head, size, layers, segments, expires, digest FROM objects "
_OF_REGION = _SELECT + "WHERE id >= ? AND id < ? ORDER BY id"
_ABOVE = _SELECT + "WHERE key > ? ORDER BY key LIMIT ?"
_BETWEEN = _SELECT + "WHERE key > ? AND key < ? ORDER BY key LIMIT ?"
_REGIONS = (
    "SELECT id >> 32, count(*), sum(head + size), max(id) & 0xffffffff, max(offset + head + size) FROM objects "
    "GROUP BY id >> 32"
)
_BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA}


class BrokenIndexError(OSError):
    """The index itself is damaged: what it says cannot be used."""


class Place(NamedTuple):
    """Where an object is: ``head`` bytes of header at ``offset`` of a region's file, then its bytes."""

    key: bytes
    id: int
    offset: int
    head: int
    shape: Shape
    digest: int

    @property
    def region(self) -> int:
        """The region it is in."""
        return self.id >> SLOT_BITS

    @property
    def slot(self) -> int:
        """Its number in the region."""
        return self.id & ((1 << SLOT_BITS) - 1)

    @property
    def record_bytes(self) -> int:
        """What it takes of the region."""
        return self.head + self.shape.size


class Index:
    """The index in the file ``path``.

    Every method raises OSError when the disk fails and BrokenIndexError when the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        with self._errors():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
        try:
            with self._errors():
                for pragma in (
                    "locking_mode=EXCLUSIVE",  # before the first use of the WAL
                    "mmap_size=0",
                    "journal_mode=WAL",
                    "synchronous=NORMAL",
                    f"cache_size=-{CACHE_KIB}",
                    "wal_autocheckpoint=4000",
                    "journal_size_limit=67108864",
                ):
                    self._db.execute(f"PRAGMA {pragma}")
                self._db.executescript(_SCHEMA)
        except OSError:
            self._db.close()
            raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """One user at a time; SQLite's errors as OSError."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", 0) or 0
                if code & 0xFF in _BROKEN:
                    raise BrokenIndexError(errno.EIO, f"the index is damaged: {error}") from error
                number = errno.ENOSPC if code & 0xFF == sqlite3.SQLITE_FULL else errno.EIO
                raise OSError(number, f"the index: {error}") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                raise

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Where these objects are, as far as they are there."""
        found: dict[bytes, Place] = {}
        for at in range(0, len(keys), VARIABLES):
            some = keys[at : at + VARIABLES]
            marks = ",".join("?" * len(some))
            with self._errors():
                rows = self._db.execute(f"{_SELECT} WHERE key IN ({marks})", some).fetchall()
            found.update((row[0], _place(row)) for row in rows)
        return found

    def put(self, places: Iterable[Place]) -> list[Place]:
        """Enter objects, all or none; the places of those that had the same keys before."""
        new = list(places)
        with self._transaction() as db:
            old = list(self.find([place.key for place in new]).values())
            db.executemany("DELETE FROM objects WHERE id = ?", [(place.id,) for place in old])
            db.executemany(
                "INSERT INTO objects (key, id, offset, head, size, layers, segments, expires, digest) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(p.key, p.id, p.offset, p.head, *p.shape, p.digest - (1 << 63)) for p in new],
            )
        return old

    def remove(self, places: Iterable[Place]) -> list[Place]:
        """Forget objects that still are at these places; those that were."""
        with self._transaction() as db:
            return [
                place for place in places if db.execute("DELETE FROM objects WHERE id = ?", (place.id,)).rowcount == 1
            ]

    def of_region(self, region: int) -> list[Place]:
        """The objects of a region, in the order they were written."""
        first = region << SLOT_BITS
        with self._errors():
            rows = self._db.execute(_OF_REGION, (first, first + (1 << SLOT_BITS))).fetchall()
        return [_place(row) for row in rows]

    def forget_region(self, region: int, beyond: int = 0) -> int:
        """Forget what a region holds behind byte ``beyond``; how many objects."""
        first = region << SLOT_BITS
        with self._transaction() as db:
            return db.execute(
                "DELETE FROM objects WHERE id >= ? AND id < ? AND offset + head + size > ?",
                (first, first + (1 << SLOT_BITS), beyond),
            ).rowcount

    def regions(self) -> list[tuple[int, int, int, int, int]]:
        """Of every region with objects: its number, how many, their bytes, the last slot, where the last one ends."""
        with self._errors():
            return self._db.execute(_REGIONS).fetchall()

    def between(self, low: bytes, high: bytes | None, limit: int) -> list[Place]:
        """The first ``limit`` objects whose keys are above ``low`` and, if given, below ``high``, by key."""
        with self._errors():
            if high is None:
                rows = self._db.execute(_ABOVE, (low, limit)).fetchall()
            else:
                rows = self._db.execute(_BETWEEN, (low, high, limit)).fetchall()
        return [_place(row) for row in rows]

    def close(self) -> None:
        """Write everything back to the file and let go of it."""
        with self._errors():
            self._db.close()


def _place(row: tuple[bytes, int, int, int, int, int, int, float, int]) -> Place:
    key, number, offset, head, size, layers, segments, expires, digest = row
    return Place(key, number, offset, head, Shape(size, layers, segments, expires), digest + (1 << 63))
