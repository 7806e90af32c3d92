"""Which engines share KV, by the options vLLM is started with: through vLLM's own configuration."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.testing.architectures import build_tiny_gemma, build_tiny_mistral
from kvrelay.testing.models import build_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("numpy")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "llama", seed=1)


def facts_of(model: Path, *, kept: str | None = None, **options: Any) -> dict[str, str]:
    """The namespace's facts, but for the weights, of an engine with these options.

    ``kept``: how layers keep their KV, if it is not the engine's configuration that says so.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
        get_kv_quant_mode,
    )  # fmt: skip

    from kvrelay.connector.facts import read_model, refusals

    args = {"dtype": "float32", "block_size": 32, "max_model_len": 1024, "enforce_eager": True, **options}
    config = EngineArgs(model=str(model), **args).create_engine_config()
    wanted, text = kept or config.cache_config.cache_dtype, config.model_config.hf_text_config
    same: dict[str, Any] = {
        "block_size": 32, "num_kv_heads": text.num_key_value_heads, "head_size": text.head_dim,
        "dtype": kv_cache_dtype_str_to_dtype(wanted, config.model_config), "kv_quant_mode": get_kv_quant_mode(wanted),
    }  # fmt: skip
    window = config.model_config.get_sliding_window()
    spec = SlidingWindowSpec(**same, sliding_window=window) if window else FullAttentionSpec(**same)
    names = [f"model.layers.{at}.self_attn.attn" for at in range(text.num_hidden_layers)]
    cache = KVCacheConfig(100, [], [KVCacheGroupSpec(names, spec)])
    assert refusals(config, cache) == []
    return read_model(config, cache).facts


@pytest.mark.parametrize(
    ("options", "differing"),
    [
        ({"dtype": "bfloat16"}, {"model_dtype", "kv_dtype"}),
        ({"kv_cache_dtype": "fp8"}, {"kv_dtype"}),
        ({"kv_cache_dtype": "fp8_e5m2"}, {"kv_dtype"}),
        ({"hf_overrides": {"rope_parameters": {**ROPE, "rope_theta": 500000.0}}}, {"rope", "model_config"}),
        ({"hf_overrides": {"rope_parameters": YARN}}, {"rope", "model_config"}),
        ({"hf_overrides": {"rms_norm_eps": 1e-3}}, {"model_config"}),
        ({"hf_overrides": {"num_hidden_layers": 2}}, {"layers", "model_config"}),
        ({"hf_overrides": {"architectures": ["MistralForCausalLM"]}}, {"architecture"}),
        ({"load_format": "mistral", "config_format": "hf"}, {"load_format"}),
        ({"model_class_overrides": {"LlamaForCausalLM": "vllm.model_executor.models.llama:LlamaForCausalLM"}},
         {"model_class"}),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_change_kv_part_engines_and_say_by_what(
    llama: Path, options: dict[str, Any], differing: set[str]
) -> None:
    plain, other = facts_of(llama), facts_of(llama, **options)
    assert {name for name in plain.keys() | other.keys() if plain.get(name) != other.get(name)} == differing


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 64},
        {"max_model_len": 512},
        {"max_num_batched_tokens": 128},
        {"kv_cache_dtype": "auto"},
        {"load_format": "safetensors"},
        {"trust_remote_code": True},
        {"enable_prefix_caching": False},
        {"seed": 7},
        {"served_model_name": "other"},
    ],
    ids=str,
)
def test_options_that_do_not_change_kv_leave_engines_together(llama: Path, options: dict[str, Any]) -> None:
    assert facts_of(llama, **options) == facts_of(llama)


def test_the_two_kinds_of_8_bits_never_meet_and_one_kind_has_one_name(llama: Path) -> None:
    told = [facts_of(llama, kv_cache_dtype=kind) for kind in ("fp8", "fp8_e4m3", "fp8_e5m2")]
    assert told[0] == told[1] != told[2]


def test_a_window_that_is_another_or_is_left_out_parts_engines(tmp_path: Path) -> None:
    model = build_tiny_mistral(tmp_path / "mistral", seed=1)
    plain = facts_of(model)
    other = facts_of(model, hf_overrides={"sliding_window": 64})
    none = facts_of(model, hf_overrides={"sliding_window": None})
    assert len({told["kv_groups"] for told in (plain, other, none)}) == 3


def test_a_checkpoint_that_says_how_kv_is_quantised_is_another(llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "quantised"
    shutil.copytree(llama, model)
    said = json.loads((model / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    said["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme,
        "quantization_status": "compressed", "ignore": ["lm_head"],
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(said))
    by_file, by_option = facts_of(model, kept="fp8"), facts_of(llama, kv_cache_dtype="fp8")
    assert by_file["kv_dtype"] == by_option["kv_dtype"] == "fp8_e4m3"
    assert by_file["quantization"] == "compressed-tensors"
    assert by_file != by_option


def test_layers_of_other_kinds_part_models(tmp_path: Path) -> None:
    gemma = build_tiny_gemma(tmp_path / "gemma", seed=1)
    assert facts_of(gemma) != facts_of(gemma, hf_overrides={"final_logit_softcapping": 30.0})
