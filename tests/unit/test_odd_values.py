"""Whatever a flag, a key of a file or a variable is given, the answer is a configuration or a `ConfigError`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.cli import build_parser, pool, router_file, up
from kvrelay.cli.admin_api import ask
from kvrelay.cli.pool_serve import refusals
from kvrelay.cli.router import settings_of
from kvrelay.cli.status import exit_status
from kvrelay.errors import ConfigError
from kvrelay.launch import host
from kvrelay.launch.core.settings import leaves as up_leaves
from kvrelay.launch.core.settings import variable_of as up_variable_of
from kvrelay.pool.config import load, show
from kvrelay.pool.settings import leaves as pool_leaves
from kvrelay.pool.settings import variable_of as pool_variable_of
from kvrelay.pool.tiers.config import open_tier, parse_flag, parse_tiers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from pathlib import Path

TEXTS = (
    "", " ", "\0", "a\0b", "x" * 5000, "-1", "nan", "inf", "-inf", "1e999", "٣", "9" * 400, "9" * 5000, "\udcff", "[",
    "'", "true", "http://[::1", "http://h:٣", "a..b", "a..b:80", "s3://[x", "tcp://[x:1", "tcp:[::1", "unix:\0",
    "disk:\0:1GiB", "tls:h:1?ca=\0", "127.0.0.1:²", "*", "::",
)  # fmt: skip
TOML = (
    '""', '"a\\u0000b"', "-1", "0", "1.5", "nan", "inf", "true", "[]", "[1]", '["a"]', '[["disk"]]', "[{}]", "{}",
    "{ a = 1 }", '{ "\\u0000" = "a" }', "1979-05-27", "07:32:00", '"٣"', "9223372036854775807", "[nan]", "1e308",
    '"http://[::1"', '["http://[::1"]', '["s3://[x"]', '[{ kind = ["disk"] }]', '[{ kind = "disk", path = "\\u0000" }]',
)  # fmt: skip
ROUTER = ("router", "serve", "--prefill", "http://a:1", "--decode", "http://b:1")


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return build_parser()


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names among the values must not become files of the checkout."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("KVRELAY_")]:
        monkeypatch.delenv(name)


def flags_of(parser: argparse.ArgumentParser, *verbs: str) -> list[argparse.Action]:
    for verb in verbs:
        choices = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
        parser = choices[verb]
    return [action for action in parser._actions if action.option_strings and action.nargs != 0]


def outcome(given: str, attempt: Callable[[], object]) -> Iterator[str]:
    """What is wrong with how an attempt ended; nothing where it worked or was refused in words."""
    try:
        attempt()
    except ConfigError as error:
        if not error.problems or not all(error.problems):
            yield f"{given}: refused without a word"
    except SystemExit:  # argparse has said it
        pass
    except Exception as error:  # noqa: BLE001 - what is looked for
        yield f"{given}: {error!r}"


def every_flag(
    parser: argparse.ArgumentParser, words: tuple[str, ...], run: Callable[[argparse.Namespace], object]
) -> list[str]:
    return [
        problem
        for action in flags_of(parser, *words[:2] if words[0] != "up" else words[:1])
        for text in TEXTS
        for flag in [action.option_strings[0]]
        for problem in outcome(f"{flag}={text!r:.40}", lambda: run(parser.parse_args([*words, f"{flag}={text}"])))  # noqa: B023
    ]


def check_pool(args: argparse.Namespace) -> None:
    refusals(pool.read_config(args))


def check_router(args: argparse.Namespace) -> None:
    router_file.load(args, settings_of)


@pytest.mark.parametrize(
    ("words", "run"),
    [(("pool", "serve"), check_pool), (ROUTER, check_router), (("up",), up.read_settings)],
    ids=["pool", "router", "up"],
)
def test_an_odd_value_of_a_flag_is_a_configuration_or_refused_in_words(
    parser: argparse.ArgumentParser, words: tuple[str, ...], run: Callable[..., object],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert every_flag(parser, words, run) == []
    capsys.readouterr()


def nested(path: str, value: str) -> str:
    table, _, leaf = path.rpartition(".")
    return (f"[{table}]\n" if table else "") + f"{leaf} = {value}\n"


def test_an_odd_value_in_a_pools_file_is_a_configuration_or_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    tiers = [
        f'[[tiers]]\nkind = "{kind}"\n{key} = {value}\n'
        for kind in ("disk", "folder", "s3")
        for key in ("path", "size", "url", "endpoint", "read_limit", "fill", "readers", "name")
        for value in TOML
    ]
    tables = [path.partition(".")[0] for path in pool_leaves() if "." in path]
    texts = [nested(path, value) for path in (*pool_leaves(), *dict.fromkeys(tables)) for value in TOML]
    found: list[str] = []
    for text in (*texts, *tiers):
        file.write_text(text)
        found += outcome(text, lambda: refusals(config) if show(config := load({}, {}, file)) else None)
    assert found == []


def test_an_odd_value_in_the_file_of_kvrelay_up_or_the_router_is_a_configuration_or_refused_in_words(
    tmp_path: Path, parser: argparse.ArgumentParser
) -> None:
    file = tmp_path / "settings.toml"
    found: list[str] = []
    for path in up_leaves():
        for value in TOML:
            file.write_text(nested(path, value))
            found += outcome(
                f"{path} = {value}", lambda: up.read_settings(parser.parse_args(["up", f"--config={file}"]))
            )
    for action in flags_of(parser, "router", "serve"):
        for value in TOML:
            file.write_text(f"{action.dest} = {value}\n")
            words = [*ROUTER, f"--config={file}"]
            found += outcome(f"{action.dest} = {value}", lambda: check_router(parser.parse_args(words)))  # noqa: B023
    assert found == []


def test_an_odd_variable_is_a_configuration_or_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, parser: argparse.ArgumentParser
) -> None:
    found: list[str] = []
    for text in (text for text in TEXTS if "\0" not in text):  # the kernel takes none with a zero byte
        for path in pool_leaves():
            environ = {pool_variable_of(path) or "KVRELAY_POOL_TOKEN": text}
            found += outcome(f"{environ!r:.60}", lambda: load({}, environ))  # noqa: B023
        for path in up_leaves():
            name = up_variable_of(path)
            monkeypatch.setenv(name, text)
            found += outcome(f"{name}={text!r:.40}", lambda: up.read_settings(parser.parse_args(["up"])))
            monkeypatch.delenv(name)
        for name in ("KVRELAY_ENGINE_API_KEY", "KVRELAY_ROUTER_ADMIN_TOKEN", "KVRELAY_POOL_TOKEN"):
            monkeypatch.setenv(name, text)
            words = [*ROUTER, "--pool", "unix:/pool", "--admin-listen", "127.0.0.1:1"]
            found += outcome(f"{name}={text!r:.40}", lambda: check_router(parser.parse_args(words)))  # noqa: B023
            monkeypatch.delenv(name)
    assert found == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("router", "serve", "--host", "a..b"), "--host 'a..b'"),
        (("router", "serve", "--host", "a..b", "--workers", "2"), "--host 'a..b'"),
        (("router", "serve", "--cors-origin", "http://[::1"), "--cors-origin 'http://[::1'"),
        (("router", "serve", "--cors-origin", "http://ö"), "--cors-origin 'http://ö'"),
        (("router", "serve", "--tls-cert", ""), "--tls-cert is empty"),
        (("router", "serve", "--keys-file", "a\0b"), "keys_file = 'a\\x00b'"),
        (("up", "--host", "a..b"), "host = 'a..b'"),
        (("up", "--tensor-parallel-size", "9" * 400), "engine.tensor_parallel_size"),
        (("pool", "serve", "--listen", "a..b:80"), "listen = 'a..b:80'"),
        (("pool", "serve", "--ttl", "inf"), "ttl_s = 'inf'"),
        (("pool", "serve", "--tls-cert", "x" * 5000), "tls.cert = 'xxx"),
        (("pool", "drain", "http://[::1"), "'http://[::1' is not the address of an admin API"),
        (("pool", "drain", "http://a..b"), "'http://a..b' is not the address of an admin API"),
        (("pool", "stat", "tcp:h:²"), "'tcp:h:²' is not HOST:PORT"),
        (("pool", "stat", f"tcp:h:{'9' * 5000}"), "is not HOST:PORT"),
    ],
)
def test_the_value_is_named_and_so_is_what_is_legal(
    parser: argparse.ArgumentParser, words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parser.parse_args(words)
    assert exit_status(lambda: args.run(args)) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"kind": ["disk"]}, "kind ['disk']: legal are disk, folder and s3"),
        ({"kind": "disk", "path": "a\0b", "size": "1GiB"}, "path 'a\\x00b'"),
        ({"kind": "folder", "path": "p", "fill": ["sealed"]}, "fill ['sealed']: legal are evicted and sealed"),
    ],
)
def test_an_odd_tier_is_refused(table: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tiers([table])
    assert named in str(caught.value)


def test_an_s3_address_that_is_no_url_is_refused() -> None:
    pytest.importorskip("obstore")
    (config,) = parse_tiers([parse_flag("s3://[x")])
    with pytest.raises(ConfigError, match="is not a URL"):
        open_tier(config)


def test_a_host_that_cannot_be_looked_up_is_a_reason_not_to_listen() -> None:
    assert host.listening_problem("a..b", 1) == "it is not a host name"


def test_an_admin_api_is_asked_at_a_url_only() -> None:
    with pytest.raises(ConfigError, match="give http://HOST:PORT"):
        ask("http://[::1", None, "GET", "/")


def test_what_nobody_foresaw_is_one_line_and_the_log_has_the_traceback(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> int:
        raise TypeError("no such\nthing")

    assert exit_status(broken) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvrelay: error: TypeError: no such; this is a fault of kvrelay: report it")
    assert caplog.records[-1].exc_info is not None
