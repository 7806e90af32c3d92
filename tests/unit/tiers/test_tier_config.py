from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import ConfigError
from kvrelay.pool.tiers import config, folder
from kvrelay.pool.tiers.config import Fill, open_tiers, parse_flag, parse_tiers
from kvrelay.testing.tier_media import item

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_that_cannot_be_looked_through_is_refused_and_the_tiers_before_it_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = parse_tiers([parse_flag(f"disk:{tmp_path}/disk:1MiB"), parse_flag(f"folder:{tmp_path}/folder:1MiB")])
    scan = os.scandir

    def failing(path: Any) -> Any:
        if os.fspath(path) == str(tmp_path / "folder"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing)
        with pytest.raises(ConfigError, match=f"tier directory {tmp_path}/folder: Input/output error"):
            open_tiers(configs)
    for guard in open_tiers(configs):  # nothing is locked any more
        guard.close()


def test_no_tier_stays_open_whatever_keeps_another_from_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = parse_tiers([parse_flag(f"disk:{tmp_path}/disk:1MiB"), parse_flag(f"folder:{tmp_path}/folder")])
    with monkeypatch.context() as patch:
        patch.setattr(config, "FolderTier", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_tiers(configs)
    for guard in open_tiers(configs):
        guard.close()


def test_a_folder_remembers_so_many_of_the_objects_it_dropped_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MOST_EVICTED", 3)
    tier = folder.FolderTier(tmp_path, 20_000, name="here")
    for number in range(60):
        tier.store([item(f"object {number}", 1_000)])
    assert len(tier.take_evicted()) == 3
    assert tier.take_evicted() == []


def test_a_table_becomes_a_tier_with_defaults() -> None:
    disk, folder, s3 = parse_tiers(
        [
            {"kind": "disk", "path": "/ssd", "size": "1GiB", "read_limit": "500MB", "fill": "sealed"},
            {"kind": "folder", "path": "/nfs"},
            {"kind": "s3", "name": "bucket", "url": "s3://b/p", "endpoint": "http://localhost:9000", "region": "here"},
        ]
    )
    assert (disk.name, disk.size_bytes, disk.read_limit, disk.write_limit) == ("disk", 1 << 30, 500_000_000, None)
    assert disk.fill is Fill.SEALED
    assert (folder.name, folder.size_bytes, folder.fill) == ("folder", None, Fill.EVICTED)
    assert (s3.name, s3.endpoint) == ("bucket", "http://localhost:9000")


@pytest.mark.parametrize(
    ("flag", "table"),
    [
        ("disk:/ssd/kv:10GiB", {"kind": "disk", "path": "/ssd/kv", "size": "10GiB"}),
        ("disk:/a:b:1GiB", {"kind": "disk", "path": "/a:b", "size": "1GiB"}),
        ("folder:/nfs", {"kind": "folder", "path": "/nfs"}),
        ("folder:/nfs:1TiB", {"kind": "folder", "path": "/nfs", "size": "1TiB"}),
        ("s3://bucket/some/where", {"kind": "s3", "url": "s3://bucket/some/where"}),
    ],
)
def test_a_flag_stands_for_a_table(flag: str, table: dict[str, Any]) -> None:
    assert parse_flag(flag) == table
    parse_tiers([table])


@pytest.mark.parametrize("flag", ["", "disk", "disk:/ssd", "disk::1GiB", "floppy:/a:1", "s3:bucket", "folder:"])
def test_a_flag_that_is_no_tier_is_told_the_legal_forms(flag: str) -> None:
    with pytest.raises(ConfigError, match="disk:PATH:SIZE"):
        parse_flag(flag)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tiers(
            [
                {"kind": "tape"},
                {"kind": "disk", "pathh": "/a", "size": "large", "fill": "never", "readers": 0},
                {"kind": "s3", "url": 7, "write_limit": True},
            ]
        )
    text = str(caught.value)
    for part in (
        "tier 1: kind 'tape': legal are disk, folder and s3",
        "tier 2 (disk): unknown key 'pathh'",
        "tier 2 (disk): path is missing",
        "tier 2: size 'large'",
        "tier 2 (disk): fill 'never': legal are evicted and sealed",
        "tier 2 (disk): readers 0",
        "tier 3 (s3): url 7: must be a text",
        "tier 3: write_limit True",
    ):
        assert part in text


def test_two_tiers_of_one_name_or_one_directory_are_refused() -> None:
    disk = {"kind": "disk", "path": "/ssd", "size": "1GiB"}
    with pytest.raises(ConfigError, match="the name 'disk' is taken"):
        parse_tiers([disk, {**disk, "path": "/other"}])
    with pytest.raises(ConfigError, match="directory of tier 'disk' already"):
        parse_tiers([disk, {"kind": "folder", "path": "/ssd/."}])


def test_when_one_tier_cannot_be_opened_the_others_are_closed_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tables = [
        {"kind": "disk", "path": str(tmp_path / "disk"), "size": "1MiB"},
        {"kind": "folder", "path": str(tmp_path / "file")},
    ]
    with pytest.raises(ConfigError, match="File exists"):
        open_tiers(parse_tiers(tables))
    (guard,) = open_tiers(parse_tiers(tables[:1]))
    guard.close()
