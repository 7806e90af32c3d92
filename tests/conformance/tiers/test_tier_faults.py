"""Media that fail: misses and counters, never wrong bytes, never an exception past the guard."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING

import pytest

from kvrelay.circuit import Circuit
from kvrelay.errors import ConfigError
from kvrelay.pool.tiers.core.tier import Outcome
from kvrelay.pool.tiers.disk import DiskTier
from kvrelay.pool.tiers.folder import FolderTier
from kvrelay.pool.tiers.guard import Guard
from kvrelay.pool.tiers.s3 import S3Tier
from kvrelay.testing.tier_media import (
    MIB,
    DiskMedium,
    FailingDisk,
    FolderMedium,
    S3Medium,
    TinyDisk,
    item,
    load,
    outcomes,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.testing.tier_media import Medium


# --- the whole medium ---


def test_a_lost_medium_costs_misses_is_left_alone_and_is_used_again_when_it_is_back(
    medium: Medium, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    tier = medium.open()
    guard = Guard(tier, name="below", circuit=lambda: Circuit(failures=3, first_pause_s=5), now=lambda: now[0])
    one = item("one")
    assert guard.store([one]) == [Outcome.DONE]
    mend = medium.lose()
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert guard.store([item("two")]) in ([Outcome.FAILED], [Outcome.DONE])
            guard.find([one.key])
            assert outcomes(guard, one)[0] in (Outcome.FAILED, Outcome.ABSENT)
    figures = guard.figures()
    assert figures["errors"] >= 3
    assert figures["paused"] == 1
    assert figures["skipped"] > 0
    assert len([record for record in caplog.records if "tier below" in record.message]) == 1, "said once, not each time"
    mend()
    assert guard.find([one.key]) == [None]
    assert guard.figures()["skipped"] == figures["skipped"] + 1, "still paused"
    now[0] = 20.0
    guard.find([one.key])
    assert guard.store([one]) == [Outcome.DONE]
    assert outcomes(guard, one) == [Outcome.DONE]
    assert guard.figures()["paused"] == 0
    guard.close()


def test_a_tier_with_a_bug_fails_like_a_medium(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    tier = FolderTier(tmp_path / "tier", name="test")
    tier._directory = None  # type: ignore[assignment]
    guard = Guard(tier, name="below")
    assert guard.find([b"x", b"y"]) == [None, None]
    assert guard.figures()["errors"] == 1
    assert "a bug in tier below" in caplog.text


def test_a_damaged_object_is_counted(medium: Medium) -> None:
    guard = Guard(medium.open(), name="below")
    one = item("one")
    guard.store([one])
    medium.rewrite(one, lambda record: record[:-1] + bytes([record[-1] ^ 1]))
    assert outcomes(guard, one) == [Outcome.CORRUPT]
    assert guard.find([one.key]) == [None]
    assert guard.figures()["corrupt"] == 1
    assert guard.figures()["paused"] == 0, "one bad object says nothing of the medium"
    guard.close()


# --- full, read-only and failing disks ---


@pytest.mark.parametrize("kind", ["disk", "folder"])
def test_a_full_disk_keeps_what_it_has_and_takes_what_fits(kind: str, tiny_disk: TinyDisk) -> None:
    """The tier may grow to 64 MiB, the disk to 4."""
    medium = DiskMedium(tiny_disk.path / "tier") if kind == "disk" else FolderMedium(tiny_disk.path / "tier")
    tier = medium.open()
    guard = Guard(tier, name="below", circuit=lambda: Circuit(failures=1_000))
    items = [item(f"{number}", 300_000) for number in range(40)]
    stored = [one for one in items if guard.store([one]) == [Outcome.DONE]]
    assert len(stored) >= 8
    results = load(guard, *items)
    there = [one for one, result in zip(items, results, strict=True) if result.outcome is Outcome.DONE]
    assert len(there) >= 8
    assert {result.outcome for result in results} <= {Outcome.DONE, Outcome.ABSENT}
    if kind == "disk":
        assert stored == items, "old regions made room"
    else:
        assert there == stored
        assert guard.figures()["errors"] == len(items) - len(stored)
        guard.delete([one.key for one in there])
        assert guard.store([items[-1]]) == [Outcome.DONE], "there is room again, and nothing was left lying about"
    guard.close()
    tier = medium.open()
    assert {result.outcome for result in load(tier, *items)} <= {Outcome.DONE, Outcome.ABSENT}
    tier.close()


def test_a_disk_that_is_filled_by_others_takes_nothing_and_serves_what_it_has(tiny_disk: TinyDisk) -> None:
    tier = DiskMedium(tiny_disk.path / "tier").open()
    guard = Guard(tier, name="below", circuit=lambda: Circuit(failures=1_000))
    one = item("one", 100_000)
    guard.store([one])
    free = os.statvfs(tiny_disk.path)
    (tiny_disk.path / "others").write_bytes(bytes(free.f_bavail * free.f_bsize))
    # The only region is the one being filled: what does not fit behind `one` would cost `one`.
    assert guard.store([item("large", 2 * MIB)]) == [Outcome.FAILED]
    assert {result.outcome for result in load(guard, one)} <= {Outcome.DONE, Outcome.ABSENT}
    (tiny_disk.path / "others").unlink()
    assert guard.store([one, item("large", 2 * MIB)]) == [Outcome.DONE] * 2
    assert outcomes(guard, one, item("large", 2 * MIB)) == [Outcome.DONE] * 2
    guard.close()


def test_a_folder_that_has_become_read_only_serves_what_it_has(tiny_disk: TinyDisk) -> None:
    medium = FolderMedium(tiny_disk.path / "tier")
    one = item("one")
    guard = Guard(medium.open(), name="below")
    guard.store([one])
    tiny_disk.remount("ro")
    for _ in range(5):
        assert guard.store([item("two")]) == [Outcome.FAILED]
    assert guard.figures()["paused"] == 1
    assert guard.find([one.key]) == [one.shape]
    assert outcomes(guard, one) == [Outcome.DONE]
    guard.close()
    tiny_disk.remount("rw")


def test_a_disk_that_takes_no_writes_serves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(DiskMedium(tmp_path / "tier").open(), name="below")
    one = item("one")
    guard.store([one])

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        for _ in range(5):
            assert guard.store([item("two")]) == [Outcome.FAILED]
        assert outcomes(guard, one) == [Outcome.DONE]
        assert guard.figures()["paused"] == 1
    guard.close()


def test_a_disk_that_fails_to_flush_loses_that_region_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that failed may have dropped what it was to write: nothing of the region can be relied on."""
    tier = DiskTier(tmp_path / "tier", 8 * MIB, region_bytes=128 << 10)
    guard = Guard(tier, name="below")
    first = [item(f"first {number}", 30_000) for number in range(4)]
    second = [item(f"second {number}", 30_000) for number in range(4)]
    third = item("third", 30_000)
    guard.store(first)
    guard.store(second)  # closes the first region: flushed

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        assert guard.store([third]) == [Outcome.FAILED]
    assert set(outcomes(guard, *first)) == {Outcome.DONE}
    assert set(outcomes(guard, *second)) == {Outcome.ABSENT}
    assert guard.store([*second, third]) == [Outcome.DONE] * 5
    guard.close()


