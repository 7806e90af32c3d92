from __future__ import annotations

import pytest

from kvrelay.errors import ConfigError
from kvrelay.launch.core.compat import check
from kvrelay.wire.messages import Engine


def engine(name: str, namespace: str = "n", **facts: str) -> Engine:
    return Engine(name, "kv_both", namespace, facts)


def problems_of(expected: list[str], engines: list[Engine]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        check(expected, engines)
    return caught.value.problems


def test_engines_of_one_namespace_pass() -> None:
    check(["P0", "D0"], [engine("D0"), engine("P0"), engine("P7", "of another launcher")])


def test_every_differing_fact_is_named_for_both_engines() -> None:
    same = {"layers": "4"}
    (problem,) = problems_of(
        ["P0", "D0"],
        [
            engine("P0", "a", kv_cache_dtype="float32", rope="{}", **same),
            engine("D0", "b", kv_cache_dtype="bfloat16", **same),
        ],
    )
    assert problem == (
        "P0 and D0 cannot exchange KV: kv cache dtype is float32 on P0 and bfloat16 on D0; rope is {} on P0 and not "
        "stated on D0. Give both the same settings, in [engine] of the file or by flags without --prefill- and "
        "--decode-"
    )


def test_other_weights_are_mended_by_the_files_not_by_settings() -> None:
    (problem,) = problems_of(["P0", "D0"], [engine("P0", "a", weights="0" * 64), engine("D0", "b", weights="1" * 64)])
    assert "weights is 000000000000… on P0 and 111111111111… on D0" in problem
    assert problem.endswith("Start both on the same model files")


def test_each_engine_that_differs_from_the_first_gets_a_line() -> None:
    problems = problems_of(["P0", "P1", "D0"], [engine("P0", "a"), engine("P1", "b"), engine("D0", "c")])
    assert [line.split(" cannot")[0] for line in problems] == ["P0 and P1", "P0 and D0"]
    assert all("no stated fact differs" in line for line in problems)


def test_an_engine_that_did_not_register_is_named() -> None:
    (problem,) = problems_of(["P0", "D0"], [engine("P0")])
    assert problem.startswith("D0 runs but did not register with the pool")
