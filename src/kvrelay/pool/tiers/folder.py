"""A shared folder, such as one on NFS: a file an object, named by its key, so that pools on many hosts may share it.

A file appears whole, under its final name, by an atomic rename, and is never changed afterwards; two pools that store
the same object at once both succeed. There is no index and no lock: the names are all there is. Files are not flushed
one by one: after a power cut of the server a file may be empty or short, which its header and checksums show.

With ``size``, every pool drops the oldest files when it has written a tenth of ``size`` since it last looked and finds
more than ``size`` there. Loading a file makes it young again, at most once in `YOUNG_S`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.pool.tiers.core.tier import MOST_EVICTED, Loaded, Outcome, Shape, Usage
from kvrelay.pool.tiers.directory import IDENTITY as MARKER
from kvrelay.pool.tiers.directory import Identity, claim
from kvrelay.pool.tiers.naming import SUFFIX, object_path, tenant_prefix
from kvrelay.pool.tiers.record import HEAD_READ_BYTES, DamagedError, Head, pack_head, parse_head, proven_sums
from kvrelay.pool.tiers.regions import read_fully, write_fully
from kvrelay.transport.checksum import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvrelay.pool.tiers.core.tier import Item

log = logging.getLogger(__name__)

IDENTITY = Identity("kvrelay folder tier", 1)
TEMPORARY = "tmp"
ABANDONED_S = 3_600.0
"""A temporary file this old belongs to nobody any more."""
YOUNG_S = 600.0
SWEEP_SHARE = 10
SWEEP_TO = 0.9


class FolderTier:
    """Objects as files below ``path``; ``size``: about how many bytes of them there may be, None for no limit.

    ``name``: of this pool among those that share the folder, for names of temporary files.

    Raises:
        ConfigError: the directory cannot be used.
    """

    kind = "folder"

    def __init__(
        self, path: str | Path, size: int | None = None, *, name: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory = claim(path, IDENTITY)
        self.where = str(self._directory)
        self._size = size
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._serial = 0
        self._unseen_bytes = 0
        """Written since the last look at everything."""
        self._usage = Usage(0, 0)
        self._evicted: list[bytes] = []
        try:
            self._sweep(abandoned=True)
        except OSError as error:
            raise ConfigError(f"tier directory {self._directory}: {error.strerror or error}") from error

    def _path(self, key: bytes) -> Path:
        return self._directory.joinpath(*object_path(key))

    # --- storing ---

    def store(self, items: Sequence[Item]) -> list[Outcome]:
        """See `Tier.store`."""
        outcomes = [self._store(item) for item in items]
        if self._size is not None and self._unseen_bytes > self._size // SWEEP_SHARE:
            self._sweep()
        return outcomes

    def _store(self, item: Item) -> Outcome:
        path = self._path(item.key)
        present = self._head(path, item.key)
        if present is not None and (present.shape, present.digest) == (item.shape, checksum(item.sums)):
            return Outcome.DONE
        with self._lock:
            self._serial += 1
            serial = self._serial
        header = pack_head(item)
        if self._size is not None and len(header) + item.shape.size > self._size:
            return Outcome.REFUSED
        temporary = self._directory / TEMPORARY / f"{self._name}-{os.getpid()}-{serial}"
        fd = self._create(temporary)
        try:
            try:
                write_fully(fd, [header, item.data], 0)
            finally:
                os.close(fd)  # where NFS tells of what it could not write
            try:
                temporary.replace(path)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        with self._lock:
            self._unseen_bytes += len(header) + item.shape.size
            objects, size = self._usage
            self._usage = Usage(objects + (present is None), size + len(header) + item.shape.size)
        return Outcome.DONE

    @staticmethod
    def _create(path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, flags, 0o600)

    # --- finding and loading ---

    def _head(self, path: Path, key: bytes) -> Head | None:
        """The header of an object's file; None: there is none that can be used."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            head = parse_head(os.pread(fd, HEAD_READ_BYTES, 0))
            if head.key != key or os.fstat(fd).st_size != head.record_bytes:
                return None  # `load` finds out what is wrong with it
        except DamagedError:
            return None
        finally:
            os.close(fd)
        return head

    def find(self, keys: Sequence[bytes], *, prefix: bool = False) -> list[Shape | None]:
        """See `Tier.find`."""
        found: list[Shape | None] = [None] * len(keys)
        for number, key in enumerate(keys):
            head = self._head(self._path(key), key)
            if head is not None and not 0 < head.shape.expires_at <= self._clock():
                found[number] = head.shape
            elif prefix:
                break
        return found

    def load(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[Loaded]:
        """See `Tier.load`."""
        return [self._load(key, into) for key, into in wanted]

    def _load(self, key: bytes, into: memoryview) -> Loaded:
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Loaded(Outcome.ABSENT)
        try:
            head = parse_head(os.pread(fd, HEAD_READ_BYTES, 0))
            if head.key != key:
                raise DamagedError("it is another object's")
            if head.shape.size != into.nbytes or 0 < head.shape.expires_at <= self._clock():
                return Loaded(Outcome.ABSENT)
            header = bytearray(head.head_bytes)
            status = os.fstat(fd)
            if status.st_size != head.record_bytes or not read_fully(fd, header, into, 0):
                raise DamagedError(f"the file has {status.st_size} bytes, not {head.record_bytes}")
            sums = proven_sums(key, head.shape, header, into)
            if self._size is not None and self._clock() - status.st_mtime > YOUNG_S:
                with contextlib.suppress(OSError):
                    os.utime(path)
        except DamagedError:
            log.debug("folder tier %s: damaged file %s", self.where, path, exc_info=True)
            self._unlink(path)
            return Loaded(Outcome.CORRUPT)
        except OSError:
            log.debug("folder tier %s: unreadable file %s", self.where, path, exc_info=True)
            return Loaded(Outcome.FAILED)
        finally:
            os.close(fd)
        return Loaded(Outcome.DONE, sums)

    # --- forgetting ---

    @staticmethod
    def _unlink(path: str | Path) -> bool:
        try:
            Path(path).unlink()
        except FileNotFoundError:
            return False
        return True

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `Tier.delete`."""
        return sum(self._unlink(self._path(key)) for key in keys)

    def purge(self, tenant: str) -> int:
        """See `Tier.purge`."""
        return sum(self._unlink(entry.path) for entry in _files(self._directory / tenant_prefix(tenant)))

    def keys(self) -> Iterator[bytes]:
        """See `Tier.keys`."""
        for entry in self._objects():
            with contextlib.suppress(FileNotFoundError, DamagedError):
                with Path(entry.path).open("rb", buffering=0) as file:
                    key = parse_head(file.read(HEAD_READ_BYTES)).key
                if self._path(key) == Path(entry.path):
                    yield key

    def _objects(self) -> Iterator[os.DirEntry[str]]:
        for entry in _scan(self._directory):
            if entry.name not in (TEMPORARY, MARKER) and entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)

    def _sweep(self, *, abandoned: bool = False) -> None:
        """Look at everything: count it, and drop the oldest of what is too much."""
        now = self._clock()
        with contextlib.suppress(OSError):
            for entry in _scan(self._directory / TEMPORARY) if abandoned else ():
                if now - entry.stat().st_mtime > ABANDONED_S:
                    self._unlink(entry.path)
        with self._lock:
            self._unseen_bytes = 0
        if self._size is None:
            return
        found: list[tuple[float, int, str]] = []
        with contextlib.suppress(FileNotFoundError):  # another pool sweeps too
            for entry in self._objects():
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime, status.st_size, entry.path))
        total, count = sum(size for _, size, _ in found), len(found)
        if total > self._size:
            for _, size, path in sorted(found):
                if total <= self._size * SWEEP_TO:
                    break
                key = self._key_of(path)
                if self._unlink(path) and key is not None:
                    self._remember_evicted(key)
                total, count = total - size, count - 1
        with self._lock:
            self._usage = Usage(count, total)

    def _remember_evicted(self, key: bytes) -> None:
        with self._lock:
            if len(self._evicted) < MOST_EVICTED:
                self._evicted.append(key)

    @staticmethod
    def _key_of(path: str) -> bytes | None:
        try:
            with Path(path).open("rb", buffering=0) as file:
                return parse_head(file.read(HEAD_READ_BYTES)).key
        except (OSError, DamagedError):
            return None

    def usage(self) -> Usage:
        """See `Tier.usage`: what this pool found there when it last looked (with ``size``), and has written since."""
        return self._usage

    def take_evicted(self) -> list[bytes]:
        """See `Tier.take_evicted`."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def close(self) -> None:
        """See `Tier.close`."""


def _scan(path: str | Path) -> Iterator[os.DirEntry[str]]:
    """The entries of a directory; none if there is no such directory."""
    try:
        entries = os.scandir(path)
    except FileNotFoundError:
        return
    with entries:
        yield from entries


def _files(tenant: str | Path) -> Iterator[os.DirEntry[str]]:
    """The objects' files of a tenant's directory."""
    for fan in _scan(tenant):
        if fan.is_dir(follow_symlinks=False):
            for entry in _scan(fan.path):
                if entry.name.endswith(SUFFIX):
                    yield entry
