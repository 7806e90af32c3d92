"""Every connector that works on CPUs, on real vLLM: the tokens of one plain engine, streamed and not, and nothing left.

What each hands over can be seen differently: in our proofs where our pool has a part, in vLLM's own counters elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from asking import (
    ask,
    ask_all,
    ask_and_kill,
    assert_nothing_held,
    assert_same,
    chat,
    completion,
    engines_idle,
    eventually,
    leased,
    proof,
    tokens,
)

from kvrelay.launch.kernel import descendants
from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asking import Answer, Question

    from kvrelay.testing.stack import RunningStack

    StartStack = Callable[..., RunningStack]
    RightAnswers = Callable[[Path, Sequence[Question]], list[Answer]]

BLOCK = 32
LENGTHS = [1, 2, 31, 32, 33, 64, 65, 97, 150, 256, 257, 300, 513, 1000, 1025, 2032]
"""Around bounds of blocks (32) and of P's steps (256)."""
WHOLE_STEPS = ("--prefill-max-num-batched-tokens", "2048")
EXTERNAL = "vllm:external_prefix_cache_hits_total"
"""Tokens an engine took from its connector."""


def questions_for(model: Path) -> list[Question]:
    prompts = [
        completion(model.name, tokens(length, "connectors", length), stream=bool(n % 2))
        for n, length in enumerate(LENGTHS)
    ]
    again = [completion(model.name, tokens(257, "connectors", 257), stream=True)]
    talk = [chat(model.name, [{"role": "user", "content": "Hello there. " * n}], stream=n > 5) for n in (1, 5, 20)]
    return prompts + again + talk


