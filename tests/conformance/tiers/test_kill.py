"""kill -9 at every system call and every statement of the index, and in the middle of every write."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvrelay.pool.tiers.core.tier import Outcome
from kvrelay.testing.tier_killed import DELETED, objects
from kvrelay.testing.tier_media import DiskMedium, FolderMedium, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.testing.tier_media import Medium

EVICTION_MAY_HAVE_BEGUN = 16
"""Objects from which on the tier may have dropped some to make room."""


def check(medium: Medium, acknowledged: set[int], *, deleted: bool) -> None:
    """After a restart every object is wholly there or not at all, and those acknowledged are there."""
    items = objects()
    tier = medium.open(size=1 << 20)
    loaded = load(tier, *items)  # asserts that the bytes are right
    assert {one.outcome for one in loaded} <= {Outcome.DONE, Outcome.ABSENT}
    there = {number for number, one in enumerate(loaded) if one.outcome is Outcome.DONE}
    if len(acknowledged) < EVICTION_MAY_HAVE_BEGUN:
        assert acknowledged - set(DELETED) <= there
    if deleted:
        assert not there & set(DELETED)
    assert sorted(tier.keys()) == sorted(items[number].key for number in there)
    if medium.kind == "disk":
        on_disk = sum(file.stat().st_size for file in Path(tier.where).glob("region-*"))
        assert on_disk == tier.usage().size_bytes <= 1 << 20, "what is no object's has been given back"
        assert tier.usage().objects == len(there)
    for one in items[:4]:
        assert tier.store([one]) == [Outcome.DONE]
        assert load(tier, one)[0].outcome is Outcome.DONE
    tier.close()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one: a killed process's writes are the same there, and flushing is free."""
    shared = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="kvrelay-test-", dir=shared if shared.is_dir() else tmp_path))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("kind", ["disk", "folder"])
def test_a_killed_pool_leaves_whole_objects_or_none(kind: str, memory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvrelay.testing.tier_killed", kind, str(memory)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not done.returncode, done.stderr
    killed = int(done.stdout)
    assert killed > 100, "there are many calls to die at"
    for step in range(1, killed + 2):
        directory = memory / str(step)
        lines = directory.with_suffix(".said").read_text().splitlines()
        acknowledged = {int(word) for line in lines if line != "deleted" for word in line.split()}
        medium = DiskMedium(directory) if kind == "disk" else FolderMedium(directory)
        check(medium, acknowledged, deleted="deleted" in lines)
        shutil.rmtree(directory, ignore_errors=True)
