from __future__ import annotations

from typing import Any

import pytest

from kvrelay.connector.config import parse_extra_config
from kvrelay.errors import ConfigError

GOOD: dict[str, Any] = {"pool": "unix:/tmp/pool.sock"}


def problems(extra: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_extra_config(extra, "engine-id")
    return caught.value.problems


def test_the_engine_is_named_by_vllm_unless_the_user_does() -> None:
    assert parse_extra_config(GOOD, "engine-id").engine == "engine-id"
    assert parse_extra_config({**GOOD, "engine": "P0"}, "engine-id").engine == "P0"


def test_null_means_the_default_where_there_may_be_none() -> None:
    config = parse_extra_config({**GOOD, "token_file": None, "weights_id": None}, "e")
    assert (config.token_file, config.weights_id, config.chunk_tokens) == (None, None, 64)


def test_whole_seconds_are_seconds() -> None:
    assert parse_extra_config({**GOOD, "load_timeout_s": 5}, "e").load_timeout_s == 5


def test_all_problems_are_told_at_once_and_unknown_keys_name_the_legal_ones() -> None:
    told = problems({"chunk_token": 32, "chunk_tokens": 0, "load_threads": True, "engine": ""})
    assert len(told) == 5
    assert "no 'chunk_token' (did you mean 'chunk_tokens'?); legal: allow_load_failures" in told[0]
    assert "pool is missing" in told[1]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"pool": "localhost:7420"}, "pool address 'localhost:7420' is not unix:"),
        ({"pool": 7420}, "pool must be of type str, not 7420"),
        ({"pools": {}}, "pool is missing"),
        ({"pools": {"P0": "unix:/a", "P1": 7}}, "pools: the address of P1 is 7"),
        ({"pools": {"P0": "nowhere"}}, "pools: P0: pool address 'nowhere' is not unix:"),
        ({**GOOD, "pools": {"P0": "unix:/a"}}, "pools is set and so is pool: an engine has one pool or several"),
        ({**GOOD, "chunk_tokens": 0}, "chunk_tokens must be between 1 and 4096, not 0"),
        ({**GOOD, "chunk_tokens": 5000}, "chunk_tokens must be between 1 and 4096, not 5000"),
        ({**GOOD, "chunk_tokens": "64"}, "chunk_tokens must be of type int, not '64'"),
        ({**GOOD, "chunk_tokens": True}, "chunk_tokens must be of type int, not True"),
        ({**GOOD, "chunk_tokens": None}, "chunk_tokens must be of type int, not None"),
        ({**GOOD, "packing": "raw"}, "packing must be one of 'canonical', 'native', not 'raw'"),
        ({**GOOD, "lookup_timeout_s": -1}, "lookup_timeout_s must be between"),
        ({**GOOD, "allow_untested_vllm": "yes"}, "allow_untested_vllm must be of type bool, not 'yes'"),
        ({**GOOD, "engine": ""}, "engine must not be empty"),
    ],
)
def test_a_bad_value_is_named(extra: dict[str, Any], told: str) -> None:
    (problem,) = problems(extra)
    assert told in problem


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"embedded_pool": "much"}, r"embedded_pool = 'much': a size is a number and a unit"),
        ({"embedded_listen": "a:1"}, "embedded_listen is set without embedded_pool"),
        (
            {"pool": "tcp:a:1", "embedded_pool": "1GiB", "embedded_listen": "a:1"},
            "embedded_listen is set although pool is a TCP address",
        ),
        ({"pool": "tls:a:1", "embedded_pool": "1GiB"}, "embedded_pool cannot be served at tls:a:1"),
    ],
)
def test_a_pool_of_its_own_is_refused_where_it_cannot_be(extra: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_extra_config({"pool": "unix:/p", **extra}, "e")
