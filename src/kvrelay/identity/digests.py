"""Digests of files' whole content, cached by what the file system says about a file.

A restart costs nothing then, and a file changed in place is read again.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import stat
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

RACY_S = 2.0
"""A file changed this recently may change again without its time stamp telling: its digest is not cached."""
BLOCK_BYTES = 8 << 20


def default_cache_file(environ: Mapping[str, str]) -> Path | None:
    """Where digests are kept: ``$XDG_CACHE_HOME/kvrelay/weights.json``, or below the user's home.

    None where there is no home: in a place that others can write to, a digest could be forged.
    """
    root = environ.get("XDG_CACHE_HOME")
    home = environ.get("HOME") or _passwd_home()
    if root:
        return Path(root) / "kvrelay" / "weights.json"
    return Path(home) / ".cache" / "kvrelay" / "weights.json" if home else None


def _passwd_home() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container's user without an entry
        return None


class DigestCache:
    """File digests, remembered by device, inode, size and times. A broken or unwritable cache only costs time.

    Engines whose weights have one digest exchange KV, so a forged one makes wrong answers: a file or a directory that
    is another user's, or that others can write to, is not used.
    """

    def __init__(self, path: Path | None, now: Callable[[], float] = time.time) -> None:
        """``path``: the JSON file, None to remember nothing; ``now``: seconds since the epoch."""
        self._path = path
        self._now = now
        self._digests = {} if path is None else _load(path)
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
        if not self._fresh or self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours(self._path.parent.stat()):
                return
            merged = {**_load(self._path), **self._fresh}
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


def _load(path: Path) -> dict[str, str]:
    """What a cache's file holds; nothing where it cannot be read or trusted."""
    try:
        with path.open(encoding="utf-8") as file:
            for place, status in ((path.parent, path.parent.stat()), (path, os.fstat(file.fileno()))):
                if not _is_ours(status):
                    log.warning(
                        "%s belongs to another user or can be written to by others: digests of weights in it are not "
                        "used, and weights are read at every start; `chown` it to this user and `chmod go-w` it",
                        place,
                    )
                    return {}
            loaded = json.load(file)
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


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
