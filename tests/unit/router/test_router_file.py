"""The router's configuration file: flags count more, problems are told all at once, and it can be read again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvrelay.cli import build_parser, router_file
from kvrelay.cli.router import settings_of
from kvrelay.errors import ConfigError
from kvrelay.router.config import RouterConfig
from kvrelay.router.core.admin import TOKEN_VARIABLE, Admin
from kvrelay.router.core.kv.settings import KvSettings
from kvrelay.router.core.observing.forwarding import HeaderSettings
from kvrelay.router.core.observing.settings import Observing
from kvrelay.router.core.resilience import Resilience
from kvrelay.router.core.routing import RoutingSettings
from kvrelay.router.entrance.settings import EntranceConfig
from kvrelay.router.entrance.tls import TlsFiles
from kvrelay.router.fleet_manager import Changes
from kvrelay.router.reloading import LIVE, Applied, as_it_is_now, fixed_problems
from kvrelay.router.setting_names import differences, name_of
from kvrelay.transport.tls import TlsConfig

if TYPE_CHECKING:
    from pathlib import Path

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
    assert [problem.partition(" ")[0] for problem in problems] == ["port", "pool_token_file"]
    assert "secret" not in "".join(problems)
    assert set(config.__struct_fields__) >= LIVE


def test_what_differs_is_called_as_in_the_file(file: Path) -> None:
    old = load(file, GOOD)
    routing = msgspec.structs.replace(old.routing, policy="random")
    resilience = msgspec.structs.replace(old.resilience, retry_share=0.25, drain_notice_s=1.0)
    new = msgspec.structs.replace(
        old, prefills=old.decodes, decode_timeout_s=1.0, routing=routing, resilience=resilience, max_body_bytes=9,
        admin=Admin(listen="[::1]:9", token="t"),
    )  # fmt: skip
    names = [name for _, name in differences(old, new)]
    live = ["prefill", "decode_timeout", "retry_share", "drain_notice"]
    fixed = ["max_body_mib", "policy", "admin_listen", "admin_token_file"]
    assert sorted(names) == sorted(live + fixed)
    assert [problem.partition(" ")[0] for problem in fixed_problems(old, new)] == [n for n in names if n in fixed]


def test_every_setting_of_a_configuration_is_called_as_a_flag_is() -> None:
    """Whatever is added to one: its name must be among the flags'."""
    flags = {action.dest for action in build_parser().parse_args(["router", "serve"]).parser._actions}
    full: list[tuple[type[msgspec.Struct], str]] = [
        (RouterConfig, ""), (RoutingSettings, "routing."), (KvSettings, "kv."), (Observing, "observing."),
        (HeaderSettings, "observing.headers."), (Resilience, "resilience."), (EntranceConfig, "entrance."),
        (TlsFiles, "entrance.tls."), (TlsConfig, "engine_tls."),
    ]  # fmt: skip
    groups = {prefix.rstrip(".") for _, prefix in full} | {
        "admin",
        "entrance.keys",
        "entrance.num_workers",
        "entrance.worker",
    }
    paths = {f"{prefix}{field}" for kind, prefix in full for field in kind.__struct_fields__} - groups
    assert {name_of(path) for path in paths} <= flags


def test_what_a_new_configuration_changed_is_told_in_words() -> None:
    nothing = Changes([], [], [], [])
    assert Applied(nothing, []).told() == "it changes nothing"
    assert Applied(Changes(["P1", "D2"], [], [], ["P0"]), ["prefill", "retry_share"]).told() == (
        "new engines: P1, D2; engines that leave: P0; settings with another value: prefill, retry_share"
    )


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
        (
            ["--admin-listen", "127.0.0.1:70000"],
            "--admin-listen: address '127.0.0.1:70000' is not HOST:PORT with a port",
        ),
        (["--admin-listen", "0.0.0.0:0"], "asks for no token"),
        (["--admin-token-file", "/dev/null", "--admin-listen", "127.0.0.1:0"], "is empty"),
    ],
)
def test_an_admin_api_that_cannot_be_is_refused(file: Path, flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(file, GOOD, *flags)


def test_the_admin_token_is_not_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "sesame")
    config = load(file, GOOD, "--admin-listen", "0.0.0.0:0")
    assert config.admin is not None
    assert config.admin.token == "sesame"
    assert "sesame" not in repr(config.admin)


def test_settings_are_shown_with_their_origins_and_read_back_as_they_were(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(GOOD)
    flags = ["--config", str(file), "--decode", "http://other:1", "--max-queued", "7"]
    args = build_parser().parse_args(["router", "config", *flags])
    assert args.run(args) == 0
    shown = capsys.readouterr().out
    for line in (
        rf'prefill = \["http://p:1"\] +# {re.escape(str(file))}', r'decode = \["http://other:1"\] +# --decode',
        r"max_queued = 7 +# --max-queued", rf"retry_share = 0.5 +# {re.escape(str(file))}", "port = 8000 +# default",
        r"prefill_timeout = 450.0 +# default: three quarters of handover_timeout", "# pool is not set",
    ):  # fmt: skip
        assert re.search(f"^{line}$", shown, re.MULTILINE), line
    before = router_file.load(args, settings_of)
    assert load(file, shown) == before


def test_what_is_secret_is_not_shown(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_ENGINE_API_KEY", "hush-engine")
    monkeypatch.setenv(TOKEN_VARIABLE, "hush-variable")
    token = tmp_path / "token"
    token.write_text("hush-file")
    file.write_text(GOOD + 'otlp_endpoint = "http://me:hush-password@collector:4318"')
    flags = ["--config", str(file), "--admin-token-file", str(token), "--admin-listen", "127.0.0.1:8001"]
    args = build_parser().parse_args(["router", "config", *flags])
    assert args.run(args) == 0
    shown = capsys.readouterr().out
    assert "hush" not in shown.replace(str(tmp_path), "")
    assert "the value of KVRELAY_ENGINE_API_KEY counts, and is not shown" in shown
    assert f'admin_token_file = "{token}"' in shown
    assert 'otlp_endpoint = "http://***@collector:4318"' in shown


def test_settings_that_cannot_be_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser().parse_args(["router", "config", "--prefill", "http://p:1", "--port", "70000"])
    with pytest.raises(ConfigError, match="--port 70000"):
        args.run(args)
    assert capsys.readouterr().out == ""