def crowd_for(model: Path) -> list[Question]:
    """Pairs of one prompt, asked at once: both read, or one writes what the other reads."""
    return [
        completion(model.name, tokens(90 + 83 * (n // 2), "connectors", "crowd", n // 2), stream=bool(n % 2))
        for n in range(8)
    ]


def check(stack: RunningStack, model: Path, right: RightAnswers, *, proves: bool = False) -> list[Answer]:
    """Ask everything, one by one and at once; the answers that were asked for one by one.

    ``proves``: whether this connector's hand-overs are proven. Then half of those at once must be.
    """
    alone, crowd = questions_for(model), crowd_for(model)
    expected = right(model, [*alone, *crowd])
    answers = [ask(stack, question) for question in alone]
    for n, (ours, theirs) in enumerate(zip(answers, expected, strict=False)):
        assert_same(ours, theirs, alone[n].body)
        assert (ours.prefill, ours.decode) == ("P0", "D0")
    at_once = ask_all(stack, crowd, at_once=4)
    for ours, theirs in zip(at_once, expected[len(alone) :], strict=True):
        assert_same(ours, theirs, "at once")
    if proves:
        told = [proof(stack, answer) for answer in at_once]
        taken_over = [one["handed_over_tokens"] + one["earlier_tokens"] > 0 for one in told]
        whole = [taken and one["recomputed_tokens"] <= BLOCK for taken, one in zip(taken_over, told, strict=True)]
        assert sum(whole) >= len(whole) / 2, told
    assert all(map(stack.is_running, ("P0", "D0", "router")))
    return answers


def several(stack: RunningStack, **more: object) -> httpx.Response:
    """One request that becomes several engine requests."""
    body = {"model": stack.model_name, "max_tokens": 6, "prompt": tokens(140, "connectors", "several"), **more}
    reply = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply


def taken(stack: RunningStack) -> float:
    """Tokens D took from its connector."""
    (url,) = stack.decode_urls
    return Counters(url).total(EXTERNAL)


@pytest.mark.matrix
@pytest.mark.parametrize("connector", ["nixl", "nixl-push"])
def test_nixl_hands_over_what_one_reader_reads(
    connector: str, start_stack: StartStack, right_answers: RightAnswers, tiny_model: Path
) -> None:
    stack = start_stack("--connector", connector)
    check(stack, tiny_model, right_answers)
    assert taken(stack) >= sum(LENGTHS[1:]) * 0.9
    for more in ({"n": 3, "temperature": 0.7, "seed": 3}, {"prompt": [tokens(5, "b"), tokens(70, "b")]}):
        assert "x-kvrelay-prefill" not in several(stack, **more).headers  # D alone
    eventually(lambda: engines_idle(stack.prefill_urls + stack.decode_urls), bool, "idle engines", within_s=60)


@pytest.mark.matrix
def test_a_shared_folder_hands_over_and_goes_with_the_run(
    start_stack: StartStack, right_answers: RightAnswers, tiny_model: Path
) -> None:
    stack = start_stack("--connector", "shared-storage", *WHOLE_STEPS)
    check(stack, tiny_model, right_answers)
    # It takes whole blocks, and computes the rest; and looks in the wrong folder if the last block has one token.
    assert taken(stack) >= sum((length - 1) // 32 * 32 for length in LENGTHS if length % 32 != 1)
    folder = stack.run_dir / "kv"
    assert any(folder.iterdir())
    stack.stop()
    assert not folder.exists()


@pytest.mark.matrix
def test_nixl_with_our_pool_hands_over_and_the_pool_serves_what_nixl_cannot(
    start_stack: StartStack, right_answers: RightAnswers, tiny_model: Path
) -> None:
    stack = start_stack("--connector", "multi")
    answers = check(stack, tiny_model, right_answers, proves=True)
    for length, answer in zip(LENGTHS, answers, strict=False):
        told = proof(stack, answer)
        assert told["recomputed_tokens"] <= 1, told
        assert told["handed_over_tokens"] >= length - 1, told
        assert told["bytes"] == 0, told  # NIXL moved them
    reply = several(stack, n=2, temperature=0.7, seed=3)
    assert reply.headers["x-kvrelay-prefill"] == "P0"
    handover = f"{stack.base_url}/kvrelay/handovers/{reply.headers['x-kvrelay-handover']}"
    both = eventually(
        lambda: httpx.get(handover, timeout=20).json()["proofs"], lambda found: len(found) == 2, "two proofs"
    )
    assert sum(told["bytes"] for told in both) > 0, both  # the pool did
    assert all(told["recomputed_tokens"] <= 32 for told in both), both
    assert_nothing_held(stack)


@pytest.mark.matrix
def test_a_direct_hand_over_is_proven_and_dies_with_p_alone(
    start_stack: StartStack, right_answers: RightAnswers, tiny_model: Path
) -> None:
    """1. All is handed over by the pool inside P. 2. P is killed while D loads. 3. D computes the rest, and goes on.

    4. Nothing of P is left, its pool neither. 5. P starts again, with a pool of its own, and hands over as before.
    """
    stack = start_stack("--connector", "direct")
    assert "pool" not in stack.logs()
    answers = check(stack, tiny_model, right_answers, proves=True)
    for length, answer in zip(LENGTHS, answers, strict=False):
        told = proof(stack, answer)
        assert told["recomputed_tokens"] <= 1, told
        assert told["handed_over_tokens"] >= length - 1, told
    assert_nothing_held(stack)

    below = descendants(stack.process("P0"))
    pools = [pid for pid in below if b"kvrelay.connector.embedded" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(pools) == 1, below
    question, answer = ask_and_kill(stack, "P0", leased, "direct", length=1900)
    (expected,) = right_answers(tiny_model, [question])
    assert_same(answer, expected, "after the end of P and its pool")
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), bool, "end of all of P")
    alone = completion(stack.model_name, tokens(100, "connectors", "alone"))
    assert_same(ask(stack, alone), right_answers(tiny_model, [alone])[0], "D alone")

    stack.revive(400.0)
    eventually(lambda: Counters(stack.base_url).total("kvrelay_router_pool_up"), bool, "the router at the new pool")
    again = completion(stack.model_name, tokens(700, "connectors", "again"))
    answer = ask(stack, again)
    assert_same(answer, right_answers(tiny_model, [again])[0], "after the revival")
    assert proof(stack, answer)["handed_over_tokens"] >= 699
    assert_nothing_held(stack)
