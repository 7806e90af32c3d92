"""Small random models of the kinds whose KV is not one dense group: sliding windows, MLA, mamba layers.

As `kvrelay.testing.models` makes its Llama: their output means nothing, but depends on every cached key and value.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvrelay.testing.models import install, write_json, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COMMON = {"dtype": "float32", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "attention_bias": False}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every recipe says."""

    seed: int
    layers: int
    heads: int = 8
    hidden: int = 256
    intermediate: int = 512
    vocabulary: int = 2048
    positions: int = 8192
    version: int = 1


@dataclass(frozen=True, kw_only=True)
class Grouped(Recipe):
    """Whose query heads share KV heads."""

    kv_heads: int = 2
    head_size: int = 32


@dataclass(frozen=True, kw_only=True)
class TinyGemma(Grouped):
    """The recipe of a random Gemma 3: every third layer attends to all tokens, the others to a window."""

    layers: int = 6
    full_every: int = 3
    window: int = 96

    @property
    def kinds(self) -> list[str]:
        """Of each layer."""
        return ["sliding_attention" if (at + 1) % self.full_every else "full_attention" for at in range(self.layers)]


@dataclass(frozen=True, kw_only=True)
class TinyMistral(Grouped):
    """The recipe of a random Mistral: every layer attends to a window."""

    layers: int = 4
    window: int = 96
    kv_heads: int = 1


@dataclass(frozen=True, kw_only=True)
class TinyDeepseek(Recipe):
    """The recipe of a random DeepSeek V2 without experts. Its latent has the size vLLM's CPU backend takes."""

    layers: int = 3
    heads: int = 4
    latent: int = 512
    rotary: int = 64
    head_size: int = 64


@dataclass(frozen=True, kw_only=True)
class TinyGranite(Grouped):
    """The recipe of a random Granite 4 without experts: mamba layers and full attention in turn."""

    layers: int = 4
    mamba_heads: int = 8
    mamba_head_size: int = 64
    state: int = 64
    convolved: int = 4

    @property
    def kinds(self) -> list[str]:
        """Of each layer."""
        return ["full_attention" if at % 2 else "linear_attention" for at in range(self.layers)]


def build_tiny_gemma(path: Path, *, seed: int, **sizes: int) -> Path:
    """Make the random Gemma 3 of ``seed`` at ``path`` and return ``path``. ``sizes`` override fields of the recipe."""
    recipe = TinyGemma(seed=seed, **sizes)
    return _build(path, "tiny-gemma", recipe, _gemma_config(recipe), lambda random: _gemma_weights(recipe, random))


def build_tiny_mistral(path: Path, *, seed: int, **sizes: int) -> Path:
    """The same for a Mistral with a window in every layer."""
    recipe = TinyMistral(seed=seed, **sizes)
    return _build(path, "tiny-mistral", recipe, _mistral_config(recipe), lambda random: _plain_weights(recipe, random))


def build_tiny_deepseek(path: Path, *, seed: int, **sizes: int) -> Path:
    """The same for a DeepSeek V2, whose KV is one latent."""
    recipe = TinyDeepseek(seed=seed, **sizes)
    config = _deepseek_config(recipe)
    return _build(path, "tiny-deepseek", recipe, config, lambda random: _deepseek_weights(recipe, random))


def build_tiny_granite(path: Path, *, seed: int, **sizes: int) -> Path:
    """The same for a Granite 4, half of whose layers keep a state instead of KV."""
    recipe = TinyGranite(seed=seed, **sizes)
    return _build(
        path, "tiny-granite", recipe, _granite_config(recipe), lambda random: _granite_weights(recipe, random)
    )


class _Random:
    """Weights from one seed."""

    def __init__(self, seed: int) -> None:
        import torch

        self._torch = torch
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Any:
        """Whose product with unit noise is noise of ``gain``."""
        return self._torch.randn(rows, columns, generator=self._generator) * (gain / math.sqrt(columns))

    def full(self, size: int, value: float) -> Any:
        """One value throughout."""
        return self._torch.full((size,), value)


