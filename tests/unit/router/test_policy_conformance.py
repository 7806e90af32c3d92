"""What every policy must do, whatever it is called: each one that is registered is put through all of this."""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.core.fleet import Role
from kvrelay.router.core.policy.base import NO_REQUEST, EngineView, Policy, RequestView, Snapshot, select
from kvrelay.router.core.policy.prefixes import MAX_PIECES, PIECE_BYTES, chain
from kvrelay.router.core.policy.registry import POLICIES, make_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType

EVERY = sorted(POLICIES)
every_policy = pytest.mark.parametrize("name", EVERY)
both_roles = pytest.mark.parametrize("role", list(Role))


def a_view(**fields: Any) -> EngineView:
    return EngineView(**fields)


views = st.builds(
    a_view,
    name=st.just(""),
    role=st.just(Role.DECODE),
    resting=st.booleans(),
    resting_until=st.floats(0, 9),
    draining=st.booleans(),
    in_flight=st.integers(0, 90),
    in_flight_tokens=st.integers(0, 90_000),
    ttft_s=st.none() | st.floats(0, 9),
    itl_s=st.none() | st.floats(0, 9),
)
sessions = st.sampled_from([b"", b"a", b"b"])
texts = st.sampled_from([b"", b"a" * 700, b"a" * 512 + b"b" * 512, b"c" * 40_000])
fleets = st.lists(views, max_size=6).map(lambda found: [named(view, index) for index, view in enumerate(found)])


def named(view: EngineView, index: int, **changes: Any) -> EngineView:
    fields = {name: getattr(view, name) for name in EngineView.__struct_fields__}
    return EngineView(**{**fields, "name": f"D{index}", "order": index, **changes})


def engines(names: Iterable[int], in_flight: Counter[str] | None = None, **changes: Any) -> tuple[EngineView, ...]:
    """Equal engines, but for what they have in flight."""
    load = in_flight or Counter()
    blank = EngineView("", Role.DECODE)
    return tuple(
        named(blank, index, in_flight=load[f"D{index}"], in_flight_tokens=100 * load[f"D{index}"], **changes)
        for index in names
    )


def a_request(number: int, length: int = 2_000) -> RequestView:
    """Unlike the others, in every respect."""
    text = b"%d " % number * length
    return RequestView(
        num_tokens=100, session=b"s%d" % number, prefix=chain(b"m", [text[:length]]), tokens=range(number, number + 100)
    )


class Driver:
    """A fleet of equal engines under a policy; each request is in flight until eight more have come."""

    def __init__(self, policy: Policy, seed: int = 1) -> None:
        self.policy = policy
        self.names: list[int] = []
        self.in_flight: Counter[str] = Counter()
        self._running: deque[str] = deque()
        self._rng = random.Random(seed)
        self._sent = 0

    def send(self, count: int) -> list[str]:
        return [self._send() for _ in range(count)]

    def _send(self) -> str:
        self._sent += 1
        fleet = Snapshot(float(self._sent), engines(self.names, self.in_flight, ttft_s=0.1, itl_s=0.01))
        choice = select(self.policy, a_request(self._sent), fleet, self._rng)
        assert choice is not None
        self.in_flight[choice.engine] += 1
        self._running.append(choice.engine)
        if len(self._running) > 8:
            self.in_flight[self._running.popleft()] -= 1
        return choice.engine


@every_policy
@both_roles
def test_it_is_made_without_options_and_knows_its_name(name: str, role: Role) -> None:
    assert make_policy(name, role).name == name


