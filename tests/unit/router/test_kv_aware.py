"""The KV-aware policy: what an engine would compute, plus what it has to do already."""

from __future__ import annotations

import random

from kvrelay.router.core.fleet import Role
from kvrelay.router.core.kv.events import BlockStored
from kvrelay.router.core.kv.index import KvIndex, Source
from kvrelay.router.core.policy.base import Choice, EngineView, RequestView
from kvrelay.router.core.policy.kv_aware import KvAware, KvOptions

PROMPT = tuple(range(1_000))
RNG = random.Random(1)


def policy(role: Role = Role.PREFILL, **options: float) -> KvAware:
    """Engine 1 holds half of the prompt."""
    index = KvIndex(max_blocks=1_000)
    name = f"{role.value[0].upper()}1"
    index.join(Source(name))
    index.apply(Source(name), [BlockStored([*range(50)], None, list(PROMPT[:500]), 10)])
    return KvAware(KvOptions(**options), role, index)  # type: ignore[arg-type]


def engine(number: int, role: Role = Role.PREFILL, tokens: int = 0) -> EngineView:
    return EngineView(f"{role.value[0].upper()}{number}", role, number, in_flight=tokens > 0, in_flight_tokens=tokens)


def choose(policy: KvAware, engines: list[EngineView], request: RequestView | None = None) -> Choice:
    return policy.choose(request or RequestView(tokens=PROMPT), engines, 0.0, RNG)


def test_the_engine_that_holds_the_most_takes_a_prompt() -> None:
    assert choose(policy(), [engine(0), engine(1), engine(2)]) == Choice("P1", "kv")


def test_more_to_do_than_it_saves_sends_a_prompt_elsewhere() -> None:
    assert choose(policy(), [engine(0), engine(1, tokens=499)]) == Choice("P1", "kv")
    assert choose(policy(), [engine(0), engine(1, tokens=501)]) == Choice("P0", "balance")
    assert choose(policy(load=0.5), [engine(0), engine(1, tokens=501)]) == Choice("P1", "kv")
    assert choose(policy(overlap=0.0), [engine(0), engine(1, tokens=1)]) == Choice("P0", "balance")


def test_prompts_that_were_there_already_are_little_to_do() -> None:
    seasoned = policy()
    for _ in range(30):
        assert choose(seasoned, [engine(1)]).engine == "P1"
    assert choose(seasoned, [engine(0), engine(1, tokens=700)]) == Choice("P1", "kv")
    seasoned.forget("P1")
    assert choose(seasoned, [engine(0), engine(1, tokens=700)]) == Choice("P0", "balance")


def test_to_a_decode_engine_every_token_in_flight_counts() -> None:
    seasoned = policy(Role.DECODE)
    for _ in range(30):
        choose(seasoned, [engine(1, Role.DECODE)])
    crowded = [engine(0, Role.DECODE), engine(1, Role.DECODE, tokens=700)]
    assert choose(seasoned, crowded) == Choice("D0", "balance")


def test_what_nobody_holds_is_spread_over_equals() -> None:
    fresh = RequestView(tokens=tuple(range(5_000, 6_000)))
    chosen = {choose(policy(), [engine(0), engine(1), engine(2)], fresh) for _ in range(50)}
    assert chosen == {Choice(name, "new") for name in ("P0", "P1", "P2")}


def test_without_token_ids_prompts_go_by_text() -> None:
    known = policy()
    text = RequestView(num_tokens=100, prefix=(1, 2, 3))
    first = choose(known, [engine(0), engine(1), engine(2)], text)
    assert first.why == "by_text"
    assert {choose(known, [engine(0), engine(1), engine(2)], text) for _ in range(20)} == {first}
    assert choose(KvAware(KvOptions(), Role.PREFILL), [engine(0)]) == Choice("P0", "by_text")


def test_it_tells_how_much_is_cached() -> None:
    known = policy()
    assert known.cached(RequestView(tokens=PROMPT)).get("P1") == 500
    assert not known.cached(RequestView(tokens=PROMPT, salt="tenant")).get("P1")
    assert not known.cached(RequestView(tokens=PROMPT)).get("P0")