@pytest.mark.parametrize("kind", ["disk", "folder"])
def test_a_failing_disk_costs_the_objects_on_its_bad_part(kind: str, failing_disk: FailingDisk) -> None:
    medium = DiskMedium(failing_disk.path / "tier") if kind == "disk" else FolderMedium(failing_disk.path / "tier")
    items = [item(f"{number}", 100_000) for number in range(90)]
    tier = medium.open(size=12 * MIB)
    tier.store(items)
    tier.close()
    failing_disk.forget_cached()
    guard = Guard(medium.open(size=12 * MIB), name="below", circuit=lambda: Circuit(failures=1_000))
    failing_disk.break_off(10 * MIB)
    found = [outcomes(guard, one)[0] for one in items]
    assert set(found) <= {Outcome.DONE, Outcome.FAILED, Outcome.ABSENT, Outcome.CORRUPT}
    assert found.count(Outcome.DONE) > 10
    assert found.count(Outcome.FAILED) > 5
    assert guard.figures()["errors"] == found.count(Outcome.FAILED)
    failing_disk.break_off(16 * MIB)
    guard.close()


def test_region_files_that_somebody_deleted_are_misses(tmp_path: Path) -> None:
    guard = Guard(DiskMedium(tmp_path / "tier").open(), name="below")
    one = item("one")
    guard.store([one])
    for file in (tmp_path / "tier").glob("region-*"):
        file.unlink()
    assert outcomes(guard, one) == [Outcome.ABSENT]
    assert guard.find([one.key]) == [None]
    guard.close()


