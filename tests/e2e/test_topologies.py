"""Engines of different shapes hand KV over: other ranks, stages, replicas and block sizes on P than on D.

Whatever the shapes, the tokens are those of one plain vLLM, and D computes one token of the prompt at most. One shape
runs always; all of them are the matrix (``make test-matrix``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from asking import (
    Series,
    ask,
    ask_and_kill,
    assert_both_replicas_took_part,
    assert_nothing_held,
    assert_same,
    completion,
    tokens,
    unsealed,
)

from kvrelay.testing.models import build_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asking import Answer, Question

    from kvrelay.testing.stack import RunningStack

    StartStack = Callable[..., RunningStack]
    RightAnswers = Callable[[Path, Sequence[Question]], list[Answer]]

STEP = 256
"""Tokens P computes in one step at most: see conftest."""
SOME_LENGTHS = [1, 47, 48, 49, 64, 65, 97, 255, 256, 257, 513, 1000]
LENGTHS = [
    1, 2, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 99, 100, 101, 127, 128, 129, 193, STEP - 1, STEP, STEP + 1,
    300, 2 * STEP - 1, 2 * STEP, 2 * STEP + 1, 700, 4 * STEP - 1, 4 * STEP, 4 * STEP + 1, 2032,
]  # fmt: skip
"""Around bounds of blocks (32, 64, 128), chunks (48, 64, 100) and P's steps; most are longer than such a step."""
MODELS = {"gqa": {"kv_heads": 2}, "mqa": {"kv_heads": 1}, "kv4": {"kv_heads": 4}, "mha": {"kv_heads": 8}}


@dataclass(frozen=True)
class Shape:
    """One cell of the matrix."""

    prefill: str
    decode: str
    blocks: tuple[int, int]
    chunk: int = 64
    model: str = "gqa"
    packing: str = "canonical"
    dispatch: str = "sequential"
    p_caches: bool = True
    """Whether P has a prefix cache; D has."""

    def __str__(self) -> str:
        said = f"{self.model}-{self.prefill}-{self.decode}-{self.blocks[0]}to{self.blocks[1]}-chunk{self.chunk}"
        said += "-native" if self.packing == "native" else ""
        said += "-overlapped" if self.dispatch == "overlapped" else ""
        return said if self.p_caches else f"{said}-uncached"

    @property
    def flags(self) -> list[str]:
        """For `kvrelay up`."""
        flags = ["--chunk-tokens", str(self.chunk), "--dispatch", self.dispatch]
        flags += [] if self.p_caches else ["--prefill-args=--no-enable-prefix-caching"]
        for role, shape, block in (("prefill", self.prefill, self.blocks[0]), ("decode", self.decode, self.blocks[1])):
            flags += [f"--{role}-block-size", str(block)]
            kind, size = shape[:2], shape[2:]
            long = {"tp": "tensor", "pp": "pipeline", "dp": "data"}[kind]
            if size != "1":
                flags += [f"--{role}-{long}-parallel-size", size]
            if kind == "pp":  # vLLM's stages crash uncompiled on CPUs, with or without a connector
                flags.append(f"--no-{role}-enforce-eager")
        return flags


ALWAYS = Shape("tp2", "tp1", (64, 32), chunk=48)
MATRIX = [
    Shape("tp1", "tp1", (32, 128)),
    Shape("tp1", "tp1", (128, 64), chunk=48),
    ALWAYS,
    Shape("tp1", "tp2", (32, 128), chunk=100),
    Shape("tp2", "tp2", (128, 64)),
    Shape("pp2", "tp1", (32, 64), chunk=48),
    Shape("tp1", "pp2", (64, 32)),
    Shape("pp2", "tp2", (32, 32), chunk=100),
    Shape("dp2", "dp2", (32, 64)),
    Shape("tp2", "tp1", (32, 64), chunk=48, model="mqa"),
    Shape("tp1", "tp2", (64, 32), model="mqa"),
    Shape("tp2", "tp1", (64, 128), chunk=100, model="kv4"),
    Shape("tp1", "tp2", (32, 32), chunk=48, model="kv4"),
    Shape("tp2", "pp2", (32, 64), model="mha"),
    Shape("tp1", "tp1", (32, 32), packing="native"),
    Shape("tp2", "tp1", (64, 64), packing="native"),
    Shape("tp1", "tp1", (64, 32), p_caches=False),
    Shape("tp2", "tp1", (32, 64), dispatch="overlapped"),
    Shape("pp2", "tp1", (64, 32), chunk=48, dispatch="overlapped"),
]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], Path]:
    """``model_of(kind)``: a random model of that kind."""
    root = tmp_path_factory.mktemp("models")
    return lambda kind: tiny_model if kind == "gqa" else build_tiny_llama(root / kind, seed=3, **MODELS[kind])


def check(shape: Shape, lengths: list[int], start_stack: StartStack, right: RightAnswers, model: Path) -> RunningStack:
    """Start a stack of this shape and ask it much; returns it, idle."""
    series = Series(model.name, lengths, "topology")
    theirs = right(model, series.questions)
    stack = start_stack(
        "--prefill", "1", "--decode", "1", *shape.flags, model=model, options=f'packing = "{shape.packing}"\n'
    )
    told = series.check(stack, theirs, block_tokens=max(shape.blocks), what=shape)
    if shape.prefill == shape.decode == "dp2":
        assert_both_replicas_took_part(stack, told)
    if shape.dispatch == "overlapped":
        assert_asked_early(stack, told)
    return stack


def assert_asked_early(stack: RunningStack, told: Sequence[dict[str, Any]]) -> None:
    """D was asked before P was done, for prompts of which P computes several steps."""
    long = [one["handover"] for one in told if one["prompt_tokens"] > 2 * STEP]
    records = [httpx.get(f"{stack.base_url}/kvrelay/handovers/{name}", timeout=30).json() for name in long]
    stamps = [record["timestamps"] for record in records]
    early = [at["prefill_end"] is None or at["migration_begin"] < at["prefill_end"] for at in stamps]
    assert early, "no prompt is long enough"
    assert all(early), stamps


def test_a_prefill_engine_of_two_ranks_serves_a_decode_engine_of_one_until_a_rank_is_killed(
    start_stack: StartStack, right_answers: RightAnswers, tiny_model: Path
) -> None:
    """1. Blocks and chunks differ too; all is handed over. 2. P saves a prompt, and its second rank is killed.

    3. D computes what is missing. 4. P has ended as a whole; nothing of it is left in the pool.
    """
    stack = check(ALWAYS, SOME_LENGTHS, start_stack, right_answers, tiny_model)
    ranks = re.findall(r"\(Worker_TP1 pid=(\d+)\)", stack.log("P0"))
    question, answer = ask_and_kill(stack, "P0", unsealed, "rank", length=1900, pid=int(ranks[-1]))
    (expected,) = right_answers(tiny_model, [question])
    assert_same(answer, expected, "after a rank's death")
    assert not stack.is_running("P0")
    assert_nothing_held(stack)
    assert ask(stack, completion(tiny_model.name, tokens(200, "topology", "alone"))).status == 200


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", MATRIX, ids=str)
def test_engines_of_any_shape_give_the_tokens_of_one_plain_engine(
    start_stack: StartStack, right_answers: RightAnswers, model_of: Callable[[str], Path], shape: Shape
) -> None:
    check(shape, LENGTHS, start_stack, right_answers, model_of(shape.model))
