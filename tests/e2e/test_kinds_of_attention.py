"""Models whose KV is not one dense group: sliding windows in some layers and in all, and MLA's one latent.

The tokens are those of one plain vLLM, and D computes one token of a prompt at most, however the prompt's length lies
to window, block, chunk and P's steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from asking import Series, ask_all, assert_both_replicas_took_part

from kvrelay.client.blocking import PoolClient
from kvrelay.connector.compat import WITHOUT_ROTARY_KERNEL
from kvrelay.testing.architectures import build_tiny_deepseek, build_tiny_gemma, build_tiny_mistral

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

    StartStacks = Callable[..., AbstractContextManager[tuple[RunningStack, RunningStack]]]

WINDOW, CHUNK, STEP = 96, 64, 256
GROUPS = {
    "gemma": f"full_attention:2,5;sliding_window({WINDOW}):0-1,3-4",
    "mistral": f"sliding_window({WINDOW})",
    "deepseek": "latent_attention",
}
"""What engines register of their KV. vLLM may keep all tokens of windows too, and says so in a warning only."""
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


def cell(kind: str, shape: str, *ours: str, blocks: tuple[int, int] = (32, 32)) -> Any:
    """A model and what P and D are like; ``blocks``: tokens in theirs."""
    sizes = [f"--prefill-block-size={blocks[0]}", f"--decode-block-size={blocks[1]}"] if blocks != (32, 32) else []
    return pytest.param(kind, [*ours, *sizes], blocks[1], id="-".join(filter(None, (kind, shape))))


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "ours", "block"),
    [
        cell("gemma", ""),
        cell("gemma", "tp2-tp1-64to32", "--prefill-tensor-parallel-size=2", blocks=(64, 32)),
        cell("gemma", "tp1-tp2-32to64", "--decode-tensor-parallel-size=2", blocks=(32, 64)),
        cell("gemma", "pp2-tp1", "--prefill-pipeline-parallel-size=2", "--no-prefill-enforce-eager"),
        cell("gemma", "tp1-pp2", "--decode-pipeline-parallel-size=2", "--no-decode-enforce-eager"),
        cell("gemma", "overlapped", "--dispatch=overlapped"),
        cell("mistral", ""),
        cell("mistral", "tp2-tp1-64to32", "--prefill-tensor-parallel-size=2", blocks=(64, 32)),
        cell("deepseek", "tp2-tp1", "--prefill-tensor-parallel-size=2"),
        cell("deepseek", "tp1-tp2", "--decode-tensor-parallel-size=2"),
        cell("deepseek", "compiled", *COMPILED),
        cell("deepseek", "pp2-pp1", "--prefill-pipeline-parallel-size=2", *COMPILED),
        cell("deepseek", "pp1-pp2", "--decode-pipeline-parallel-size=2", *COMPILED),
        cell("deepseek", "dp2-dp2", "--prefill-data-parallel-size=2", "--decode-data-parallel-size=2"),
    ],
)
def test_a_prompt_of_any_length_is_handed_over_whole(
    kind: str, ours: list[str], block: int, tmp_path: Path, start_stacks: StartStacks
) -> None:
    model = BUILDERS[kind](tmp_path / kind, seed=7)
    series = Series(kind, LENGTHS, "kinds", kind)
    with start_stacks(model, every=FLAGS.get(kind, ()), ours=ours) as (stack, plain):
        with PoolClient.connect(stack.pool_address, name="test", map_arena=False) as pool:
            assert {engine.facts["kv_groups"] for engine in pool.engines()} == {GROUPS[kind]}
        right = ask_all(plain, series.questions, at_once=4)
        told = series.check(stack, right, block_tokens=block)
        if any(flag.startswith("--decode-data-parallel-size") for flag in ours):
            assert_both_replicas_took_part(stack, told)
