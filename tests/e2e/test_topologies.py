"""Engines of different shapes hand KV over: other ranks, stages, replicas and block sizes on P than on D.

Whatever the shapes, the tokens are those of one plain vLLM, and D computes one token of the prompt at most. One shape
runs always; all of them are the matrix (``make test-matrix``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from asking import Series, ask, ask_and_kill, assert_nothing_held, assert_same, completion, tokens, unsealed

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

    def __str__(self) -> str:
        native = "-native" if self.packing == "native" else ""
        return f"{self.model}-{self.prefill}-{self.decode}-{self.blocks[0]}to{self.blocks[1]}-chunk{self.chunk}{native}"

    @property
    def flags(self) -> list[str]:
        """For `kvrelay up`."""
        flags = ["--chunk-tokens", str(self.chunk)]
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
    series.check(stack, theirs, block_tokens=max(shape.blocks), what=shape)
    return stack


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
