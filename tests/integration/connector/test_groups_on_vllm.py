"""What the connector makes of the KV cache groups that vLLM itself forms, for small models of each kind."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.testing.architectures import TinyGemma, build_tiny_deepseek, build_tiny_gemma, build_tiny_mistral

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("numpy")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def groups_of(model: Path, specs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """vLLM's configuration of a model, and its groups for layers of these specs. ``options``: more of the engine's."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import KVCacheConfig

    args = EngineArgs(
        model=str(model), dtype="float32", block_size=32, max_model_len=1024, enforce_eager=True, **options
    )
    config = args.create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"  # as the engine core resolves it for CPUs
    return config, KVCacheConfig(100, [], get_kv_cache_groups(config, specs))


def layer(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def test_a_gemmas_layers_are_two_groups_however_many_tables_they_have(tmp_path: Path) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from kvrelay.connector.facts import read_model, refusals

    recipe = TinyGemma(seed=1)
    same: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    specs = {
        layer(at): FullAttentionSpec(**same)
        if kind == "full_attention"
        else SlidingWindowSpec(**same, sliding_window=recipe.window)
        for at, kind in enumerate(recipe.kinds)
    }
    config, cache = groups_of(build_tiny_gemma(tmp_path / "gemma", seed=1), specs)
    assert len(cache.kv_cache_groups) == 3
    assert refusals(config, cache) == []
    model = read_model(config, cache)
    assert model.facts["kv_groups"] == "full_attention:2,5;sliding_window(96):0-1,3-4"
    assert [table.group for table in model.groups.tables.tables] == [1, 1, 0]


def test_a_mistrals_layers_are_one_group_with_a_window(tmp_path: Path) -> None:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from kvrelay.connector.facts import read_model, refusals

    spec = SlidingWindowSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=96)
    model = build_tiny_mistral(tmp_path / "mistral", seed=1)
    config, cache = groups_of(model, {layer(at): spec for at in range(4)})
    assert refusals(config, cache) == []
    assert read_model(config, cache).facts["kv_groups"] == "sliding_window(96)"


def test_a_deepseeks_layers_are_one_latent(tmp_path: Path) -> None:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from kvrelay.connector.facts import read_model, refusals

    model = build_tiny_deepseek(tmp_path / "deepseek", seed=1)
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    config, cache = groups_of(model, {layer(at): spec for at in range(3)})
    assert config.model_config.use_mla
    assert ["rotary kernel" in line for line in refusals(config, cache)] == [True]
    without = {"custom_ops": ["-rotary_embedding"]}
    config, cache = groups_of(model, {layer(at): spec for at in range(3)}, compilation_config=without)
    assert refusals(config, cache) == []
    facts = read_model(config, cache)
    (group,) = facts.groups.geometry.groups
    assert (facts.facts["kv_groups"], group.heads, group.planes) == ("latent_attention", 1, 1)
    assert facts.groups.tables.divisible


def test_mamba_layers_are_refused_by_name(tmp_path: Path) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    from kvrelay.connector.facts import refusals

    full = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    config, _ = groups_of(build_tiny_gemma(tmp_path / "gemma", seed=1), {layer(0): full})
    state = MambaSpec(block_size=32, shapes=((2, 64),), dtypes=(torch.float32,))
    groups = [KVCacheGroupSpec([layer(0)], full), KVCacheGroupSpec([layer(1)], state)]
    (line,) = refusals(config, KVCacheConfig(100, [], groups))
    assert line.startswith("KV cache of kind mamba layers (vLLM tells no connector when")
