"""Adapter identity: which weights a LoRA adapter has, told by its name and the whole content of its files."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.identity.weights import WEIGHT_SUFFIXES

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.identity.weights import DigestCache

ADAPTER_SUFFIXES = (*WEIGHT_SUFFIXES, ".tensors", "adapter_config.json")
"""Rank, scaling and target modules are in the configuration: they are weights, too."""


def adapter_files(folder: Path) -> list[Path]:
    """Files that say what an adapter computes, sorted. Raises `ConfigError` if there are none."""
    try:
        files = sorted(path for path in folder.iterdir() if path.name.endswith(ADAPTER_SUFFIXES) and path.is_file())
    except OSError as error:
        raise ConfigError(f"no adapter in {str(folder)!r}: {error}") from error
    if not files:
        raise ConfigError(f"no adapter in {str(folder)!r}: no file ending in {', '.join(ADAPTER_SUFFIXES)}")
    return files


def adapter_stamp(folder: Path) -> str:
    """What the file system says of an adapter's files; a change of any of them changes it. Raises `ConfigError`."""
    told = []
    for path in adapter_files(folder):
        seen = path.stat()
        told.append(f"{path.name}:{seen.st_dev}:{seen.st_ino}:{seen.st_size}:{seen.st_mtime_ns}:{seen.st_ctime_ns}")
    return "\n".join(told)


def adapter_digest(folder: Path, cache: DigestCache) -> str:
    """SHA-256 over names and content of an adapter's files. Raises `ConfigError` if they change meanwhile."""
    total = sha256()
    for path in adapter_files(folder):
        total.update(f"{len(path.name)}:{path.name}:{cache.digest(path)}\n".encode())
    cache.save()
    return total.hexdigest()
