"""Models whose KV is not one dense group: sliding windows in some layers and in all, and MLA's one latent.

The tokens are those of one plain vLLM, and D computes one token of a prompt at most, however the prompt's length lies
to window, block, chunk and P's steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from asking import Series, ask_all

from kvrelay.connector.compat import WITHOUT_ROTARY_KERNEL
from kvrelay.testing.architectures import build_tiny_deepseek, build_tiny_gemma, build_tiny_mistral

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

    StartStacks = Callable[..., AbstractContextManager[tuple[RunningStack, RunningStack]]]

WINDOW, CHUNK, STEP = 96, 64, 256
BUILDERS = {"gemma": build_tiny_gemma, "mistral": build_tiny_mistral, "deepseek": build_tiny_deepseek}
FLAGS = {"deepseek": [f"--engine-args={WITHOUT_ROTARY_KERNEL}"]}
COMPILED = ["--no-prefill-enforce-eager", "--no-decode-enforce-eager"]
"""Stages of a pipeline need it on CPUs, with or without a connector."""
LENGTHS = [
    1, 2, 31, 32, 33, CHUNK, CHUNK + 1, WINDOW - 1, WINDOW, WINDOW + 1, 127, 128, 129, WINDOW + CHUNK, 191, 193,
    STEP - 1, STEP, STEP + 1, 300, 3 * CHUNK + WINDOW, 2 * STEP, 2 * STEP + 1, 700, 4 * STEP + 1, 1500, 2032,
]  # fmt: skip
"""Within the window, beyond it, and at every bound: with a window of a multiple of the block the last token's reach
begins at a block's last token or first."""


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        pytest.param("gemma", [], id="gemma"),
        pytest.param("mistral", [], id="mistral"),
        pytest.param("deepseek", ["--prefill-tensor-parallel-size", "2"], id="deepseek-tp2-tp1"),
        pytest.param("deepseek", ["--decode-tensor-parallel-size", "2"], id="deepseek-tp1-tp2"),
        pytest.param("deepseek", COMPILED, id="deepseek-compiled"),
        pytest.param("deepseek", ["--prefill-pipeline-parallel-size", "2", *COMPILED], id="deepseek-pp2-pp1"),
        pytest.param("deepseek", ["--decode-pipeline-parallel-size", "2", *COMPILED], id="deepseek-pp1-pp2"),
        pytest.param(
            "deepseek",
            ["--prefill-data-parallel-size", "2", "--decode-data-parallel-size", "2"],
            id="deepseek-dp2-dp2",
        ),
    ],
)
def test_a_prompt_of_any_length_is_handed_over_whole(
    kind: str, ours: list[str], tmp_path: Path, start_stacks: StartStacks
) -> None:
    model = BUILDERS[kind](tmp_path / kind, seed=7)
    series = Series(kind, LENGTHS, "kinds", kind)
    with start_stacks(model, every=FLAGS.get(kind, ()), ours=ours) as (stack, plain):
        right = ask_all(plain, series.questions, at_once=4)
        series.check(stack, right, block_tokens=32)
