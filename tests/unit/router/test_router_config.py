"""Settings are checked all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import ConfigError
from kvrelay.router.config import RouterSettings, check_settings
from kvrelay.types import Dispatch, OnLostKv

if TYPE_CHECKING:
    from pathlib import Path


def settings(**changes: Any) -> RouterSettings:
    return RouterSettings(prefill=["http://a:1"], decode=["http://b:2"], **changes)


def test_good_settings_are_completed() -> None:
    config = check_settings(RouterSettings(prefill=["http://a:1"], decode=["http://b:2"], handover_timeout_s=40.0))
    assert config.host == "127.0.0.1"
    assert config.prefill_timeout_s == 30.0
    assert config.max_body_bytes == 64 << 20


def test_a_prompt_that_takes_minutes_is_not_cut_short_by_default() -> None:
    config = check_settings(RouterSettings(prefill=["http://a:1"], decode=["http://b:2"]))
    assert config.prefill_timeout_s >= 300.0


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        check_settings(
            RouterSettings(
                prefill=["http://a:1", "http://a:1", "nonsense"],
                decode=[],
                port=70_000,
                connector="smoke",
                pool="somewhere",
                decode_timeout_s=0.0,
                prefill_timeout_s=90.0,
                handover_timeout_s=60.0,
                max_body_mib=0,
            )
        )
    problems = "\n".join(raised.value.problems)
    for named in ("given twice", "nonsense", "no --decode", "70000", "smoke", "somewhere", "--decode-timeout 0",
                  "--prefill-timeout 90", "--max-body-mib 0"):  # fmt: skip
        assert named in problems
    assert len(raised.value.problems) == 9


def test_an_engine_has_one_role() -> None:
    with pytest.raises(ConfigError, match="one role"):
        check_settings(RouterSettings(prefill=["http://a:1"], decode=["http://a:1/"]))


def test_prefill_engines_mean_nothing_to_a_connector_that_hands_nothing_over() -> None:
    with pytest.raises(
        ConfigError, match="--prefill has no effect with --connector offloading, which does not hand KV over"
    ):
        check_settings(RouterSettings(prefill=["http://a:1"], decode=["http://b:1"], connector="offloading"))
    assert check_settings(RouterSettings(prefill=[], decode=["http://b:1"], connector="offloading")).prefills == ()


def test_a_pool_means_nothing_to_nixl() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        check_settings(RouterSettings(prefill=["http://a:1"], decode=["http://b:1"], connector="nixl", pool="tcp:a:1"))


def test_the_token_comes_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    settings = RouterSettings(prefill=["http://a:1"], decode=["http://b:1"], pool="tcp:a:1", pool_token_file=str(file))
    assert check_settings(settings).pool_token == "secret"


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    settings = RouterSettings(prefill=["http://a:1"], decode=["http://b:1"], pool="tcp:a:1", pool_token_file=missing)
    with pytest.raises(ConfigError, match="missing"):
        check_settings(settings)


def test_policies_for_lost_kv_need_a_pool_and_a_connector_that_tells() -> None:
    good = check_settings(settings(pool="unix:/p", on_lost_kv="strict", max_reprefills=8))
    assert (good.on_lost_kv, good.max_reprefills) == (OnLostKv.STRICT, 8)
    for changes, said in (
        ({"on_lost_kv": "pray"}, "choose one of recompute, reprefill, fail, strict"),
        ({"on_lost_kv": "fail"}, "needs --pool"),
        ({"on_lost_kv": "fail", "connector": "nixl"}, "one of these connectors: direct, kvrelay"),
        ({"max_reprefills": 0}, "give 1 to 8"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_settings(settings(**changes))


def test_decode_first_dispatch_needs_a_pool_and_a_connector_that_tells() -> None:
    assert check_settings(settings(pool="unix:/p", dispatch="decode-first")).dispatch is Dispatch.DECODE_FIRST
    for changes, said in (
        ({"dispatch": "decode-first"}, "needs --pool"),
        ({"dispatch": "decode-first", "connector": "nixl"}, "one of these connectors: direct, kvrelay"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_settings(settings(**changes))


def test_overlapped_dispatch_needs_a_pool_and_a_connector_that_can_follow() -> None:
    assert check_settings(settings(pool="unix:/p", dispatch="overlapped")).dispatch is Dispatch.OVERLAPPED
    assert check_settings(settings()).dispatch is Dispatch.SEQUENTIAL
    for changes, said in (
        ({"dispatch": "at once"}, "choose one of sequential, overlapped, decode-first"),
        ({"dispatch": "overlapped"}, "needs --pool"),
        ({"dispatch": "overlapped", "connector": "nixl"}, "choose sequential, or one of these connectors: "),
    ):
        with pytest.raises(ConfigError, match=said):
            check_settings(settings(**changes))