def _build(
    path: Path, name: str, recipe: Recipe, config: dict[str, Any], weights: Callable[[_Random], dict[str, Any]]
) -> Path:
    def write(scratch: Path) -> None:
        from safetensors.torch import save_file

        write_tokenizer(scratch, vocabulary=recipe.vocabulary, positions=recipe.positions)
        write_json(scratch / "config.json", {**COMMON, **config})
        write_json(scratch / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
        save_file(weights(_Random(recipe.seed)), scratch / "model.safetensors", metadata={"format": "pt"})

    return install(path, {"model": name, **asdict(recipe)}, write)


def _sizes(recipe: Recipe) -> dict[str, Any]:
    return {
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "vocab_size": recipe.vocabulary,
        "max_position_embeddings": recipe.positions,
    }


def _gemma_config(recipe: TinyGemma) -> dict[str, Any]:
    rope = {"rope_type": "default"}
    return {
        **_sizes(recipe),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_size,
        "query_pre_attn_scalar": recipe.head_size,
        "sliding_window": recipe.window,
        "layer_types": recipe.kinds,
        "rope_parameters": {
            "full_attention": {**rope, "rope_theta": 1_000_000.0},
            "sliding_attention": {**rope, "rope_theta": 10_000.0},
        },
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }


def _mistral_config(recipe: TinyMistral) -> dict[str, Any]:
    return {
        **_sizes(recipe),
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_size,
        "sliding_window": recipe.window,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _deepseek_config(recipe: TinyDeepseek) -> dict[str, Any]:
    return {
        **_sizes(recipe),
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": recipe.heads,
        "q_lora_rank": None,
        "kv_lora_rank": recipe.latent,
        "qk_rope_head_dim": recipe.rotary,
        "qk_nope_head_dim": recipe.head_size,
        "v_head_dim": recipe.head_size,
        "n_routed_experts": 2,  # of no layer
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": recipe.layers,
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _granite_config(recipe: TinyGranite) -> dict[str, Any]:
    return {
        **_sizes(recipe),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_key_value_heads": recipe.kv_heads,
        "layer_types": recipe.kinds,
        "mamba_n_heads": recipe.mamba_heads,
        "mamba_d_head": recipe.mamba_head_size,
        "mamba_d_state": recipe.state,
        "mamba_d_conv": recipe.convolved,
        "mamba_n_groups": 1,
        "mamba_expand": recipe.mamba_heads * recipe.mamba_head_size // recipe.hidden,
        "mamba_chunk_size": 64,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": recipe.intermediate,
        "position_embedding_type": "rope",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attention_multiplier": recipe.head_size**-0.5,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _mlp(recipe: Recipe, random: _Random, prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}.mlp.gate_proj.weight": random.matrix(recipe.intermediate, recipe.hidden),
        f"{prefix}.mlp.up_proj.weight": random.matrix(recipe.intermediate, recipe.hidden),
        f"{prefix}.mlp.down_proj.weight": random.matrix(recipe.hidden, recipe.intermediate),
    }


def _attention(recipe: Grouped, random: _Random, prefix: str) -> dict[str, Any]:
    query, key = recipe.heads * recipe.head_size, recipe.kv_heads * recipe.head_size
    return {
        f"{prefix}.self_attn.q_proj.weight": random.matrix(query, recipe.hidden, 1.5),
        f"{prefix}.self_attn.k_proj.weight": random.matrix(key, recipe.hidden, 1.5),
        f"{prefix}.self_attn.v_proj.weight": random.matrix(key, recipe.hidden, 2.0),
        f"{prefix}.self_attn.o_proj.weight": random.matrix(recipe.hidden, query, 2.0),
    }


def _norms(recipe: Recipe, random: _Random, prefix: str, value: float, *more: str) -> dict[str, Any]:
    names = ("input_layernorm", "post_attention_layernorm", *more)
    return {f"{prefix}.{name}.weight": random.full(recipe.hidden, value) for name in names}


def _gemma_weights(recipe: TinyGemma, random: _Random) -> dict[str, Any]:
    # Gemma multiplies embeddings by the root of the hidden size, and its norms by one more than their weights.
    weights = {"model.embed_tokens.weight": random.matrix(recipe.vocabulary, recipe.hidden)}
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}"
        weights |= _attention(recipe, random, prefix) | _mlp(recipe, random, prefix)
        weights |= _norms(recipe, random, prefix, 0.0, "pre_feedforward_layernorm", "post_feedforward_layernorm")
        for name in ("q_norm", "k_norm"):
            weights[f"{prefix}.self_attn.{name}.weight"] = random.full(recipe.head_size, 0.25)
    weights["model.norm.weight"] = random.full(recipe.hidden, 3.0)
    return weights


def _plain_weights(recipe: TinyMistral, random: _Random) -> dict[str, Any]:
    weights = _ends(recipe, random)
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}"
        weights |= _attention(recipe, random, prefix) | _mlp(recipe, random, prefix)
        weights |= _norms(recipe, random, prefix, 1.0)
    return weights


def _ends(recipe: Recipe, random: _Random) -> dict[str, Any]:
    return {
        "model.embed_tokens.weight": random.matrix(recipe.vocabulary, recipe.hidden, math.sqrt(recipe.hidden)),
        "model.norm.weight": random.full(recipe.hidden, 1.0),
        "lm_head.weight": random.matrix(recipe.vocabulary, recipe.hidden, 4.0),
    }


def _deepseek_weights(recipe: TinyDeepseek, random: _Random) -> dict[str, Any]:
    weights = _ends(recipe, random)
    query, both = recipe.heads * (recipe.head_size + recipe.rotary), 2 * recipe.heads * recipe.head_size
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": random.matrix(query, recipe.hidden, 1.5),
            f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": random.matrix(
                recipe.latent + recipe.rotary, recipe.hidden, 1.5
            ),
            f"{prefix}.self_attn.kv_a_layernorm.weight": random.full(recipe.latent, 1.0),
            f"{prefix}.self_attn.kv_b_proj.weight": random.matrix(both, recipe.latent, 1.5),
            f"{prefix}.self_attn.o_proj.weight": random.matrix(recipe.hidden, recipe.heads * recipe.head_size, 2.0),
        }
        weights |= _mlp(recipe, random, prefix) | _norms(recipe, random, prefix, 1.0)
    return weights


