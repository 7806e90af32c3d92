"""What each policy does beyond what all do."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import BadRequestError
from kvrelay.router.core.fleet import Role
from kvrelay.router.core.load import Load, Smoothed
from kvrelay.router.core.policy.base import NO_REQUEST, Choice, EngineView, RequestView, Snapshot, select
from kvrelay.router.core.policy.prefixes import DOUBLE_EVERY, PIECE_BYTES, PrefixTracker, bytes_up_to, chain
from kvrelay.router.core.policy.registry import make_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.router.core.policy.base import Policy


def view(index: int, **changes: Any) -> EngineView:
    return EngineView(f"D{index}", Role.DECODE, index, **changes)


def chosen(policy: Policy, request: RequestView, *engines: EngineView, seed: int = 1) -> Choice:
    choice = select(policy, request, Snapshot(0.0, engines), random.Random(seed))
    assert choice is not None
    return choice


def prompt(text: bytes) -> RequestView:
    return RequestView(num_tokens=len(text) // 4, prefix=chain(b"", [text]))


# --- by load ---


def test_the_least_loaded_decode_engine_is_the_one_with_the_fewest_requests() -> None:
    policy = make_policy("least-loaded", Role.DECODE)
    fleet = (view(0, in_flight=3, in_flight_tokens=30), view(1, in_flight=2, in_flight_tokens=9_000))
    assert chosen(policy, NO_REQUEST, *fleet) == Choice("D1", "least")


def test_the_least_loaded_prefill_engine_is_the_one_with_the_fewest_tokens() -> None:
    fleet = (view(0, in_flight=3, in_flight_tokens=30), view(1, in_flight=2, in_flight_tokens=9_000))
    assert chosen(make_policy("least-loaded", Role.PREFILL), NO_REQUEST, *fleet).engine == "D0"
    assert chosen(make_policy("least-loaded:by=requests", Role.PREFILL), NO_REQUEST, *fleet).engine == "D1"


def test_of_two_the_less_loaded_is_chosen_and_the_most_loaded_of_all_never() -> None:
    policy = make_policy("power-of-two", Role.DECODE)
    fleet = tuple(view(index, in_flight=index) for index in range(4))
    counts = Counter(chosen(policy, NO_REQUEST, *fleet, seed=seed).engine for seed in range(200))
    assert counts["D0"] > counts["D1"] > counts["D2"] > 0
    assert not counts["D3"]


# --- sessions ---


def homes(policy: Policy, engines: Sequence[EngineView], count: int = 200) -> dict[int, str]:
    return {
        number: chosen(policy, RequestView(session=b"session %d" % number), *engines).engine for number in range(count)
    }


def test_a_session_stays_with_its_engine() -> None:
    policy = make_policy("consistent-hash", Role.DECODE)
    fleet = [view(index) for index in range(5)]
    assert (
        homes(policy, fleet) == homes(policy, fleet[::-1]) == homes(make_policy("consistent-hash", Role.DECODE), fleet)
    )


def test_only_the_sessions_of_an_engine_that_leaves_move_and_they_come_back_with_it() -> None:
    policy = make_policy("consistent-hash", Role.DECODE)
    fleet = [view(index) for index in range(5)]
    before = homes(policy, fleet)
    policy.forget("D2")
    during = homes(policy, fleet[:2] + fleet[3:])
    assert {number for number in before if before[number] != during[number]} == {
        number for number, home in before.items() if home == "D2"
    }
    assert len(set(during.values())) == 4
    assert homes(policy, fleet) == before


def test_an_overfull_engine_passes_a_session_on_to_the_next_in_its_order() -> None:
    policy = make_policy("consistent-hash:bound=2.0", Role.DECODE)
    session = RequestView(session=b"s")
    home = chosen(policy, session, view(0), view(1), view(2)).engine
    busy = {home: 30}
    full = [view(index, in_flight=busy.get(f"D{index}", 3)) for index in range(3)]
    moved = chosen(policy, session, *full)
    assert moved.why == "overfull"
    without = [engine for engine in full if engine.name != home]
    assert moved.engine == chosen(policy, session, *without).engine


def test_a_request_of_no_session_goes_to_the_least_loaded() -> None:
    policy = make_policy("consistent-hash", Role.DECODE)
    assert chosen(policy, NO_REQUEST, view(0, in_flight=2), view(1, in_flight=1)) == Choice("D1", "no_session")


# --- prefixes ---

LONG = bytes(range(256)) * 40


def test_a_prompt_goes_where_its_beginning_is() -> None:
    policy = make_policy("prefix-aware", Role.DECODE)
    fleet = [view(index) for index in range(4)]
    first = chosen(policy, prompt(LONG), *fleet)
    assert first.why == "new"
    for seed in range(10):
        assert chosen(policy, prompt(LONG + b"another turn" * 90), *fleet, seed=seed) == Choice(first.engine, "prefix")


def test_a_short_common_beginning_is_not_worth_going_after() -> None:
    policy = make_policy("prefix-aware", Role.DECODE)
    first = chosen(policy, prompt(LONG), view(0), view(1))
    other = chosen(policy, prompt(LONG[:1_024] + b"x" * 20_000), view(0), view(1))
    assert other.why == "new"
    assert other.engine != first.engine


def test_out_of_balance_the_least_loaded_takes_it_and_then_has_it_too() -> None:
    policy = make_policy("prefix-aware:balance_abs=4", Role.DECODE)
    first = chosen(policy, prompt(LONG), view(0), view(1)).engine
    load = {first: 9}
    fleet = [view(index, in_flight=load.get(f"D{index}", 1)) for index in range(2)]
    moved = chosen(policy, prompt(LONG), *fleet)
    assert moved.why == "balance"
    assert moved.engine != first
    even = [view(index, in_flight=int(f"D{index}" == first)) for index in range(2)]
    assert chosen(policy, prompt(LONG), *even) == Choice(moved.engine, "prefix")


def test_pieces_grow_so_that_a_long_prompt_has_few() -> None:
    lengths = [len(chain(b"", [b"x" * size])) for size in (255, 256, 16_384, 16_384 + 511, 16_384 + 512, 1 << 20)]
    assert lengths == [0, 1, DOUBLE_EVERY, DOUBLE_EVERY, DOUBLE_EVERY + 1, 6 * DOUBLE_EVERY]
    for count in (0, 1, 64, 65, 128, 300):
        text = b"y" * bytes_up_to(count)
        assert len(chain(b"", [text])) == count
        assert bytes_up_to(1) == PIECE_BYTES


def test_prompts_agree_as_far_as_their_text_and_seed_do() -> None:
    one, other = chain(b"m", [LONG, b"a" * 600]), chain(b"m", [LONG[:300], LONG[300:], b"b" * 600])
    assert one[:40] == other[:40]
    assert one[40] != other[40]
    assert not set(one) & set(chain(b"n", [LONG]))


def test_a_tracker_is_bounded_and_forgets_what_was_longest_unseen() -> None:
    tracker = PrefixTracker(100)
    kept = chain(b"", [LONG])
    for number in range(200):
        tracker.add(chain(b"%d" % number, [LONG]), "A")
        tracker.add(kept, "B")
    assert len(tracker) <= 100
    assert tracker.depths(kept, ["A", "B"]) == [0, 40]
    assert tracker.size("B") == 40
    assert tracker.size("A") <= 60


def test_a_tracker_knows_how_deep_each_engine_is() -> None:
    tracker = PrefixTracker(1_000)
    prefix = chain(b"", [LONG])
    tracker.add(prefix[:10], "A")
    tracker.add(prefix, "B")
    tracker.add(prefix[:20], "C")
    assert tracker.depths(prefix, ["A", "B", "C", "D"]) == [10, 40, 20, 0]
    tracker.remove(prefix, "B", 15)
    assert tracker.depths(prefix, ["A", "B", "C"]) == [10, 15, 20]
    tracker.forget("C")
    assert tracker.depths(prefix, ["A", "B", "C"]) == [10, 15, 0]


def test_a_tracker_stays_small_however_many_engines_come_and_go() -> None:
    tracker = PrefixTracker(10_000)
    prefix = chain(b"", [LONG])
    for number in range(3 * PrefixTracker.MAX_RETIRED):
        tracker.add(prefix, f"E{number}")
        tracker.forget(f"E{number}")
        assert tracker.depths(prefix, [f"E{number}"]) == [0]
    assert tracker._num_bits <= PrefixTracker.MAX_RETIRED + 1
    tracker.add(prefix, "new")
    assert tracker.depths(prefix, ["new", "E0"]) == [40, 0]


# --- latencies ---


def test_the_engine_expected_to_be_soonest_is_chosen() -> None:
    policy = make_policy("latency:explore=0", Role.DECODE)
    slow_idle, fast_busy = view(0, ttft_s=1.0), view(1, ttft_s=0.1, in_flight=4)
    assert chosen(policy, NO_REQUEST, slow_idle, fast_busy) == Choice("D1", "soonest")
    assert chosen(policy, NO_REQUEST, slow_idle, view(1, ttft_s=0.1, in_flight=20)).engine == "D0"


def test_an_engine_that_has_not_answered_yet_is_tried_and_not_overrun() -> None:
    policy = make_policy("latency:explore=0", Role.DECODE)
    known = view(0, ttft_s=0.1)
    assert chosen(policy, NO_REQUEST, known, view(1)) == Choice("D1", "unknown")
    assert chosen(policy, NO_REQUEST, known, view(1, in_flight=1)) == Choice("D0", "soonest")


def test_with_targets_the_least_loaded_of_those_that_meet_them_is_chosen() -> None:
    policy = make_policy("latency:ttft_ms=200,itl_ms=50,explore=0", Role.DECODE)
    fleet = [
        view(0, ttft_s=0.19, itl_s=0.04, in_flight=1),
        view(1, ttft_s=0.01, itl_s=0.01, in_flight=2),
        view(2, ttft_s=0.01, itl_s=0.06, in_flight=0),
    ]
    assert chosen(policy, NO_REQUEST, *fleet) == Choice("D0", "in_time")
    late = [view(0, ttft_s=0.5, itl_s=0.04), view(1, ttft_s=0.3, itl_s=0.04)]
    assert chosen(policy, NO_REQUEST, *late) == Choice("D1", "soonest")


def test_a_slow_engine_is_tried_again_now_and_then() -> None:
    policy = make_policy("latency:explore=0.5", Role.DECODE)
    fleet = (view(0, ttft_s=9.0), view(1, ttft_s=0.1))
    counts = Counter(chosen(policy, NO_REQUEST, *fleet, seed=seed) for seed in range(200))
    assert counts[Choice("D0", "explored")] > 10


def test_a_mean_follows_what_is_measured_now() -> None:
    mean = Smoothed(half_life_s=10.0)
    for now in range(5):
        mean.add(1.0, now)
    assert mean.value == 1.0
    mean.add(4.0, 5.0)
    assert mean.value is not None
    assert 1.4 < mean.value < 1.7
    mean.add(4.0, 1_000.0)
    assert mean.value == pytest.approx(4.0)


def test_a_load_is_what_was_begun_and_has_not_ended() -> None:
    load = Load()
    load.begin(10)
    load.begin(5)
    load.end(10)
    assert (load.in_flight, load.in_flight_tokens) == (1, 5)


# --- names and options ---


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("best", "choose one of consistent-hash"),
        ("round-robin:speed=9", "options of round-robin: none"),
        ("prefix-aware:treshold=1", "options of prefix-aware: by, threshold"),
        ("prefix-aware:threshold=2", "threshold"),
        ("prefix-aware:threshold", "write NAME:OPTION=VALUE"),
        ("consistent-hash:bound=1,bound=2", "each option once"),
        ("least-loaded:by=weight", "by"),
        ("latency:explore=x", "explore"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_what_can(spec: str, said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        make_policy(spec, Role.DECODE)
