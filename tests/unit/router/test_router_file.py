"""The router's configuration file: flags count more, problems are told all at once, and it can be read again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kvrelay.cli import build_parser, router_file
from kvrelay.cli.router import settings_of
from kvrelay.errors import ConfigError
from kvrelay.router.core.admin import TOKEN_VARIABLE
from kvrelay.router.reloading import LIVE, as_it_is_now, fixed_problems

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.router.config import RouterConfig

GOOD = """
prefill = ["http://p:1"]
decode = ["http://d:1", "http://d:2"]
decode_timeout = 60
retry_share = 0.5
colocated_fallback = true
"""


def load(file: Path, text: str, *flags: str) -> RouterConfig:
    file.write_text(text)
    args = build_parser().parse_args(["router", "serve", "--config", str(file), *flags])
    return router_file.load(args, settings_of)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "router.toml"


def test_settings_of_the_file_count_and_flags_count_more(file: Path) -> None:
    config = load(file, GOOD, "--decode", "http://other:1", "--retry-share", "0.2")
    assert [address.url for address in config.prefills] == ["http://p:1"]
    assert [address.url for address in config.decodes] == ["http://other:1"]
    assert config.decode_timeout_s == 60.0
    assert config.resilience.retry_share == 0.2  # given, though it is the default
    assert config.routing.colocated_fallback


def test_without_a_file_flags_are_all_there_is() -> None:
    args = build_parser().parse_args(["router", "serve", "--prefill", "http://p:1", "--decode", "http://d:1"])
    assert args.given >= {"prefill", "decode"}
    assert router_file.load(args, settings_of).decodes[0].url == "http://d:1"


def test_every_problem_of_the_file_and_of_its_values_is_told(file: Path) -> None:
    text = """
    decode = ["http://d:1", "ftp://d:2"]
    decode_timout = 5
    drain_timeout = "long"
    max_body_mib = 1.5
    prefill = "http://p:1"
    host = 5
    colocated_fallback = "yes"
    retry_share = 7
    config = "me.toml"
    """
    with pytest.raises(ConfigError) as refused:
        load(file, text)
    told = "\n".join(refused.value.problems)
    for problem in (
        "decode_timout (from", "did you mean decode_timeout?",
        "drain_timeout = 'long'", "write a number",
        "max_body_mib = 1.5", "without a fraction",
        "prefill = 'http://p:1'", "write a list of strings",
        "host = 5", "write a string",
        "colocated_fallback = 'yes'", "write true or false",
        "config (from", "unknown setting",
        "--retry-share 7 is out of range", "'ftp://d:2' is not an engine's URL", "no --prefill is given",
    ):  # fmt: skip
        assert problem in told


def test_a_file_that_is_none_is_told(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(file, "prefill = [")
    args = build_parser().parse_args(["router", "serve", "--config", str(tmp_path / "none.toml")])
    with pytest.raises(ConfigError, match="cannot be read"):
        router_file.load(args, settings_of)


def test_the_file_is_read_anew_each_time(file: Path) -> None:
    file.write_text(GOOD)
    args = build_parser().parse_args(["router", "serve", "--config", str(file)])
    assert router_file.load(args, settings_of).decode_timeout_s == 60.0
    file.write_text(GOOD.replace("60", "70"))
    assert router_file.load(args, settings_of).decode_timeout_s == 70.0


def test_what_cannot_change_while_the_router_runs_is_told_without_its_value(file: Path) -> None:
    config = load(file, GOOD)
    assert list(fixed_problems(config, config)) == []
    assert list(fixed_problems(config, msgspec.structs.replace(config, decode_timeout_s=1.0))) == []
    changed = msgspec.structs.replace(config, port=9, pool_token="secret")
    problems = list(fixed_problems(config, changed))
    assert [problem.partition(" ")[0] for problem in problems] == ["port", "pool_token"]
    assert "secret" not in "".join(problems)
    assert set(config.__struct_fields__) >= LIVE


def test_a_worker_that_starts_later_begins_with_what_the_others_have_gone_over_to(file: Path) -> None:
    started = load(file, GOOD)
    reloaded = msgspec.structs.replace(started, decode_timeout_s=1.0)
    assert as_it_is_now(started, lambda: reloaded) is reloaded
    assert as_it_is_now(started, lambda: msgspec.structs.replace(started, port=9)) is started
    assert as_it_is_now(started, None) is started

    def refuse() -> RouterConfig:
        raise ConfigError("bad")

    assert as_it_is_now(started, refuse) is started


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--admin-port", "70000"], "--admin-port 70000 is not a port"),
        (["--admin-port", "0", "--admin-host", "0.0.0.0"], "asks for no token"),
        (["--admin-token-file", "/dev/null", "--admin-port", "0"], "is empty"),
    ],
)
def test_an_admin_api_that_cannot_be_is_refused(file: Path, flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(file, GOOD, *flags)


def test_the_admin_token_is_not_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "sesame")
    config = load(file, GOOD, "--admin-port", "0", "--admin-host", "0.0.0.0")
    assert config.admin is not None
    assert config.admin.token == "sesame"
    assert "sesame" not in repr(config.admin)
