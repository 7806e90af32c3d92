"""Weights identity: which weights made a KV cache.

Local models are identified by the whole content of their weight files; hub models by the commit their snapshot was
resolved to. Digests are cached by what the file system says about a file, so a restart costs nothing and a file
changed in place is read again.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".safetensors.index.json", ".bin.index.json")
RACY_S = 2.0
"""A file changed this recently may change again without its time stamp telling: its digest is not cached."""
BLOCK_BYTES = 8 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")


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
        name = f"{before.st_dev}:{before.st_ino}:{before.st_size}:{before.st_mtime_ns}:{before.st_ctime_ns}"
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
                json.dump(merged, file)
            os.replace(file.name, self._path)  # noqa: PTH105  the atomic one
        except OSError:
            return
        self._fresh = {}


def _read_digest(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Weight files and their indexes in a model folder, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(WEIGHT_SUFFIXES) and path.is_file())


def weights_identity(model: str, cache: DigestCache) -> str:
    """Identity of the weights ``model`` names: a folder, a weight file, or the snapshot folder of a hub model.

    Raises `ConfigError` when there is nothing to identify; the mend is the connector's ``weights_id``.
    """
    path = Path(model)
    mend = "; set weights_id in kv_connector_extra_config to a name that changes whenever the weights do"
    if path.is_dir():
        resolved = path.resolve()
        files = weight_files(path)
        in_hub = resolved.parent.name == "snapshots" and _COMMIT.fullmatch(resolved.name)
        # The hub's cache links to blobs named by content; a plain file there was put in by hand.
        if in_hub and files and all(file.is_symlink() for file in files):
            return f"hub:{resolved.parent.parent.name}@{resolved.name}"
    elif path.is_file():
        files = [path]
    else:
        raise ConfigError(f"the weights of {model!r} cannot be identified: no such folder or file{mend}")
    if not files:
        raise ConfigError(f"the weights of {model!r} cannot be identified: no file ending in {WEIGHT_SUFFIXES}{mend}")
    total = sha256()
    for file in files:
        # A lone file's name says nothing about its weights; within a folder names tell shards apart.
        name = file.name if path.is_dir() else ""
        total.update(f"{len(name)}:{name}:{cache.digest(file)}\n".encode())
    cache.save()
    return f"sha256:{total.hexdigest()}"
