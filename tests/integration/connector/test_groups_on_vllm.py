"""What the connector makes of the KV cache groups that vLLM itself forms, for small models of each kind."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import ConfigError
from kvrelay.testing.architectures import TinyGemma, build_tiny_deepseek, build_tiny_gemma, build_tiny_mistral

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("numpy")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]

GEMMA = TinyGemma(seed=1)


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


def gemma_specs(kinds: list[str]) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    same: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    return {
        layer(at): FullAttentionSpec(**same)
        if kind == "full_attention"
        else SlidingWindowSpec(**same, sliding_window=GEMMA.window)
        for at, kind in enumerate(kinds)
    }


def stages_of(cache: Any, specs: dict[str, Any], counts: list[int]) -> list[Any]:
    """What vLLM tells stages of a pipeline that have so many layers each."""
    from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker
    from vllm.v1.kv_cache_interface import KVCacheConfig

    names = iter(specs)
    told = []
    for count in counts:
        own = {name: specs[name] for name in itertools.islice(names, count)}
        told.append(KVCacheConfig(100, [], _project_kv_cache_groups_to_worker(cache.kv_cache_groups, own)))
    return told


def test_a_gemmas_layers_are_two_groups_however_many_tables_they_have(tmp_path: Path) -> None:
    from kvrelay.connector.facts import read_model, refusals

    config, cache = groups_of(build_tiny_gemma(tmp_path / "gemma", seed=1), gemma_specs(GEMMA.kinds))
    assert len(cache.kv_cache_groups) == 3
    assert refusals(config, cache) == []
    model = read_model(config, cache)
    assert model.facts["kv_groups"] == "full_attention:2,5;sliding_window(96):0-1,3-4"
    assert [table.group for table in model.groups.tables.tables] == [1, 1, 0]


@pytest.mark.parametrize("counts", [[3, 3], [4, 2], [2, 4], [1, 1, 1, 1, 1, 1]], ids=str)
def test_every_stage_of_a_pipeline_knows_the_groups_of_the_whole_gemma(
    tmp_path: Path, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has layers of one kind only: it is told of all block tables, and of the others' layers of none."""
    from kvrelay.connector.facts import read_model, refusals
    from kvrelay.connector.groups import read_shares

    specs = gemma_specs(GEMMA.kinds)
    config, cache = groups_of(build_tiny_gemma(tmp_path / "gemma", seed=1), specs)
    alone = read_model(config, cache)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", ",".join(map(str, counts)))
    config.parallel_config.pipeline_parallel_size = len(counts)
    held: list[list[int]] = [[], []]
    for number, stage in enumerate(stages_of(cache, specs, counts)):
        config.parallel_config.rank = number
        assert refusals(config, stage) == []
        model = read_model(config, stage)
        assert model.facts == alone.facts
        assert (model.groups.geometry, model.groups.tables) == (alone.groups.geometry, alone.groups.tables)
        for at, share in enumerate(read_shares(config, model.groups)):
            layers = model.groups.geometry.groups[at].layers
            held[at] += layers[share.first_layer : share.first_layer + share.layers]
    assert held == [[2, 5], [0, 1, 3, 4]], "each layer is one stage's"


@pytest.mark.parametrize(
    "told",
    [None, [], ["full_attention"] * 6, ["sliding_attention"] * 5, [*["sliding_attention"] * 5, "linear_attention"]],
    ids=str,
)
def test_a_pipeline_of_a_model_that_does_not_say_which_layers_have_windows_is_refused(
    tmp_path: Path, told: list[str] | None
) -> None:
    from kvrelay.connector.facts import refusals

    config, cache = groups_of(build_tiny_gemma(tmp_path / "gemma", seed=1), gemma_specs(GEMMA.kinds))
    config.model_config.hf_text_config.layer_types = told
    assert refusals(config, cache) == []
    config.parallel_config.pipeline_parallel_size = 2
    (line,) = refusals(config, cache)
    assert "(layer_types): set --pipeline-parallel-size 1" in line


def test_a_stage_whose_layers_are_not_what_the_model_says_is_refused(tmp_path: Path) -> None:
    from kvrelay.connector.facts import read_model, refusals

    specs = gemma_specs(GEMMA.kinds)
    config, cache = groups_of(build_tiny_gemma(tmp_path / "gemma", seed=1), specs)
    config.parallel_config.pipeline_parallel_size = 2
    config.model_config.hf_text_config.layer_types = GEMMA.kinds[::-1]
    for stage, wrong in zip(stages_of(cache, specs, [3, 3]), ([0, 2], [3, 5]), strict=True):
        assert refusals(config, stage) == []
        with pytest.raises(ConfigError, match=rf"layers \{wrong} are of another kind than the model's layer_types"):
            read_model(config, stage)


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
