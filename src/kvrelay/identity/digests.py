"""Digests of files' whole content, cached by what the file system says about a file.

A restart costs nothing then, and a file changed in place is read again.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RACY_S = 2.0
"""A file changed this recently may change again without its time stamp telling: its digest is not cached."""
BLOCK_BYTES = 8 << 20


def default_cache_file(environ: Mapping[str, str]) -> Path:
    """Where digests are kept: ``$XDG_CACHE_HOME/kvrelay/weights.json``."""
    root = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/tmp") / ".cache"  # noqa: S108  a cache
    return Path(root) / "kvrelay" / "weights.json"


class DigestCache:
    """File digests, remembered by device, inode, size and times. A broken or unwritable cache only costs time."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """``path``: the JSON file; ``now``: seconds since the epoch."""
        self._path = path
        self._now = now
        try:
            loaded = json.loads(path.read_text())
        except (OSError, ValueError):
            loaded = {}
        self._digests: dict[str, str] = loaded if isinstance(loaded, dict) else {}
        self._fresh: dict[str, str] = {}

    def digest(self, path: Path) -> str:
        """SHA-256 of the file's whole content, in hexadecimal. Raises `ConfigError` if it changes while being read."""
        before = path.stat()
        name = stamp(before)
        known = self._digests.get(name)
        if isinstance(known, str):
            return known
        value = _read_digest(path)
        after = path.stat()
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise ConfigError(f"{path} changed while its digest was computed: start again when it is complete")
        if self._now() - max(after.st_mtime, after.st_ctime) > RACY_S:
            self._digests[name] = self._fresh[name] = value
        return value

    def save(self) -> None:
        """Write what is new, atomically, keeping what others wrote meanwhile."""
        if not self._fresh:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            merged = {**DigestCache(self._path)._digests, **self._fresh}
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                try:
                    json.dump(merged, file)
                    file.flush()
                    os.replace(file.name, self._path)  # noqa: PTH105  the atomic one
                except OSError:
                    Path(file.name).unlink(missing_ok=True)
                    raise
        except OSError:
            return
        self._fresh = {}


def _read_digest(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def stamp(seen: os.stat_result) -> str:
    """What the file system says of a file, as one name; whatever changes the file changes it."""
    return f"{seen.st_dev}:{seen.st_ino}:{seen.st_size}:{seen.st_mtime_ns}:{seen.st_ctime_ns}"


def files_ending_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """A folder's files of these kinds, sorted by name. Raises `OSError`."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffixes) and path.is_file())
