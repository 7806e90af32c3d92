"""Which prompts are worth a prefill engine."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from kvrelay.router.core.conditional import EDGES, Conditional, FixedThreshold, LearntThreshold
from kvrelay.router.core.decode_cache import MIN_TOLD_TOKENS, DecodeCache
from kvrelay.router.core.fleet import Role
from kvrelay.router.core.legs import parse_fields
from kvrelay.router.core.policy.base import EngineView, RequestView
from kvrelay.router.core.policy.prefixes import chain
from kvrelay.router.core.prompts import TokenRates, has_media, read_prompt
from kvrelay.router.core.recovery import Action, Recovery
from kvrelay.router.core.routing import RoutingSettings, routing_problems
from kvrelay.types import Lost, OnLostKv, Reason


class Never:
    """Chance that never favours the unusual."""

    def random(self) -> float:
        return 0.999

    def randrange(self, stop: int, /) -> int:
        return stop - 1


class Always(Never):
    """Chance that always does."""

    def random(self) -> float:
        return 0.0


# --- a threshold by hand ---


@pytest.mark.parametrize(
    ("tokens", "cached", "alone", "why"),
    [(100, 0, True, "short"), (101, 0, False, "long"), (1_000, 900, True, "cached"), (1_000, 899, False, "long")],
)
def test_what_is_left_to_compute_decides(tokens: int, cached: int, *, alone: bool, why: str) -> None:
    verdict = Conditional(FixedThreshold(100)).judge(tokens, sized=True, cached=cached, decode="D1" if cached else "")
    assert (verdict.alone, verdict.why) == (alone, why)
    assert verdict.decode == ("D1" if alone and cached else "")
    assert verdict.above == 100


def test_a_prompt_whose_size_is_unknown_is_disaggregated() -> None:
    verdict = Conditional(FixedThreshold(100)).judge(1, sized=False)
    assert (verdict.alone, verdict.why) == (False, "unsized")


# --- a learnt one ---


def teach(threshold: LearntThreshold, rest: int, *, alone_s: float, split_s: float, times: int = 4) -> None:
    for now in range(times):
        threshold.measured(rest, alone_s, float(now), alone=True)
        threshold.measured(rest, split_s, float(now), alone=False)


def test_until_something_is_measured_every_prompt_is_disaggregated() -> None:
    threshold = LearntThreshold(Never())
    assert threshold.above == 0
    assert threshold.alone(1) == (False, False)


def test_the_threshold_is_found_between_what_is_better_alone_and_what_is_not() -> None:
    threshold = LearntThreshold(Never())
    for rest in (40, 200, 1_000, 8_000):
        teach(threshold, rest, alone_s=0.02 + rest * 5e-5, split_s=0.1 + rest * 1e-5)
    assert 1_000 <= threshold.above < 8_000
    assert threshold.alone(900) == (True, False)
    assert threshold.alone(8_000) == (False, False)


def test_one_size_alone_does_not_make_larger_ones_go_alone() -> None:
    threshold = LearntThreshold(Never())
    teach(threshold, 500, alone_s=0.2, split_s=0.1)
    teach(threshold, 5_000, alone_s=0.1, split_s=0.2)
    assert threshold.above == 0


def test_few_measurements_decide_nothing() -> None:
    threshold = LearntThreshold(Never())
    teach(threshold, 100, alone_s=0.01, split_s=1.0, times=LearntThreshold.MIN_MEASURED - 1)
    assert threshold.above == 0


def test_a_small_difference_changes_nothing_either_way() -> None:
    threshold = LearntThreshold(Never())
    teach(threshold, 100, alone_s=0.095, split_s=0.1)
    assert threshold.above == 0
    teach(threshold, 100, alone_s=0.05, split_s=0.1, times=60)
    found = threshold.above
    assert found >= 100
    teach(threshold, 100, alone_s=0.105, split_s=0.1, times=400)
    assert threshold.above == found
    teach(threshold, 100, alone_s=0.2, split_s=0.1, times=400)
    assert threshold.above == 0


def test_the_other_way_is_tried_now_and_then_and_more_while_it_is_unknown() -> None:
    def tried(threshold: LearntThreshold) -> int:
        return sum(threshold.alone(100)[1] for _ in range(2_000))

    unknown, known = LearntThreshold(random.Random(1)), LearntThreshold(random.Random(1))
    teach(known, 100, alone_s=0.2, split_s=0.1)
    assert 400 <= tried(unknown) <= 600
    assert 15 <= tried(known) <= 80


def test_nothing_is_tried_that_is_expected_to_take_more_than_twice_as_long() -> None:
    threshold = LearntThreshold(Always())
    assert threshold.alone(4_096) == (True, True)
    assert threshold.alone(4_097) == (False, False)
    teach(threshold, 1_000, alone_s=0.1, split_s=0.1)
    for now in range(4):
        threshold.measured(16_000, 0.5, float(now), alone=False)
        threshold.measured(4_000, 0.5, float(now), alone=False)
    assert threshold.alone(4_000) == (True, True)
    assert threshold.alone(16_000) == (False, False)


def test_in_a_noisy_world_it_settles_near_where_both_ways_take_equally_long() -> None:
    rng = random.Random(5)
    threshold = LearntThreshold(rng)

    def live(requests: range, step_s: float) -> float:
        """The share of requests that went the way that is not the better one by much."""
        worse = 0
        for now in requests:
            rest = round(16 * 2 ** rng.uniform(0, 9))
            times = {True: 0.02 + rest * step_s, False: 0.08 + rest * 2e-5}
            alone, _ = threshold.alone(rest)
            threshold.measured(rest, times[alone] * rng.uniform(0.9, 1.1), float(now), alone=alone)
            worse += times[alone] > 1.25 * times[not alone]
        return worse / len(requests)

    live(range(3_000), 1e-4)
    assert 750 / 2 <= threshold.above <= 750 * 2
    assert live(range(3_000, 6_000), 1e-4) < 0.05
    live(range(6_000, 9_000), 4e-4)  # the decode engine has become busier: 158 tokens
    assert threshold.above <= 158 * 2


@settings(deadline=None)
@given(st.integers(0, 1 << 22))
def test_every_size_has_a_class(rest: int) -> None:
    threshold = LearntThreshold(Never())
    teach(threshold, rest, alone_s=0.01, split_s=1.0)
    assert threshold.above >= rest
    assert threshold.above in EDGES or rest > EDGES[-1]


# --- what decode engines have ---

TEXT = bytes(range(256)) * 40


def asked(text: bytes, num_tokens: int = 0) -> RequestView:
    return RequestView(num_tokens or len(text) // 4, prefix=chain(b"", [text]), num_bytes=len(text))


def engine(index: int, in_flight: int = 0) -> EngineView:
    return EngineView(f"D{index}", Role.DECODE, index, in_flight=in_flight)


def test_an_engine_has_what_it_has_answered() -> None:
    held = DecodeCache()
    assert held.best(asked(TEXT), [engine(0), engine(1)], 0, {}) == ("", 0)
    assert held.answered(asked(TEXT), "D1") == 0
    assert held.best(asked(TEXT), [engine(0), engine(1)], 0, {}) == ("D1", len(TEXT) // 4)
    assert held.best(asked(TEXT + b"x" * 5_120), [engine(0), engine(1)], 0, {}) == ("D1", len(TEXT) // 4)
    assert held.answered(asked(TEXT), "D1") == len(TEXT) // 4
    held.forget("D1")
    assert held.best(asked(TEXT), [engine(0), engine(1)], 0, {}) == ("", 0)


def test_of_those_that_have_enough_the_least_busy_is_the_best() -> None:
    held = DecodeCache()
    held.answered(asked(TEXT), "D0")
    held.answered(asked(TEXT[:9_216]), "D1")
    both = [engine(0, in_flight=2), engine(1, in_flight=1)]
    assert held.best(asked(TEXT), both, 300, {}) == ("D1", 2_304)
    assert held.best(asked(TEXT), both, 100, {}) == ("D0", 2_560)


def test_what_engines_turn_out_to_have_counts_for_what_they_are_thought_to_have() -> None:
    held = DecodeCache()
    held.answered(asked(TEXT), "D0")
    for now in range(4):
        held.proven("D0", thought=2_560, had=640, now=float(now))
    assert held.best(asked(TEXT), [engine(0)], 0, {}) == ("D0", 640)
    assert held.best(asked(TEXT), [engine(0)], 0, {"D0": 2_000}) == ("D0", 2_000)
    for now in range(4, 400):
        held.proven("D0", thought=2_560, had=2_550, now=float(now))
    assert held.best(asked(TEXT), [engine(0)], 0, {})[1] > 2_400


def test_a_few_tokens_say_nothing_about_an_engines_cache() -> None:
    held = DecodeCache()
    held.answered(asked(TEXT), "D0")
    held.proven("D0", thought=MIN_TOLD_TOKENS - 1, had=0, now=0.0)
    assert held.best(asked(TEXT), [engine(0)], 0, {}) == ("D0", 2_560)


# --- how long a prompt is ---


def fields(**body: object) -> dict[str, Raw]:
    return parse_fields(msgspec.json.encode(body))


@pytest.mark.parametrize(
    ("prompt", "exact"), [([1, 2, 3], 3), ([7], 1), ([[1, 2], [3, 4, 5]], 5), ("1, 2", None), (["1", "2"], None)]
)
def test_token_ids_are_counted(prompt: object, exact: int | None) -> None:
    read = read_prompt(fields(model="m", prompt=prompt))
    assert read.exact == exact
    assert read.sized


def test_a_chat_is_its_tools_and_messages() -> None:
    messages = [{"role": "user", "content": "hello"}]
    read = read_prompt(fields(messages=messages, tools=[{"type": "function"}], model="m"))
    assert [msgspec.json.decode(part) for part in read.parts] == [[{"type": "function"}], messages]
    assert read.num_bytes == sum(map(len, read.parts))


@pytest.mark.parametrize("body", [{"prompt_embeds": "AAAA"}, {"prompt": "a", "prompt_embeds": "AAAA"}, {}])
def test_what_is_not_text_has_no_size(body: dict[str, object]) -> None:
    assert not read_prompt(fields(model="m", **body)).sized


def test_media_are_found_and_words_about_them_are_not() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]
    words = [{"role": "user", "content": 'what is an "image_url"?'}]
    assert has_media(read_prompt(fields(messages=image)))
    assert not has_media(read_prompt(fields(messages=words)))


def test_text_is_estimated_by_what_engines_counted_of_that_model() -> None:
    rates = TokenRates()
    assert rates.estimate("m", 4_000) == 1_000
    for _ in range(200):
        rates.learn("m", 3_000, 1_500)
    assert 1_950 <= rates.estimate("m", 4_000) <= 2_000
    assert rates.estimate("other", 4_000) == 1_000
    for _ in range(2_000):
        rates.learn("m", 6_000, 1_000)
    assert 660 <= rates.estimate("m", 4_000) <= 690
    assert rates.estimate("m", 0) == 0
    assert rates.estimate("m", 1) == 1


def test_rates_of_models_nobody_asks_for_any_more_give_way() -> None:
    rates = TokenRates()
    for number in range(2 * TokenRates.MAX_KEYS):
        rates.learn(f"m{number}", 10_000, 10_000)
    assert rates.bytes_per_token("m0") == TokenRates.GUESS
    assert rates.bytes_per_token(f"m{2 * TokenRates.MAX_KEYS - 1}") < 1.2


# --- decode first ---


def lost(reason: Reason = Reason.MISS, missing: int = 100) -> Lost:
    return Lost(
        lost=reason.value,
        handover="h",
        attempt=1,
        request_id="r",
        worker="D0",
        prompt_tokens=200,
        missing_tokens=missing,
    )


def asking(policy: OnLostKv) -> Recovery:
    recovery = Recovery(policy, max_reprefills=1)
    recovery.asks_first = True
    return recovery


@pytest.mark.parametrize("policy", list(OnLostKv))
def test_a_decode_engine_that_is_asked_first_must_tell_what_it_lacks(policy: OnLostKv) -> None:
    recovery = asking(policy)
    assert recovery.promise("") is OnLostKv.STRICT
    assert recovery.lost(lost()) is Action.PREFILL
    assert recovery.promise("P0") is policy


def test_a_little_that_is_missing_is_computed_where_it_is_missing_unless_that_is_forbidden() -> None:
    assert asking(OnLostKv.RECOMPUTE).lost(lost(missing=64), spare=64) is Action.RECOMPUTE
    assert asking(OnLostKv.RECOMPUTE).lost(lost(missing=65), spare=64) is Action.PREFILL
    assert asking(OnLostKv.STRICT).lost(lost(missing=64), spare=64) is Action.PREFILL


def test_what_no_prefill_would_mend_is_not_prefilled() -> None:
    assert asking(OnLostKv.RECOMPUTE).lost(lost(Reason.POOL_DOWN)) is Action.RECOMPUTE
    assert asking(OnLostKv.FAIL).lost(lost(Reason.POOL_DOWN)) is Action.REFUSE


def test_asking_first_spends_nothing_of_what_is_left_for_lost_kv() -> None:
    recovery = asking(OnLostKv.REPREFILL)
    assert [recovery.lost(lost()) for _ in range(3)] == [Action.PREFILL, Action.REPREFILL, Action.RECOMPUTE]


# --- settings ---


def test_good_settings_have_no_problems() -> None:
    for above in ("0", "256", "auto"):
        chosen = RoutingSettings(disaggregate_above=above, prefill_policy="least-loaded", colocated_fallback=True)
        assert routing_problems(chosen, hands_over=True) == []
        assert chosen.is_conditional is (above != "0")
        assert {policy.name for policy in chosen.make_policies().values()} == {"least-loaded", "round-robin"}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (RoutingSettings(policy="best"), "--policy 'best'"),
        (RoutingSettings(prefill_policy="best"), "--prefill-policy 'best'"),
        (RoutingSettings(decode_policy="latency:x=1"), "--decode-policy 'latency:x=1'"),
        (RoutingSettings(session_header="x y"), "--session-header 'x y'"),
        (RoutingSettings(disaggregate_above="-1"), "--disaggregate-above '-1'"),
        (RoutingSettings(disaggregate_above="many"), "or auto"),
        (RoutingSettings(disaggregate_above="99999999999"), "--disaggregate-above"),
    ],
)
def test_bad_settings_are_named(bad: RoutingSettings, said: str) -> None:
    (problem,) = routing_problems(bad, hands_over=True)
    assert said in problem


def test_flags_for_the_router_are_what_is_not_the_default() -> None:
    assert RoutingSettings().arguments == []
    chosen = RoutingSettings(prefill_policy="random", colocated_fallback=True)
    assert chosen.arguments == ["--prefill-policy", "random", "--colocated-fallback"]


def test_where_nothing_is_handed_over_nothing_is_decided() -> None:
    chosen = RoutingSettings(disaggregate_above="9", colocated_fallback=True)
    assert len(routing_problems(chosen, hands_over=False)) == 2
