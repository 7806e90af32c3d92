"""Requests of every shape on one unusual pair: P caches prefixes, D does not, and guesses ahead; both have adapters.

What is right is told by one plain vLLM that guesses nothing. D takes every prompt from the pool, so proofs tell what
was there; P's counters tell what of a conversation's next turn it did not have to compute.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest
from asking import (
    Answer,
    Question,
    ask,
    assert_each_handed_over,
    assert_nothing_held,
    assert_same,
    chat,
    completion,
    eventually,
    proof,
    tokens,
)

from kvrelay.client.blocking import PoolClient
from kvrelay.testing.adapter_models import build_tiny_lora
from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

    Pair = tuple[RunningStack, RunningStack]

pytestmark = pytest.mark.matrix

CHUNK, BLOCK = 64, 32
GUESSING = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1})
CHANGEABLE = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_LOGGING_LEVEL": "DEBUG",
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: build_tiny_lora(root / name, seed=seed) for seed, name in enumerate(("first", "second", "third"))}


@pytest.fixture(scope="module")
def pair(
    start_stacks: Callable[..., AbstractContextManager[Pair]], tiny_model: Path, adapters: dict[str, Path]
) -> Iterator[Pair]:
    """The pair, and the plain engine."""
    lora = "--enable-lora --max-loras 2 --max-cpu-loras 8 --max-lora-rank 8"
    both = f"--engine-args={lora} --lora-modules first={adapters['first']}"
    decode = f"--decode-args=--no-enable-prefix-caching --speculative-config '{GUESSING}'"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CHANGEABLE.items():
            patch.setenv(name, value)
        with start_stacks(tiny_model, every=[both], ours=[decode]) as started:
            yield started


def same(pair: Pair, question: Question) -> Answer:
    """Ask both; they say the same."""
    ours, theirs = (ask(stack, question) for stack in pair)
    assert_same(ours, theirs, question.body["prompt" if "prompt" in question.body else "messages"])
    return ours


def repeating(count: int, *seed: object) -> list[int]:
    """A prompt in which there is something to guess from."""
    return (tokens(12, *seed) * (count // 12 + 1))[:count]


def test_the_next_turn_takes_what_was_generated_from_the_pool(pair: Pair) -> None:
    stack, _ = pair
    (prefill,) = stack.prefill_urls
    prompt, known, said = repeating(200, "turns"), 0, 0
    for turn, new in enumerate((150, 90, 40)):
        before = Counters(prefill).total("kvrelay:loaded_tokens_total")
        answer = same(pair, completion(stack.model_name, prompt, max_tokens=new, ignore_eos=True))
        told = proof(stack, answer)
        assert told["recomputed_tokens"] <= 1, told
        assert told["local_tokens"] == 0, told
        if turn:
            loaded = Counters(prefill).total("kvrelay:loaded_tokens_total") - before
            assert told["earlier_tokens"] >= said // CHUNK * CHUNK > known, told
            assert loaded >= said // CHUNK * CHUNK - known // BLOCK * BLOCK > 0, "P computed what D had generated"
        known = len(prompt)
        prompt = [*prompt, *answer.token_ids, *tokens(20, "turns", turn)]
        said = known + len(answer.token_ids) - 1
        assert_nothing_held(stack)  # what D generated is sealed
    lines = [line for line in stack.log("D0").splitlines() if f"Proof(handover='{answer.handover}'" in line]
    assert len(lines) == 1, "DEBUG logs tell of each proof once"
    assert f"earlier_tokens={told['earlier_tokens']}" in lines[0]
    guessed = Counters(stack.decode_urls[0])
    assert guessed.total("vllm:spec_decode_num_accepted_tokens_total") > 0, "nothing was guessed rightly"


def test_a_chat_goes_on(pair: Pair) -> None:
    stack, _ = pair
    messages = [{"role": "user", "content": "Tell me about return values and references. " * 12}]
    for turn in range(3):
        answer = same(pair, chat(stack.model_name, messages, max_tokens=70))
        assert proof(stack, answer)["recomputed_tokens"] <= 1
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": f"And {turn}?"}]
    assert_nothing_held(stack)


def test_a_batch_of_prompts(pair: Pair) -> None:
    stack, reference = pair
    batch = completion(stack.model_name, [1], max_tokens=20)
    batch.body["prompt"] = [repeating(length, "batch", length) for length in (5, 64, 70, 300)]
    assert_each_handed_over(stack, reference, batch, prompts=4)
    assert_nothing_held(stack)


def test_a_reset_of_the_prefix_cache_is_refused_while_it_is_in_use_and_then_costs_nothing_wrong(pair: Pair) -> None:
    stack, _ = pair
    question = completion(stack.model_name, repeating(400, "reset"))
    first = same(pair, question)
    (decode,), (prefill,) = stack.decode_urls, stack.prefill_urls
    long = completion(stack.model_name, tokens(30, "reset-busy"), max_tokens=400, ignore_eos=True)
    asking = threading.Thread(target=ask, args=(stack, long))
    asking.start()
    eventually(lambda: Counters(decode).running, bool, "a running request", within_s=60)
    assert reset(decode) is False
    asking.join()
    for url in (prefill, decode):
        eventually(lambda url=url: reset(url), bool, "a reset of an idle engine")  # type: ignore[misc]
    before = Counters(prefill).total("kvrelay:loaded_tokens_total")
    again = same(pair, question)
    assert again.token_ids == first.token_ids
    assert proof(stack, again)["recomputed_tokens"] <= 1
    assert Counters(prefill).total("kvrelay:loaded_tokens_total") - before >= 399, (
        "P takes from the pool what it forgot"
    )
    assert_nothing_held(stack)


def test_engines_that_paused_and_slept_go_on_exchanging(pair: Pair) -> None:
    stack, _ = pair
    (prefill,) = stack.prefill_urls
    question = completion(stack.model_name, repeating(400, "paused"))
    first = same(pair, question)
    assert_nothing_held(stack)
    for path in ("/pause", "/resume", "/sleep?level=1", "/wake_up"):
        for url in (prefill, *stack.decode_urls):
            httpx.post(url + path, timeout=60).raise_for_status()
    before = Counters(prefill).total("kvrelay:loaded_tokens_total")
    again = same(pair, question)
    assert again.token_ids == first.token_ids
    assert proof(stack, again)["recomputed_tokens"] <= 1
    assert Counters(prefill).total("kvrelay:loaded_tokens_total") - before >= 399, "P takes what it forgot"
    assert proof(stack, same(pair, completion(stack.model_name, repeating(300, "woken"))))["recomputed_tokens"] <= 1
    assert_nothing_held(stack)


def test_a_reset_is_refused_while_d_follows_a_prefill_and_then_works(pair: Pair) -> None:
    """D has blocks to load into, and follows what nobody computes yet."""
    stack, reference = pair
    (decode,) = stack.decode_urls
    early, over = tokens(700, "reset-load"), "reset-load"
    said = {"kvrelay": {"handover": over, "leg": "decode", "worker": "D0", "prefill": "P0", "overlapped": True}}
    question = completion(stack.model_name, early)
    with PoolClient.connect(stack.pool_address, name="test", map_arena=False) as pool, ThreadPoolExecutor(1) as threads:
        pool.open_ticket(over, 60.0)
        body = question.body | {"kv_transfer_params": said}
        asked = threads.submit(httpx.post, f"{decode}/v1/completions", json=body, timeout=120)
        eventually(lambda: pool.stat()["waiting"], bool, "D following what nobody computes", within_s=60)
        assert reset(decode) is False
        pool.seal_ticket(over)
        reply = asked.result()
        pool.end_ticket(over)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["token_ids"] == ask(reference, question).token_ids
    eventually(lambda: reset(decode), bool, "a reset of D when it has loaded")
    assert_nothing_held(stack)


def reset(url: str) -> bool:
    reply = httpx.post(f"{url}/reset_prefix_cache", timeout=30)
    assert reply.status_code == 200, reply.text
    done: bool = reply.json()["success"]
    return done


def load(url: str, name: str, path: Path) -> None:
    reply = httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}, timeout=60)
    assert reply.status_code == 200, reply.text


def unload(url: str, name: str) -> None:
    reply = httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)
    assert reply.status_code == 200, reply.text


def test_an_adapters_kv_is_handed_over_to_the_same_adapter_only(pair: Pair, adapters: dict[str, Path]) -> None:
    stack, plain = pair
    prompt = repeating(300, "adapter")
    base = same(pair, completion(stack.model_name, prompt))
    first = same(pair, completion("first", prompt))
    assert first.token_ids != base.token_ids
    told = proof(stack, first)
    assert (told["recomputed_tokens"], told["local_tokens"]) == (1, 0), told
    # Loaded while running; the same everywhere, and one whose weights are others on P than on D.
    for url in (*stack.prefill_urls, *stack.decode_urls, plain.base_url):
        load(url, "second", adapters["second"])
        load(url, "mixed", adapters["third" if url in stack.prefill_urls else "second"])
    second = same(pair, completion("second", prompt))
    assert second.token_ids not in (first.token_ids, base.token_ids)
    assert proof(stack, second)["recomputed_tokens"] == 1
    mixed = same(pair, completion("mixed", prompt))
    assert mixed.token_ids == second.token_ids
    told = proof(stack, mixed)
    assert (told["recomputed_tokens"], told["reason"]) == (300, "miss"), told
    assert_nothing_held(stack)


def test_an_adapter_changed_in_place_is_not_exchanged_until_the_old_ones_kv_is_gone(
    pair: Pair, adapters: dict[str, Path], tmp_path: Path
) -> None:
    stack, plain = pair
    folder = tmp_path / "moving"
    folder.mkdir()
    engines = (*stack.prefill_urls, *stack.decode_urls, plain.base_url)

    def put(name: str) -> None:
        for file in adapters[name].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())

    put("third")
    for url in engines:
        load(url, "moving", folder)
    prompt = repeating(200, "moving")
    old = same(pair, completion("moving", prompt))
    assert proof(stack, old)["recomputed_tokens"] == 1
    put("first")  # nobody has read it
    told = proof(stack, same(pair, completion("moving", [*prompt, 5])))
    assert (told["recomputed_tokens"], told["reason"]) == (201, "adapter"), told
    for url in engines:
        unload(url, "moving")
        load(url, "moving", folder)
    told = proof(stack, same(pair, completion("moving", repeating(200, "moved"))))
    assert (told["recomputed_tokens"], told["reason"]) == (200, "adapter"), told
    for url in engines:
        eventually(lambda url=url: reset(url), bool, "a reset of an idle engine")  # type: ignore[misc]
    new = same(pair, completion("moving", prompt))
    assert new.token_ids != old.token_ids
    assert proof(stack, new)["recomputed_tokens"] == 1
    assert_nothing_held(stack)
