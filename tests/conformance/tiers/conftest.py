from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvrelay.testing.tier_media import DiskMedium, FailingDisk, FolderMedium, S3Medium, TinyDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrelay.pool.tiers.core.tier import Tier
    from kvrelay.testing.tier_media import Medium


@pytest.fixture(params=["disk", "folder", "s3"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    if request.param == "disk":
        return DiskMedium(tmp_path / "tier")
    if request.param == "folder":
        return FolderMedium(tmp_path / "tier")
    request.getfixturevalue("credentials")
    return S3Medium(request.getfixturevalue("s3_server"), tmp_path.name)


@pytest.fixture
def opened(medium: Medium) -> Iterator[Callable[[], Tier]]:
    """Opens the medium's tier, closing the one opened before: a restart."""
    tiers: list[Tier] = []

    def reopen() -> Tier:
        while tiers:
            tiers.pop().close()
        tiers.append(medium.open())
        return tiers[-1]

    yield reopen
    while tiers:
        tiers.pop().close()


@pytest.fixture
def tier(opened: Callable[[], Tier]) -> Tier:
    return opened()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[TinyDisk]:
    if os.geteuid():
        pytest.skip("mounting a small file system needs root")
    disk = TinyDisk(tmp_path / "tiny", 4 << 20)
    yield disk
    disk.close()


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[FailingDisk]:
    if os.geteuid() or shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        pytest.skip("a disk that fails needs root, mkfs.ext4 and loop devices")
    disk = FailingDisk(tmp_path, 16 << 20)
    yield disk
    disk.close()
