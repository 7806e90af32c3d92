"""The media the conformance suite runs on: each opens its tier, and can damage what lies on it."""

from __future__ import annotations

import struct
import subprocess
import time
from typing import TYPE_CHECKING, Protocol

import boto3

from kvrelay.pool.tiers.core.tier import Item, Outcome, Shape, tier_key
from kvrelay.pool.tiers.disk import DiskTier
from kvrelay.pool.tiers.folder import FolderTier
from kvrelay.pool.tiers.record import pack_head
from kvrelay.pool.tiers.s3 import S3Tier
from kvrelay.testing.s3_server import CREDENTIALS
from kvrelay.transport.checksum import checksum

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvrelay.pool.tiers.core.tier import Loaded, Tier
    from kvrelay.pool.tiers.guard import Guard
    from kvrelay.testing.s3_server import S3Server

MIB = 1 << 20


def item(
    name: str | bytes,
    size: int = 4096,
    *,
    tenant: str = "default",
    layers: int = 1,
    segments: int = 1,
    expires_at: float = 0.0,
    seed: int = 0,
) -> Item:
    """An object whose bytes follow from its name and ``seed``."""
    key = name if isinstance(name, bytes) else name.encode()
    pattern = checksum(key + bytes([seed])).to_bytes(8, "little")
    data = memoryview(bytearray((pattern * (size // 8 + 1))[:size]))
    each = size // (layers * segments)
    sums = [checksum(data[at : at + each]) for at in range(0, size, each)]
    return Item(
        tier_key(tenant, key), Shape(size, layers, segments, expires_at), struct.pack(f"<{len(sums)}Q", *sums), data
    )


def load(tier: Tier | Guard, *items: Item) -> list[Loaded]:
    """Load objects; the bytes and checksums of those that come back must be theirs."""
    views = [memoryview(bytearray(one.shape.size)) for one in items]
    loaded = tier.load([(one.key, view) for one, view in zip(items, views, strict=True)])
    for one, view, result in zip(items, views, loaded, strict=True):
        if result.outcome is Outcome.DONE:
            assert view == one.data
            assert result.sums == one.sums
        else:
            assert not result.sums
    return loaded


def outcomes(tier: Tier | Guard, *items: Item) -> list[Outcome]:
    """Load objects; what became of each."""
    return [one.outcome for one in load(tier, *items)]


class Medium(Protocol):
    """Where a tier keeps its objects."""

    kind: str

    def open(self, *, size: int = 64 * MIB, clock: Callable[[], float] | None = None) -> Tier:
        """The tier on this medium, as a pool that has just started would open it."""

    def rewrite(self, one: Item, change: Callable[[bytes], bytes]) -> None:
        """Change the stored record of an object behind the tier's back. The tier is closed."""

    def lose(self) -> Callable[[], None]:
        """Make every operation fail; what is returned mends it."""


class DiskMedium:
    """A directory on a local disk."""

    kind = "disk"

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, *, size: int = 64 * MIB, clock: Callable[[], float] | None = None) -> Tier:
        """See `Medium`."""
        return DiskTier(self.path, size, clock=clock or time.time)

    def rewrite(self, one: Item, change: Callable[[bytes], bytes]) -> None:
        """See `Medium`."""
        head = pack_head(one)
        for file in self.path.glob("region-*.kv"):
            content = file.read_bytes()
            at = content.find(head[: len(head) - len(one.sums)])
            if at >= 0:
                end = at + len(head) + one.shape.size
                file.write_bytes(content[:at] + change(content[at:end]) + content[end:])
                return
        raise LookupError("the object is not on the disk")

    def lose(self) -> Callable[[], None]:
        """See `Medium`."""
        aside = self.path.with_name("aside")
        self.path.rename(aside)
        self.path.write_bytes(b"where the directory was")

        def mend() -> None:
            self.path.unlink()
            aside.rename(self.path)

        return mend


class FolderMedium:
    """A shared folder."""

    kind = "folder"

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, *, size: int = 64 * MIB, clock: Callable[[], float] | None = None) -> Tier:
        """See `Medium`."""
        return FolderTier(self.path, size, name="test", clock=clock or time.time)

    def rewrite(self, one: Item, change: Callable[[bytes], bytes]) -> None:
        """See `Medium`."""
        for file in self.path.glob("*/*/*.kv"):
            content = file.read_bytes()
            if one.key in content[: len(pack_head(one))]:
                file.write_bytes(change(content))
                return
        raise LookupError("the object is not in the folder")

    lose = DiskMedium.lose


class S3Medium:
    """A prefix in the bucket of a test's server."""

    kind = "s3"

    def __init__(self, server: S3Server, prefix: str) -> None:
        self._server = server
        self._prefix = prefix
        self._client = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region_name=CREDENTIALS["AWS_REGION"],
        )
        self.endpoint = server.endpoint

    def open(self, *, size: int = 64 * MIB, clock: Callable[[], float] | None = None) -> Tier:  # noqa: ARG002 (unbounded)
        """See `Medium`."""
        url = f"s3://{self._server.bucket}/{self._prefix}"
        return S3Tier(url, endpoint=self.endpoint, clock=clock or time.time)

    def rewrite(self, one: Item, change: Callable[[bytes], bytes]) -> None:
        """See `Medium`."""
        bucket = self._server.bucket
        for entry in self._client.list_objects_v2(Bucket=bucket, Prefix=self._prefix + "/")["Contents"]:
            content = self._client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
            if one.key in content[: len(pack_head(one))]:
                self._client.put_object(Bucket=bucket, Key=entry["Key"], Body=change(content))
                return
        raise LookupError("the object is not in the bucket")

    def lose(self) -> Callable[[], None]:
        """See `Medium`."""
        self._server.stop()
        return self._server.restart


def run(*command: str) -> str:
    """Run a system's command."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class TinyDisk:
    """A file system of ``size`` bytes in memory, mounted; only for root."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        path.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))

    def remount(self, option: str) -> None:
        """Mount it anew, ``ro`` or ``rw``."""
        run("mount", "-o", f"remount,{option}", str(self.path))

    def close(self) -> None:
        """Unmount it."""
        run("umount", "-l", str(self.path))
        self.path.rmdir()


class FailingDisk:
    """An ext4 file system on a loop device whose far end can be broken off, for EIO. Only for root."""

    def __init__(self, directory: Path, size: int) -> None:
        self.path = directory / "mounted"
        self.path.mkdir()
        self._image = directory / "image"
        with self._image.open("wb") as file:
            file.truncate(size)
        run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", str(self._image))
        self._device = run("losetup", "-f", "--show", str(self._image))
        run("mount", self._device, str(self.path))

    def forget_cached(self) -> None:
        """What is read from now on is read from the disk."""
        run("umount", str(self.path))
        run("mount", self._device, str(self.path))

    def break_off(self, left: int) -> None:
        """Let only the first ``left`` bytes be."""
        with self._image.open("r+b") as file:
            file.truncate(left)

    def close(self) -> None:
        """Unmount it."""
        run("umount", "-l", str(self.path))
        run("losetup", "-d", self._device)
