"""Adapter identity: which weights a LoRA adapter has, told by its name and the whole content of its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.identity.core.weights import ADAPTER_SUFFIXES, digest_of_files
from kvrelay.identity.digests import files_ending_in, stamp

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.identity.digests import DigestCache


def adapter_files(folder: Path) -> list[Path]:
    """Files that say what an adapter computes, sorted. Raises `ConfigError` if there are none."""
    try:
        files = files_ending_in(folder, ADAPTER_SUFFIXES)
    except OSError as error:
        raise ConfigError(f"no adapter in {str(folder)!r}: {error}") from error
    if not files:
        raise ConfigError(f"no adapter in {str(folder)!r}: no file ending in {', '.join(ADAPTER_SUFFIXES)}")
    return files


def adapter_stamp(folder: Path) -> str:
    """What the file system says of an adapter's files; a change of any of them changes it. Raises `ConfigError`."""
    return "\n".join(f"{path.name}:{stamp(path.stat())}" for path in adapter_files(folder))


def adapter_digest(folder: Path, cache: DigestCache) -> str:
    """SHA-256 over names and content of an adapter's files. Raises `ConfigError` if they change meanwhile."""
    digest = digest_of_files((path.name, cache.digest(path)) for path in adapter_files(folder))
    cache.save()
    return digest