# --- the disk's index ---


@pytest.mark.parametrize("damage", ["garbage", "empty", "truncated", "missing"])
def test_a_damaged_index_means_an_empty_tier_not_a_wrong_one(tmp_path: Path, damage: str) -> None:
    medium = DiskMedium(tmp_path / "tier")
    tier = medium.open()
    items = [item(f"{number}") for number in range(200)]
    tier.store(items)
    tier.close()
    index = medium.path / "index.db"
    content = index.read_bytes()
    match damage:
        case "garbage":
            index.write_bytes(b"\xa5" * len(content))
        case "empty":
            index.write_bytes(b"")
        case "truncated":
            index.write_bytes(content[: len(content) // 2])
        case "missing":
            index.unlink()
    guard = Guard(medium.open(), name="below")
    assert set(outcomes(guard, *items)) <= {Outcome.ABSENT, Outcome.DONE, Outcome.FAILED}
    guard.store(items)
    assert guard.store(items) == [Outcome.DONE] * 200
    assert set(outcomes(guard, *items)) == {Outcome.DONE}
    guard.close()


def test_an_index_of_an_earlier_time_is_found_out(tmp_path: Path) -> None:
    """After a power cut the index may be older than the data, or name data that was never written."""
    medium = DiskMedium(tmp_path / "tier")
    old = [item(f"{number}", seed=1) for number in range(50)]
    tier = medium.open()
    tier.store(old)
    tier.close()
    earlier = (medium.path / "index.db").read_bytes()
    (medium.path / "index.db").unlink()
    tier = medium.open()
    new = [item(f"{number}", seed=2) for number in range(50)]
    tier.store(new)
    tier.close()
    (medium.path / "index.db").write_bytes(earlier)
    for file in medium.path.glob("region-*"):
        file.rename(medium.path / "region-00000000.kv")  # the very place the old index speaks of
    tier = medium.open()
    assert set(outcomes(tier, *old)) <= {Outcome.CORRUPT, Outcome.ABSENT}
    tier.close()


# --- directories ---


@pytest.mark.parametrize("medium", ["disk", "folder"], indirect=True)
def test_a_directory_with_something_else_in_it_is_refused(medium: Medium, tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds thesis\.txt and is not a tier's"):
        medium.open()
    assert (tmp_path / "tier" / "thesis.txt").exists()


def test_a_directory_of_another_kind_or_version_is_refused(tmp_path: Path) -> None:
    FolderTier(tmp_path / "tier", name="test").close()
    with pytest.raises(ConfigError, match="kvrelay folder tier of version 1, not a kvrelay disk tier of version 1"):
        DiskTier(tmp_path / "tier", MIB)
    (tmp_path / "tier" / "kvrelay-tier.json").write_text('{"format": "kvrelay folder tier", "version": 7}')
    with pytest.raises(ConfigError, match="version 7"):
        FolderTier(tmp_path / "tier", name="test")
    (tmp_path / "tier" / "kvrelay-tier.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        FolderTier(tmp_path / "tier", name="test")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        DiskTier(tmp_path / "file" / "tier", MIB)


def test_two_pools_do_not_share_a_disk_tier(tmp_path: Path) -> None:
    first = DiskTier(tmp_path / "tier", MIB)
    with pytest.raises(ConfigError, match=f"another pool \\(process {os.getpid()}\\) uses it"):
        DiskTier(tmp_path / "tier", MIB)
    first.close()
    DiskTier(tmp_path / "tier", MIB).close()


def test_two_pools_share_a_folder(tmp_path: Path) -> None:
    ours = FolderTier(tmp_path / "tier", name="ours")
    theirs = FolderTier(tmp_path / "tier", name="theirs")
    one = item("one")
    assert ours.store([one]) == theirs.store([one]) == [Outcome.DONE]
    assert outcomes(theirs, one) == [Outcome.DONE]
    theirs.delete([one.key])
    assert outcomes(ours, one) == [Outcome.ABSENT]


def test_an_address_or_bucket_that_cannot_be_right_is_refused(medium: Medium) -> None:
    with pytest.raises(ConfigError, match="s3://BUCKET"):
        S3Tier("file:///tmp")
    if isinstance(medium, S3Medium):
        with pytest.raises(ConfigError, match="no-such-bucket"):
            S3Tier("s3://no-such-bucket", endpoint=medium.endpoint)


# --- room ---


@pytest.mark.parametrize("kind", ["disk", "folder"])
def test_a_bounded_tier_stays_within_its_bound_and_tells_what_it_dropped(kind: str, tmp_path: Path) -> None:
    medium = DiskMedium(tmp_path / "tier") if kind == "disk" else FolderMedium(tmp_path / "tier")
    tier = medium.open(size=2 * MIB)
    items = [item(f"{number}", 50_000) for number in range(200)]
    for one in items:
        assert tier.store([one]) == [Outcome.DONE]
    bound = 2 * MIB if kind == "disk" else 2 * MIB * 1.2
    stored = sum(file.stat().st_size for file in (tmp_path / "tier").rglob("*.kv"))
    assert MIB < stored <= bound
    there = {one.key for one, shape in zip(items, tier.find([one.key for one in items]), strict=True) if shape}
    assert len(there) > 20
    assert items[-1].key in there
    dropped = tier.take_evicted()
    assert sorted(dropped) == sorted({one.key for one in items} - there)
    assert tier.take_evicted() == []
    tier.close()


def test_what_is_loaded_again_and_again_outlives_what_is_not(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "tier", 2 * MIB, region_bytes=256 << 10)
    hot = item("hot", 30_000)
    tier.store([hot])
    for number in range(300):
        tier.store([item(f"{number}", 30_000)])
        assert outcomes(tier, hot) == [Outcome.DONE]
    tier.close()


def test_room_of_deleted_objects_is_used_before_live_ones_are_dropped(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "tier", 2 * MIB, region_bytes=128 << 10)
    oldest = [item(f"oldest {number}", 30_000) for number in range(4)]
    tier.store(oldest)
    for turn in range(100):
        passing = [item(f"{turn}/{number}", 30_000) for number in range(4)]
        tier.store(passing)
        tier.delete([one.key for one in passing])
    assert outcomes(tier, *oldest) == [Outcome.DONE] * 4
    assert tier.usage().size_bytes < MIB
    tier.close()


def test_an_object_larger_than_the_tier_is_refused_and_nothing_dropped_for_it(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "tier", 2 * MIB)
    one = item("one")
    tier.store([one])
    assert tier.store([item("huge", 3 * MIB)]) == [Outcome.REFUSED]
    assert outcomes(tier, one) == [Outcome.DONE]
    tier.close()


def test_a_smaller_bound_than_last_time_holds_from_the_start(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "tier", 8 * MIB, region_bytes=256 << 10)
    items = [item(f"{number}", 100_000) for number in range(70)]
    tier.store(items)
    tier.close()
    tier = DiskTier(tmp_path / "tier", 2 * MIB)
    assert tier.usage().size_bytes <= 2 * MIB
    assert outcomes(tier, items[-1]) == [Outcome.DONE]
    tier.close()


def test_temporary_files_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    FolderTier(tmp_path / "tier", name="test").close()
    temporary = tmp_path / "tier" / "tmp"
    temporary.mkdir(exist_ok=True)
    (temporary / "dead").touch()
    os.utime(temporary / "dead", (0, 0))
    (temporary / "living").touch()
    FolderTier(tmp_path / "tier", name="test").close()
    assert [entry.name for entry in temporary.iterdir()] == ["living"]


def test_a_capped_tier_moves_no_more_than_its_cap(tmp_path: Path) -> None:
    waited: list[float] = []
    now = [0.0]
    guard = Guard(FolderTier(tmp_path / "tier", name="test"), name="below", write_limit=MIB, now=lambda: now[0])

    class Closing:
        def wait(self, seconds: float) -> None:
            waited.append(seconds)
            now[0] += seconds

        def is_set(self) -> bool:
            return False

    guard._closing = Closing()  # type: ignore[assignment]
    for number in range(10):
        guard.store([item(f"{number}", MIB)])
    assert 8.5 <= now[0] <= 9.0
    assert guard.figures()["throttled_seconds"] == pytest.approx(sum(waited))
