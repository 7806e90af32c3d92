from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
from pathlib import Path

import pytest

from kvrelay.errors import ConfigError
from kvrelay.identity import digests
from kvrelay.identity.core.chunks import chain_seed, prompt_chunks
from kvrelay.identity.core.namespace import namespace
from kvrelay.identity.digests import DigestCache, default_cache_file, stamp
from kvrelay.identity.weights import CLOCKS_S, weights_identity

LATER = 4e9
"""A clock long after every file was written."""


@pytest.fixture
def cache_file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weights.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"\x01" * 1000)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"\x02" * 1000)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    return folder


def identity(model: Path, cache_file: Path) -> str:
    return weights_identity(str(model), DigestCache(cache_file, now=lambda: LATER))


def change_byte(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[500] ^= 1
    file.write_bytes(raw)


def test_one_changed_weight_changes_every_key(model: Path, cache_file: Path) -> None:
    before = identity(model, cache_file)
    change_byte(model / "model-00002-of-00002.safetensors")
    after = identity(model, cache_file)

    def keys(weights: str) -> set[bytes]:
        seed = chain_seed(namespace({"layers": "4", "weights": weights}))
        return {chunk.key for chunk in prompt_chunks(seed, list(range(300)), 64)}

    assert not keys(before) & keys(after)
    assert keys(before) == keys(before)


def test_a_weight_changed_in_place_is_seen_though_size_and_mtime_are_put_back(model: Path, cache_file: Path) -> None:
    file = model / "model-00001-of-00002.safetensors"
    before, times = identity(model, cache_file), file.stat()
    change_byte(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert identity(model, cache_file) != before


def test_equal_weights_in_two_places_are_one(model: Path, tmp_path: Path, cache_file: Path) -> None:
    twin = tmp_path / "twin"
    twin.mkdir()
    for file in model.iterdir():
        (twin / file.name).write_bytes(file.read_bytes())
    (twin / "README.md").write_text("not a weight")
    assert identity(model, cache_file) == identity(twin, cache_file)


def test_swapped_shards_are_other_weights(model: Path, cache_file: Path) -> None:
    before = identity(model, cache_file)
    one, two = model / "model-00001-of-00002.safetensors", model / "model-00002-of-00002.safetensors"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert identity(model, cache_file) != before


def test_an_unchanged_file_is_read_once(model: Path, cache_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = identity(model, cache_file)
    monkeypatch.setattr(digests, "_read_digest", lambda path: pytest.fail(f"{path} was read again"))
    assert identity(model, cache_file) == first


def test_a_file_changed_just_now_is_not_cached(model: Path, cache_file: Path) -> None:
    written = (model / "model-00001-of-00002.safetensors").stat().st_mtime
    weights_identity(str(model), DigestCache(cache_file, now=lambda: written + 1))
    assert not cache_file.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"1:2": 3}'])
def test_a_broken_cache_only_costs_time(model: Path, cache_file: Path, content: str) -> None:
    expected = identity(model, cache_file)
    cache_file.write_text(content)
    assert identity(model, cache_file) == expected


def test_an_unwritable_cache_only_costs_time(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert identity(model, tmp_path / "file" / "weights.json") == identity(model, tmp_path / "other.json")


def test_two_writers_of_the_cache_keep_each_others_digests(model: Path, tmp_path: Path, cache_file: Path) -> None:
    one, other = (DigestCache(cache_file, now=lambda: LATER) for _ in range(2))
    lone = tmp_path / "lone.gguf"
    lone.write_bytes(b"gguf")
    weights_identity(str(model), one)
    weights_identity(str(lone), other)
    assert len(json.loads(cache_file.read_text())) == 4


def test_a_lone_file_is_its_content(tmp_path: Path, cache_file: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    one.write_bytes(b"gguf")
    other.write_bytes(b"gguf")
    assert identity(one, cache_file) == identity(other, cache_file)


def test_a_hub_snapshot_is_its_commit_as_long_as_nobody_put_files_in(tmp_path: Path, cache_file: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--a--b" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    blob = tmp_path / "models--a--b" / "blob"
    blob.write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(blob)
    assert identity(snapshot, cache_file) == f"hub:models--a--b@{commit}"
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(b"weights")
    assert identity(snapshot, cache_file).startswith("sha256:")


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_weights_that_cannot_be_identified_are_an_error_that_names_the_mend(
    tmp_path: Path, cache_file: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="weights_id in kv_connector_extra_config"):
        identity(tmp_path / name, cache_file)


def test_a_file_that_changes_while_it_is_read_is_an_error(
    model: Path, cache_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_and_change(path: Path) -> str:
        path.write_bytes(b"longer and longer" * 100)
        return "digest"

    monkeypatch.setattr(digests, "_read_digest", read_and_change)
    with pytest.raises(ConfigError, match="changed while its digest was computed"):
        identity(model, cache_file)


def test_the_cache_lies_where_xdg_says() -> None:
    assert str(default_cache_file({"XDG_CACHE_HOME": "/x"})) == "/x/kvrelay/weights.json"
    assert str(default_cache_file({"HOME": "/h"})) == "/h/.cache/kvrelay/weights.json"


def test_without_a_home_in_the_environment_the_cache_is_in_the_users_own_or_nowhere(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert default_cache_file({}) == Path(home, ".cache", "kvrelay", "weights.json")

    def nobody(_: int) -> pwd.struct_passwd:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert default_cache_file({}) is None
    cache = DigestCache(None, now=lambda: LATER)
    assert cache.digest(model / "model-00001-of-00002.safetensors") == cache.digest(
        model / "model-00001-of-00002.safetensors"
    )
    cache.save()


@pytest.mark.parametrize("forged", ["file", "directory"])
def test_a_cache_that_others_can_write_to_is_neither_used_nor_written(
    model: Path, cache_file: Path, forged: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = model / "model-00001-of-00002.safetensors"
    honest = DigestCache(None).digest(weights)
    cache_file.parent.mkdir(mode=0o700)
    cache_file.write_text(json.dumps({stamp(weights.stat()): "forged"}))
    cache_file.chmod(0o600)
    assert DigestCache(cache_file).digest(weights) == "forged"
    (cache_file if forged == "file" else cache_file.parent).chmod(0o777)
    cache = DigestCache(cache_file, now=lambda: LATER)
    assert cache.digest(weights) == honest
    assert "can be written to by others" in caplog.text
    cache.save()
    assert (honest in cache_file.read_text()) == (forged == "file")
    assert "forged" not in cache_file.read_text() or forged == "directory"


def test_a_cache_of_another_user_is_not_used(model: Path, cache_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = model / "model-00001-of-00002.safetensors"
    cache_file.parent.mkdir(mode=0o700)
    cache_file.write_text(json.dumps({stamp(weights.stat()): "forged"}))
    monkeypatch.setattr(os, "getuid", lambda: cache_file.stat().st_uid + 1)
    assert DigestCache(cache_file).digest(weights) != "forged"


def test_the_name_of_given_weights_is_the_same_in_every_release(tmp_path: Path, cache_file: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"one")
    (folder / "b.safetensors").write_bytes(b"two")
    assert identity(folder, cache_file) == "sha256:d03f08432003f65529f2cecfc88b6de54a52c71da6e1a6f48238d0404fc647ec"


def test_a_cache_that_cannot_be_written_leaves_nothing_behind(
    model: Path, cache_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(json, "dump", full)
    assert identity(model, cache_file)
    assert list(cache_file.parent.iterdir()) == []


@pytest.mark.parametrize("how", ["in place", "renamed over", "linked elsewhere", "model linked elsewhere"])
def test_weights_that_came_after_the_engine_began_are_none_it_can_be_known_by(
    model: Path, cache_file: Path, how: str
) -> None:
    """1. The engine begins, and reads its weights. 2. They are replaced. 3. It asks what they are called."""
    shard, named = model / "model-00002-of-00002.safetensors", model
    if how == "linked elsewhere":
        shard.rename(shard.with_suffix(".1"))
        shard.symlink_to(shard.with_suffix(".1"))
    elif how == "model linked elsewhere":
        named = model.with_name("current")
        named.symlink_to(model)
        shutil.copytree(model, model.with_name("next"))
    begun = max(file.lstat().st_ctime for file in (*model.iterdir(), *model.parent.iterdir())) + 0.001
    cache = DigestCache(cache_file, now=lambda: LATER)
    assert weights_identity(str(named), cache, begun=begun)
    begun -= CLOCKS_S
    until_files_are_written_after(begun + CLOCKS_S, model.with_name("probe"))
    if how == "in place":
        seen = shard.stat()
        change_byte(shard)
        os.utime(shard, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    elif how == "renamed over":
        shutil.copy2(shard, model / "new")
        (model / "new").replace(shard)
    else:
        link, target = (
            (shard, shard.with_suffix(".2")) if how == "linked elsewhere" else (named, model.with_name("next"))
        )
        link.with_name("link").symlink_to(target)
        link.with_name("link").replace(link)
        if how == "linked elsewhere":
            shutil.copy2(shard.with_suffix(".1"), target)
    with pytest.raises(ConfigError, match="start it again"):
        weights_identity(str(named), cache, begun=begun)


def until_files_are_written_after(moment: float, probe: Path) -> None:
    """Their clock is that of the kernel's ticks."""
    while not probe.exists() or probe.stat().st_ctime <= moment:
        probe.write_text("")


def test_the_code_a_model_brings_counts_where_it_is_used(model: Path, cache_file: Path) -> None:
    def digest(*, code: bool) -> str:
        return weights_identity(str(model), DigestCache(cache_file, now=lambda: LATER), code=code)

    plain = digest(code=False)
    assert digest(code=True) == plain
    (model / "modeling.py").write_text("KV = 1")
    one = digest(code=True)
    (model / "modeling.py").write_text("KV = 2")
    assert len({plain, one, digest(code=True)}) == 3
    assert digest(code=False) == plain
