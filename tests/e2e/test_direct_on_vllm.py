"""Direct hand-over from several prefill engines, each with a pool of its own, to one decode engine on real vLLM."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from asking import ask, ask_all, assert_same, completion, eventually, proof, tokens

from kvrelay.client.blocking import PoolClient
from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asking import Answer, Question

    from kvrelay.testing.stack import RunningStack

LENGTHS = [1, 33, 64, 65, 257, 700, 1000, 1900]


def held(stack: RunningStack, prefill: str) -> dict[str, Any]:
    """What that engine's pool holds for somebody."""
    with PoolClient.connect(stack.pools[prefill], name="test", map_arena=False) as pool:
        return {name: pool.stat()[name] for name in ("leases", "tickets", "unsealed")}


def asked_whole(
    stack: RunningStack, questions: Sequence[Question], right: Sequence[Answer], lengths: Sequence[int]
) -> list[str | None]:
    """Ask one after the other; all must be right and handed over whole. Who prefilled each."""
    prefills = []
    for length, question, theirs in zip(lengths, questions, right, strict=True):
        answer = ask(stack, question)
        assert_same(answer, theirs, length)
        told = proof(stack, answer)
        assert told["recomputed_tokens"] <= 1, (answer.prefill, told)
        assert told["handed_over_tokens"] >= length - 1, (answer.prefill, told)
        prefills.append(answer.prefill)
    return prefills


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dispatch", ["sequential", "overlapped"])
def test_several_prefill_engines_hand_over_directly_and_one_that_dies_costs_only_its_own(
    start_stack: Callable[..., RunningStack],
    right_answers: Callable[[Path, Sequence[Question]], list[Answer]],
    tiny_model: Path,
    dispatch: str,
) -> None:
    """1. Both hand over, alone and at once. 2. One is killed. 3. The other hands over as before, everything is right.

    4. The dead one comes back with a new pool, and hands over again.
    """
    everything = LENGTHS * 3
    questions = [
        completion(tiny_model.name, tokens(length, "direct", n), stream=bool(n % 2))
        for n, length in enumerate(everything)
    ]
    crowd = [completion(tiny_model.name, tokens(100 + 90 * n, "direct", "crowd", n)) for n in range(8)]
    right = right_answers(tiny_model, [*questions, *crowd])
    stack = start_stack("--connector", "direct", "--prefill", "2", "--decode", "1", "--dispatch", dispatch)
    assert list(stack.pools) == ["P0", "P1"]
    size = len(LENGTHS)

    prefills = asked_whole(stack, questions[:size], right[:size], LENGTHS)
    assert set(prefills) == {"P0", "P1"}
    for ours, theirs in zip(ask_all(stack, crowd, at_once=4), right[len(questions) :], strict=True):
        assert_same(ours, theirs, "at once")
        assert proof(stack, ours)["recomputed_tokens"] <= 1
    for name in stack.pools:
        eventually(partial(held, stack, name), lambda seen: not any(seen.values()), f"an idle pool of {name}")

    stack.kill("P0")
    prefills = asked_whole(stack, questions[size : 2 * size], right[size : 2 * size], LENGTHS)
    assert set(prefills) == {"P1"}
    assert Counters(stack.base_url).total("kvrelay_router_pool_up") == 1

    stack.revive(400.0)
    again = zip(LENGTHS, questions[2 * size :], right[2 * size : 3 * size], strict=True)
    for length, question, theirs in again:
        assert_same(ask(stack, question), theirs, f"again: {length}")
    turn = itertools.count()

    def p0_hands_over() -> bool:
        answer = ask(stack, completion(tiny_model.name, tokens(300, "direct", "back", next(turn))))
        return answer.prefill == "P0" and proof(stack, answer)["recomputed_tokens"] <= 1

    eventually(p0_hands_over, bool, "a hand-over from the new pool of P0")
