"""Random LoRA adapters for the random Llamas of `kvrelay.testing.models`, in PEFT's format."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kvrelay.testing.models import TinyLlama, install, write_json

if TYPE_CHECKING:
    from pathlib import Path

RANK = 8


def build_tiny_lora(path: Path, *, seed: int) -> Path:
    """Make the random adapter of ``seed`` at ``path``; return ``path``.

    It changes queries, keys and values of every layer of `TinyLlama` at its default sizes, enough to change what is
    generated. Needs torch and safetensors.
    """
    recipe = {"model": "tiny-lora", "version": 1, **asdict(TinyLlama(seed=seed))}
    return install(path, recipe, lambda scratch: _write(scratch, TinyLlama(seed=seed)))


def _write(path: Path, recipe: TinyLlama) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(recipe.seed)
    outputs = {"q_proj": recipe.hidden, "k_proj": recipe.kv_heads * recipe.head_size}
    outputs["v_proj"] = outputs["k_proj"]
    tensors = {}
    for layer in range(recipe.layers):
        for module, width in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, recipe.hidden) / recipe.hidden**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, RANK) / RANK**0.5
    save_file(tensors, path / "adapter_model.safetensors")
    write_json(
        path / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(outputs),
        },
    )