def _granite_weights(recipe: TinyGranite, random: _Random) -> dict[str, Any]:
    weights = _ends(recipe, random)
    inner = recipe.mamba_heads * recipe.mamba_head_size
    convolved = inner + 2 * recipe.state
    for layer, kind in enumerate(recipe.kinds):
        prefix = f"model.layers.{layer}"
        weights |= _norms(recipe, random, prefix, 1.0)
        weights |= {
            f"{prefix}.shared_mlp.input_linear.weight": random.matrix(2 * recipe.intermediate, recipe.hidden),
            f"{prefix}.shared_mlp.output_linear.weight": random.matrix(recipe.hidden, recipe.intermediate),
        }
        if kind == "full_attention":
            weights |= _attention(recipe, random, prefix)
            continue
        weights |= {
            f"{prefix}.mamba.{name}": weight
            for name, weight in {
                "in_proj.weight": random.matrix(inner + convolved + recipe.mamba_heads, recipe.hidden, 1.5),
                "conv1d.weight": random.matrix(convolved, recipe.convolved).unsqueeze(1),
                "conv1d.bias": random.full(convolved, 0.0),
                "A_log": random.full(recipe.mamba_heads, 0.0),
                "D": random.full(recipe.mamba_heads, 1.0),
                "dt_bias": random.full(recipe.mamba_heads, 1.0),
                "norm.weight": random.full(inner, 1.0),
                "out_proj.weight": random.matrix(recipe.hidden, inner, 2.0),
            }.items()
        }
    return weights
