"""A tier's directory: what it is, and that only one pool uses it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from kvrelay.errors import ConfigError

IDENTITY = "kvrelay-tier.json"
LOCK = "lock"
LOST_AND_FOUND = "lost+found"


class Identity(msgspec.Struct, frozen=True):
    """What the file `IDENTITY` says."""

    format: str
    version: int


def claim(path: str | Path, identity: Identity) -> Path:
    """Make a directory a tier's, or see that it is this kind of tier's already.

    Raises:
        ConfigError: it cannot be used, holds something else, or is of another version.
    """
    directory = Path(path)
    marker = directory / IDENTITY
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            for entry in directory.iterdir():
                if entry.name != LOST_AND_FOUND and not entry.name.startswith(IDENTITY):  # of a claim that was killed
                    raise ConfigError(
                        f"tier directory {directory}: it holds {entry.name} and is not a tier's: give an empty one"
                    )
            fresh = directory / f"{IDENTITY}.{os.getpid()}"
            fresh.write_bytes(msgspec.json.encode(identity))
            fresh.replace(marker)
        found = msgspec.json.decode(marker.read_bytes(), type=Identity)
    except OSError as error:
        raise ConfigError(f"tier directory {directory}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"tier directory {directory}: {IDENTITY} cannot be read ({error}): empty the directory"
        ) from error
    if found != identity:
        raise ConfigError(
            f"tier directory {directory}: it is a {found.format} of version {found.version}, not a {identity.format} "
            f"of version {identity.version}: give another directory, or empty this one"
        )
    return directory


def lock(directory: Path) -> int:
    """Keep every other pool out of a directory; the descriptor that does, until it is closed.

    Raises:
        ConfigError: another pool is in it.
    """
    try:
        fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"tier directory {directory}: {error.strerror or error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace") or "unknown"
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise ConfigError(
                f"tier directory {directory}: another pool (process {holder}) uses it: give each pool its own"
            ) from error
        raise ConfigError(f"tier directory {directory}: {error.strerror or error}") from error
    return fd