@every_policy
@settings(max_examples=60, deadline=None)
@given(fleet=fleets, session=sessions, text=texts, seed=st.integers(0, 3))
def test_it_chooses_what_is_offered_the_well_first_and_never_what_drains(
    name: str, fleet: list[EngineView], session: bytes, text: bytes, seed: int
) -> None:
    policy, rng = make_policy(name, Role.DECODE), random.Random(seed)
    request = RequestView(num_tokens=len(text) // 4, session=session, prefix=chain(b"", [text]))
    staying = {view.name: view for view in fleet if not view.draining}
    for _ in range(3):
        choice = select(policy, request, Snapshot(1.0, tuple(fleet)), rng)
        if not staying:
            assert choice is None
            continue
        assert choice is not None
        chosen = staying[choice.engine]
        assert choice.why
        if any(not view.resting for view in staying.values()):
            assert not chosen.resting
        else:
            assert chosen.resting_until == min(view.resting_until for view in staying.values())


@every_policy
def test_it_takes_requests_of_which_nothing_is_known(name: str) -> None:
    choice = select(make_policy(name, Role.DECODE), NO_REQUEST, Snapshot(0.0, engines(range(3))), random.Random(1))
    assert choice is not None


@every_policy
def test_it_says_nobody_when_nobody_is_offered(name: str) -> None:
    assert select(make_policy(name, Role.DECODE), a_request(1), Snapshot(0.0, ()), random.Random(1)) is None


@every_policy
@both_roles
def test_the_same_requests_and_the_same_chance_give_the_same_choices(name: str, role: Role) -> None:
    runs = []
    for _ in range(2):
        driver = Driver(make_policy(name, role), seed=7)
        driver.names = [0, 1, 2, 3]
        runs.append(driver.send(60))
    assert runs[0] == runs[1]


@every_policy
@both_roles
def test_unlike_requests_spread_over_equal_engines(name: str, role: Role) -> None:
    driver = Driver(make_policy(name, role))
    driver.names = [0, 1, 2, 3]
    counts = Counter(driver.send(400))
    assert set(counts) == {"D0", "D1", "D2", "D3"}
    assert min(counts.values()) >= 50
    assert max(counts.values()) <= 170


@every_policy
def test_an_engine_that_joins_gets_its_share_and_one_that_leaves_gets_nothing(name: str) -> None:
    driver = Driver(make_policy(name, Role.DECODE))
    driver.names = [0, 1]
    driver.send(40)
    driver.names = [0, 1, 2]
    assert Counter(driver.send(150))["D2"] >= 20
    driver.names = [0, 2]
    driver.policy.forget("D1")
    assert set(driver.send(60)) == {"D0", "D2"}
    driver.names = [0, 1, 2]
    assert Counter(driver.send(150))["D1"] >= 20


@every_policy
def test_forgetting_an_engine_it_never_saw_is_nothing(name: str) -> None:
    make_policy(name, Role.DECODE).forget("D9")


@every_policy
def test_what_it_thinks_is_cached_is_part_of_the_prompt(name: str) -> None:
    driver = Driver(make_policy(name, Role.DECODE))
    driver.names = [0, 1]
    driver.send(20)
    for number in (5, 50):
        request = a_request(number)
        assert all(0 <= tokens <= request.num_tokens for tokens in driver.policy.cached(request).values())


@every_policy
def test_its_cost_grows_no_faster_than_the_fleet_and_the_prompt(name: str) -> None:
    small, many = (_lines_of_a_choice(name, num_engines=count, num_bytes=20_000) for count in (32, 64))
    assert many <= 2.5 * small + 100
    short, long = (_lines_of_a_choice(name, num_engines=8, num_bytes=size) for size in (16_000, 600_000))
    assert len(a_request(1, 600_000).prefix) <= MAX_PIECES
    assert long <= (600_000 / 16_000) * short + 100


def _lines_of_a_choice(name: str, *, num_engines: int, num_bytes: int) -> int:
    """Lines of Python that one choice runs, when the policy has seen many requests."""
    policy, rng = make_policy(name, Role.DECODE), random.Random(3)
    fleet = Snapshot(0.0, engines(range(num_engines), ttft_s=0.1))
    for number in range(2 * num_engines):
        select(policy, a_request(number, num_bytes), fleet, rng)
    request = a_request(0, num_bytes)
    return _count_lines(lambda: select(policy, request, fleet, rng))


def _count_lines(work: Callable[[], object]) -> int:
    count = 0

    def trace(_frame: FrameType, _event: str, _argument: object) -> Callable[..., Any]:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_pieces_of_prompts_are_what_the_suite_takes_them_for() -> None:
    prefixes: Sequence[tuple[int, ...]] = [a_request(number).prefix for number in range(2)]
    assert len(prefixes[0]) == 2_000 // PIECE_BYTES
    assert not set(prefixes[0]) & set(prefixes[1])
