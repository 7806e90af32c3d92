"""KV of other types than float32: what is computed in 16 bits, and what is kept in 8 with a scale a layer.

The reference is one plain vLLM with the same types and steps of the same size.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from asking import Series, ask_all, assert_same, assert_same_but_for_rounding

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

    StartStacks = Callable[..., AbstractContextManager[tuple[RunningStack, RunningStack]]]

LENGTHS = [1, 2, 31, 32, 33, 64, 65, 97, 255, 256, 257, 513, 1000, 2032]
STEPS = ["--max-num-batched-tokens", "256"]
FP8 = "--engine-args=--kv-cache-dtype "


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("every", "exact"),
    [
        pytest.param(["--dtype", "bfloat16"], False, id="bfloat16"),
        pytest.param([FP8 + "fp8"], True, id="float32-e4m3"),
        pytest.param(["--dtype", "bfloat16", FP8 + "fp8_e5m2"], False, id="bfloat16-e5m2"),
    ],
)
def test_kv_of_any_type_is_handed_over_whole(
    every: list[str], exact: bool, tiny_model: Path, start_stacks: StartStacks
) -> None:
    series = Series(tiny_model.name, LENGTHS, "types")
    with start_stacks(tiny_model, every=[*STEPS, *every]) as (stack, plain):
        right = ask_all(plain, series.questions)
        same = assert_same if exact else assert_same_but_for_rounding
        series.check(stack, right, block_tokens=32, same=same)


def with_scales(source: Path, target: Path, scale: float) -> Path:
    """A copy of a Llama whose checkpoint says that KV is kept in 8 bits, with a scale other than 1 in every layer."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("kvrelay-recipe.json"))
    said = json.loads((target / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    said["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme,
        "quantization_status": "compressed", "ignore": ["lm_head"],
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(said))
    tensors = load_file(target / "model.safetensors")
    for layer in range(said["num_hidden_layers"]):
        for at, name in enumerate(("k_scale", "v_scale")):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale * (1 + layer + at))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.matrix
def test_scales_of_the_checkpoint_are_those_of_p_and_d(
    tiny_model: Path, tmp_path: Path, start_stacks: StartStacks
) -> None:
    model = with_scales(tiny_model, tmp_path / "scaled", 0.03)
    series = Series(model.name, LENGTHS, "scales")
    with start_stacks(model, every=STEPS) as (stack, plain):
        right = ask_all(plain, series.questions)
        series.check(stack, right, block_tokens=32)
