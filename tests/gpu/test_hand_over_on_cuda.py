"""Real vLLM on a device, asynchronous scheduling included: P hands over to D, and D answers as one plain engine.

P, D and the plain engine share the first device. What a hand-over leaves to compute on D is what a second asking
leaves to a plain engine, one token of the prompt: so the second answer of that is the right one, to the last bit.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvrelay.launch.host import free_ports
from kvrelay.testing.models import build_tiny_llama
from kvrelay.testing.stack import RunningStack

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 600.0
LENGTHS = (2, 15, 16, 17, 63, 64, 65, 129, 500, 1000, 1900)
FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--gpu-memory-utilization", "0.2")
OPTIONS = "[connector_options]\nallow_untested_device = true\n"


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningStack, RunningStack]]:
    """P and D, and a plain engine."""
    root = tmp_path_factory.mktemp("gpu")
    model = build_tiny_llama(root / "tiny", seed=1)
    (root / "options.toml").write_text(OPTIONS)
    ports = list(map(str, free_ports(2, taken=set())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        flags = (*FLAGS, "--engine-args=--enable-sleep-mode")
        ours = ("--prefill", "1", "--decode", "1", "--config", str(root / "options.toml"))
        with (
            RunningStack(model, root / "plain", [*flags, "--port", ports[0], "--connector", "none"]) as plain,
            RunningStack(model, root / "pd", [*flags, "--port", ports[1], *ours]) as stack,
        ):
            for one in (plain, stack):
                one.wait_ready(START_S)
            yield stack, plain


def prompt(length: int, *seed: object) -> list[int]:
    return random.Random(repr(seed)).choices(range(10, 2000), k=length)


def ask(stack: RunningStack, tokens: list[int]) -> tuple[dict[str, Any], str]:
    """The answer's choice, and the hand-over's name."""
    body = {"model": stack.model_name, "prompt": tokens, "max_tokens": 16, "temperature": 0, "logprobs": 2}
    answer = httpx.post(f"{stack.base_url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120)
    answer.raise_for_status()
    return answer.json()["choices"][0], answer.headers.get("x-kvrelay-handover", "")


def right(plain: RunningStack, tokens: list[int]) -> dict[str, Any]:
    ask(plain, tokens)
    return ask(plain, tokens)[0]


def handed_over(stack: RunningStack, name: str) -> int:
    proofs = httpx.get(f"{stack.base_url}/kvrelay/handovers/{name}", timeout=30).json()["proofs"]
    return int(proofs[-1]["handed_over_tokens"])


@pytest.mark.parametrize("length", LENGTHS)
def test_d_takes_a_prompt_whole_and_answers_as_one_engine(
    stacks: tuple[RunningStack, RunningStack], length: int
) -> None:
    stack, plain = stacks
    tokens = prompt(length, "single", length)
    choice, name = ask(stack, tokens)
    theirs = right(plain, tokens)
    assert choice["token_ids"] == theirs["token_ids"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-3)
    assert handed_over(stack, name) >= length - 1


def test_blocks_that_change_hands_at_once_stay_apart(stacks: tuple[RunningStack, RunningStack]) -> None:
    """Many prompts at a time, over and over: blocks are freed, loaded and computed while kernels are queued."""
    stack, plain = stacks
    prompts = [prompt(40 + 61 * at % 900, "crowd", at) for at in range(48)]
    expected = [right(plain, tokens)["token_ids"] for tokens in prompts]
    with ThreadPoolExecutor(12) as threads:
        for _ in range(3):
            answers = list(threads.map(lambda tokens: ask(stack, tokens)[0]["token_ids"], prompts))
            assert answers == expected


def test_an_engine_that_slept_answers_rightly(stacks: tuple[RunningStack, RunningStack]) -> None:
    stack, plain = stacks
    tokens = prompt(300, "sleep")
    before = ask(stack, tokens)[0]["token_ids"]
    for path in ("/sleep?level=1", "/wake_up"):
        for url in (*stack.prefill_urls, *stack.decode_urls):
            httpx.post(url + path, timeout=60).raise_for_status()
    again, other = ask(stack, tokens)[0], prompt(301, "slept")
    assert again["token_ids"] == before
    answer, name = ask(stack, other)
    assert answer["token_ids"] == right(plain, other)["token_ids"]
    assert handed_over(stack, name) >= 300
