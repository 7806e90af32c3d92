"""Where a pool server's settings come from, and what is told when they cannot work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import ConfigError
from kvrelay.pool.config import PoolConfig, load, resolve, show
from kvrelay.pool.core.tenants import Quota, Tenant
from kvrelay.pool.settings import flag_of, leaves, variable_of

if TYPE_CHECKING:
    from pathlib import Path


def problems_of(
    flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, text: str = ""
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(flags or {}, environ or {}, text, "pool.toml")
    return list(caught.value.problems)


def test_a_flag_wins_over_the_environment_which_wins_over_the_file_which_wins_over_the_default() -> None:
    text = 'size = "1GiB"\nttl_s = 60\nlog_level = "debug"\n'
    environ = {"KVRELAY_POOL_SIZE": "2GiB", "KVRELAY_POOL_TTL_S": "30"}
    config = resolve({"size": "3GiB"}, environ, text, "pool.toml")
    assert (config.settings.size, config.settings.ttl_s, config.settings.log_level) == (3 << 30, 30.0, "debug")
    assert [config.origins[path] for path in ("size", "ttl_s", "log_level", "unix")] == [
        "--size", "KVRELAY_POOL_TTL_S", "pool.toml", "default",
    ]  # fmt: skip


def test_every_setting_but_lists_of_tables_has_a_flag_and_a_variable_of_its_own() -> None:
    assert [path for path in leaves() if flag_of(path) is None] == ["tenants"]
    assert [path for path in leaves() if variable_of(path) is None] == ["tenants", "tiers"]
    assert len({flag_of(path) for path in leaves()}) == len(leaves())
    assert len({variable_of(path) for path in leaves()}) == len(leaves()) - 1


def test_unknown_keys_are_fatal_wherever_they_are_and_the_nearest_known_one_is_named() -> None:
    found = problems_of({}, {}, 'sise = "1GiB"\n[tls]\ncrt = "x"\n[[tenants]]\nname = "a"\ntokn_file = "t"\n')
    assert [line for line in found if line.startswith("sise ")] == [
        "sise (from pool.toml): unknown setting; did you mean size?"
    ]
    assert "tls.crt (from pool.toml): unknown setting; did you mean tls.cert?" in found
    assert "tenants.0.tokn_file (from pool.toml): unknown setting; did you mean token_file?" in found
    assert problems_of({}, {"KVRELAY_POOL_SIZ": "1GiB"}) == [
        "KVRELAY_POOL_SIZ (environment): unknown setting; did you mean KVRELAY_POOL_SIZE?"
    ]


def test_settings_of_kvrelay_up_in_the_environment_of_the_pool_it_starts_do_no_harm() -> None:
    resolve({}, {"KVRELAY_POOL_PORT": "7420", "KVRELAY_POOL_ARGS": "", "KVRELAY_POOL_TOKEN": "t", "KVRELAY_PORT": "1"})


def test_all_problems_are_told_at_once_with_the_place_each_came_from() -> None:
    found = problems_of({"size": "1KiB"}, {"KVRELAY_POOL_LISTEN": "nowhere"}, 'log_level = "loud"\n')
    assert len(found) == 3
    assert "size = '1KiB' (from --size): too small: at least 1 MiB" in found
    assert any(line.startswith("listen = 'nowhere' (from KVRELAY_POOL_LISTEN): ") for line in found)
    assert any(line.startswith("log_level = 'loud' (from pool.toml): ") for line in found)


@pytest.mark.parametrize(
    ("flags", "text", "told"),
    [
        ({"listen": "none"}, "", "would listen nowhere"),
        ({"watermarks.low": "0.9", "watermarks.high": "0.8"}, "", "watermarks.low = 0.9 is above"),
        ({"tls.key": "k.pem"}, "", "have no effect without tls.cert"),
        ({"tls.cert": "/no/such.pem"}, "", "tls.cert = '/no/such.pem': no such file"),
        ({"admin.token_file": "/dev/null"}, "", "has no effect without admin.listen"),
        ({"admin.listen": "0.0.0.0:7421"}, "", "can be reached from other hosts and asks for no token"),
        ({"admin.listen": "localhost.example:7421"}, "", "can be reached from other hosts and asks for no token"),
        ({"admin.listen": "[::12]:7421"}, "", "can be reached from other hosts and asks for no token"),
        ({"unix": "/" + "x" * 120}, "", "over 107 bytes"),
        ({"numa_nodes": "0,x"}, "", "numa_nodes.1 = 'x'"),
        ({"huge_pages": "4KiB"}, "", "'2MiB' or '1GiB'"),
        ({}, '[[tenants]]\nname = "a"\n', "no client could connect as it"),
        ({}, '[[tenants]]\nname = "a"\ncertificate = "a"\n', "give --tls-client-ca"),
        ({"token_file": "/no/such"}, '[[tenants]]\nname = "a"\ncertificate = "a"\n', "drop --token-file"),
        ({"token_file": "/no/such"}, "", "token_file: token file '/no/such' cannot be read"),
        ({}, "tls = 2\n", "tls = 2"),
        ({}, '[tenants]\nname = "a"\n', "(from pool.toml): legal are tables, each under [[tenants]]"),
        ({}, "tiers = 3\n", "legal are tables, each under [[tiers]]"),
        ({}, "numa_nodes = true\n", "numa_nodes = True (from pool.toml): legal are a list"),
        ({}, "size = \n", "not valid TOML"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_what_to_change(flags: dict[str, Any], text: str, told: str) -> None:
    assert any(told in problem for problem in problems_of(flags, {}, text)), problems_of(flags, {}, text)


def write_tenants(directory: Path, *, b_token: str = "token b") -> Path:
    (directory / "a").write_text("token a\n")
    (directory / "b").write_text(f"{b_token}\n")
    file = directory / "pool.toml"
    file.write_text(
        'size = "64MiB"\n[[tenants]]\nname = "a"\ntoken_file = "a"\nshm = true\n'
        '[[tenants]]\nname = "b"\ntoken_file = "b"\nquota = "8MiB"\nmax_objects = 1000\n'
        "max_connections = 16\n"
    )
    return file


def test_tenants_and_relative_paths_are_read_from_the_file(tmp_path: Path) -> None:
    config = load({}, {}, write_tenants(tmp_path))
    assert config.tenants == (
        Tenant(name="a", token="token a", shm=True),
        Tenant(name="b", token="token b", quota=Quota(quota_bytes=8 << 20, max_objects=1000, max_connections=16)),
    )
    assert config.needs_token


def test_two_tenants_with_one_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'b' has the same token as tenant 'a'"):
        load({}, {}, write_tenants(tmp_path, b_token="token a"))


def test_without_tenants_everybody_is_the_default_one_with_shared_memory() -> None:
    assert resolve({}, {}).tenants == (Tenant(name="default", token=None, shm=True),)
    assert resolve({}, {"KVRELAY_POOL_TOKEN": "t"}).tenants == (Tenant(name="default", token="t", shm=True),)
    assert not resolve({}, {}).needs_token


def test_no_token_shows_in_what_is_printed_or_logged(tmp_path: Path) -> None:
    config = load({}, {"KVRELAY_POOL_TOKEN": "sesame"}, write_tenants(tmp_path))
    for text in (show(config), repr(config), repr(config.tenants)):
        assert "token a" not in text
        assert "sesame" not in text


def reread(config: PoolConfig) -> PoolConfig:
    return resolve({}, {}, show(config), "/")


def test_what_is_shown_can_be_used_as_a_file(tmp_path: Path) -> None:
    config = load({"numa_nodes": "0,1", "watermarks.high": "0.9", "watermarks.low": "0.8"}, {}, write_tenants(tmp_path))
    assert reread(config).settings == config.settings
    assert "# unix is not set" in show(config)
    assert "numa_nodes = [0, 1]" in show(config)


def test_the_watermarks_that_count_with_tiers_are_shown() -> None:
    tiers = {"tiers": ["disk:/ssd:1GiB"]}
    assert (resolve({}, {}).rules.high, resolve(tiers, {}).rules.high) == (1.0, 0.9)
    assert "watermarks.high = 0.9 " in show(resolve(tiers, {}))
    assert "watermarks.low = 0.8 " in show(resolve(tiers, {}))
    assert "watermarks.low = 0.5 " in show(resolve({**tiers, "watermarks.low": "0.5"}, {}))
    assert "watermarks.high = 0.95 " in show(resolve({**tiers, "watermarks.high": "0.95", "watermarks.low": "0.7"}, {}))


def test_tiers_are_tables_of_the_file_or_short_flags(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text('[[tiers]]\nkind = "disk"\npath = "ssd"\nsize = "1GiB"\n')
    (tier,) = load({}, {}, tmp_path / "pool.toml").tiers
    assert (tier.kind, tier.path, tier.size_bytes) == ("disk", str(tmp_path / "ssd"), 1 << 30)
    first, second = resolve({"tiers": ["disk:/ssd:1GiB", "folder:/mnt/shared"]}, {}).tiers
    assert (first.path, second.kind, second.path) == ("/ssd", "folder", "/mnt/shared")
    assert any("FLAG" not in line and "disk:PATH:SIZE" in line for line in problems_of({"tiers": ["tape:/x"]}))
    assert any("legal are disk, folder and s3" in line for line in problems_of({}, {}, '[[tiers]]\nkind = "tape"\n'))


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        resolve({}, {}).settings.size = 1
