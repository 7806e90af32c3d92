"""Models that guess for another: mostly rightly, as long as they have the KV of what came before.

What a random model says next cannot be learned, so drafts are made of the model's own weights. With a model of one
layer an EAGLE head or an MTP layer can be that layer over again: both see token ``t + 1`` at place ``t``, so their
guess is what the model will say, but for the first token, which they never see.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvrelay.errors import ConfigError
from kvrelay.testing.architectures import TinyDeepseek, build_tiny_deepseek
from kvrelay.testing.models import install, write_json

if TYPE_CHECKING:
    from pathlib import Path

NOISE_SEED = 11


def build_draft(path: Path, target: Path, *, noise: float = 0.02) -> Path:
    """Make a draft model of ``target`` at ``path``: the same with ``noise``, in parts of each matrix's deviation."""

    def write(scratch: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (scratch / name).write_bytes((target / name).read_bytes())
        random = torch.Generator().manual_seed(NOISE_SEED)
        weights = {
            name: tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=random)
            if tensor.ndim > 1
            else tensor
            for name, tensor in load_file(target / "model.safetensors").items()
        }
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})

    return install(path, {"model": "draft", "of": _recipe(target), "noise": noise, "version": 1}, write)


def build_eagle(path: Path, target: Path) -> Path:
    """Make an EAGLE head at ``path`` of a random Llama of one layer at ``target``: that layer over again."""

    def write(scratch: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        config, weights = _read(target)
        hidden = config["hidden_size"]
        layer = {name.removeprefix("model."): tensor for name, tensor in weights.items() if ".layers.0." in name}
        # What the head is given of the model's own last layer it leaves aside, and it has no norm before its layer.
        only_tokens = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
        del layer["layers.0.input_layernorm.weight"]
        write_json(scratch / "config.json", {**config, "architectures": ["LlamaForCausalLM"]})
        embeddings = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        save_file(
            {**layer, "fc.weight": only_tokens, "embed_tokens.weight": embeddings},
            scratch / "model.safetensors",
            metadata={"format": "pt"},
        )

    return install(path, {"model": "eagle", "of": _recipe(target), "version": 1}, write)


def build_tiny_mtp(path: Path, *, seed: int) -> Path:
    """Make a random DeepSeek V3 of one layer, without experts, that has that layer over again for the next token."""
    source = build_tiny_deepseek(path.with_name(f"{path.name}-without"), seed=seed, layers=1)

    def write(scratch: Path) -> None:
        import torch
        from safetensors.torch import save_file

        config, weights = _read(source)
        hidden = config["hidden_size"]
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (scratch / name).write_bytes((source / name).read_bytes())
        write_json(
            scratch / "config.json",
            {
                **config,
                "architectures": ["DeepseekV3ForCausalLM"],
                "model_type": "deepseek_v3",
                "num_nextn_predict_layers": 1,
                "first_k_dense_replace": 2,
                "n_group": 1,
                "topk_group": 1,
                "routed_scaling_factor": 1.0,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "norm_topk_prob": True,
            },
        )
        layer = {
            name.replace(".layers.0.", ".layers.1."): tensor.clone()
            for name, tensor in weights.items()
            if ".layers.0." in name
        }
        next_token = {
            "enorm.weight": torch.ones(hidden),
            "hnorm.weight": torch.ones(hidden),
            "eh_proj.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1),
            "shared_head.norm.weight": torch.ones(hidden),
            "shared_head.head.weight": weights["lm_head.weight"].clone(),
            "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        }
        added = {f"model.layers.1.{name}": tensor for name, tensor in next_token.items()}
        save_file({**weights, **layer, **added}, scratch / "model.safetensors", metadata={"format": "pt"})

    return install(
        path, {"model": "tiny-mtp", "seed": seed, "of": TinyDeepseek(seed=seed).version, "version": 1}, write
    )


def _read(model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and weights of a model of one layer."""
    from safetensors.torch import load_file

    config = json.loads((model / "config.json").read_text())
    if config["num_hidden_layers"] != 1:
        raise ConfigError(f"{model} has {config['num_hidden_layers']} layers, and this draft is made of one")
    return config, load_file(model / "model.safetensors")


def _recipe(model: Path) -> str:
    from kvrelay.testing.models import STAMP

    return (model / STAMP).read_text()
