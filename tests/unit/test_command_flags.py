"""What the command line says of flags: of those it does not know, and in its help."""

from __future__ import annotations

import argparse

import pytest

from kvrelay.cli import build_parser
from kvrelay.launch.core.settings import UpSettings
from kvrelay.types import Dispatch, OnLostKv


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def help_text(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        build_parser().parse_args([*words, "--help"])
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("up", "m", "--prefil", "2"), "unrecognized arguments: --prefil 2; did you mean --prefill?"),
        (("up", "m", "--prot=80"), "unrecognized arguments: --prot=80; did you mean --port?"),
        (("router", "serve", "--polcy", "x"), "unrecognized arguments: --polcy x; did you mean --policy?"),
        (("pool", "stat", "a", "b"), "unrecognized arguments: b; see `kvrelay pool stat --help`"),
        (("--foo", "up"), "unrecognized arguments: --foo; see `kvrelay --help`"),
    ],
)
def test_an_argument_that_is_not_known_is_told_in_one_line_with_the_nearest_flag_of_its_command(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert refusal(capsys, *words) == f"kvrelay: error: {told}"


def test_an_argument_of_the_wrong_form_is_told_in_one_line_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "router", "serve", "--port", "x")
    assert line == "kvrelay: error: argument --port: invalid int value: 'x'; see `kvrelay router serve --help`"


def test_the_help_of_up_names_legal_values_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys, "up")
    assert "--on-lost-kv {" + ",".join(OnLostKv) + "}" in text
    assert "--dispatch {" + ",".join(Dispatch) + "} when a decode engine is sent a request (sequential)" in text
    assert "--on-exit {keep,stop,wait}" in text
    assert "--router-pool-index {true,false}" in text
    assert "--connector {kvrelay,direct,nixl," in text
    assert f"--port VALUE port the endpoint listens on ({UpSettings().port})" in text
    assert "--pool-size VALUE memory for KV, such as 4GiB (4 GiB)" in text
    assert "--ready-timeout VALUE seconds until everything must be ready (900)" in text


def test_the_help_of_a_pool_says_how_a_tier_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tier TIER a lower tier: disk:PATH:SIZE, folder:PATH," in help_text(capsys, "pool", "serve")


def test_no_help_text_is_broken() -> None:
    left: list[argparse.ArgumentParser] = [build_parser()]
    while left:
        parser = left.pop()
        assert parser.format_help()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                left += action.choices.values()
