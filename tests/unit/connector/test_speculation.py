"""What a drafter's KV is to the connector, on stand-ins for vLLM's objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.connector.core.geometry import KvGeometry
from kvrelay.connector.facts import read_model, refusals
from kvrelay.connector.groups import read_shares
from kvrelay.connector.speculation import WITHOUT_KV


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """Named as vLLM's."""


HF = {"hidden_size": 256, "id2label": {0: "LABEL_0"}}
MODEL = [f"model.layers.{at}.self_attn.attn" for at in range(4)]
AFTER = ["model.layers.4.self_attn.attn"]
DRAFT_MODEL = [f"draft_model.model.layers.{at}.self_attn.attn" for at in range(2)]


def model(layers: int, **changes: Any) -> Any:
    heads, size = changes.pop("heads", 2), changes.pop("size", 32)
    fields: dict[str, Any] = {
        "use_mla": False, "is_multimodal_model": False, "model_class_overrides": {}, "trust_remote_code": False,
        "code_revision": None, "runner_type": "generate", "architectures": ["LlamaForCausalLM"],
        "dtype": "torch.float32", "quantization": None, "quantization_config": None, "max_model_len": 2048,
        "hf_config": SimpleNamespace(to_dict=lambda: dict(HF)), "get_total_num_hidden_layers": lambda: layers,
        "get_total_num_kv_heads": lambda: heads, "get_head_size": lambda: size,
        "get_layers_start_end_indices": lambda _: (0, layers),
    }  # fmt: skip
    fields |= changes
    return SimpleNamespace(**fields, hf_text_config=fields["hf_config"])


def config(method: str | None = None, draft: Any = None, *, stages: int = 1, tp: int = 1, **changes: Any) -> Any:
    speculative = SimpleNamespace(
        **{
            "method": method,
            "draft_model_config": draft or model(1),
            "parallel_drafting": False,
            "kv_cache_dtype": None,
        }
        | changes
    )
    return SimpleNamespace(
        model_config=model(4),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=tp,
            pipeline_parallel_size=stages, rank=0, use_ubatching=False,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(is_custom_op_enabled=lambda _: False),
        load_config=SimpleNamespace(load_format="auto"),
        diffusion_config=None,
        speculative_config=speculative if method is not None else None,
    )  # fmt: skip


def cache(layers: list[str], *windowed: str) -> Any:
    full = FullAttentionSpec(
        block_size=32, head_size=32, dtype="torch.float32", sliding_window=None, attention_chunk_size=None
    )
    window = SlidingWindowSpec(**{**vars(full), "sliding_window": 96})
    groups = [SimpleNamespace(kv_cache_spec=full, layer_names=[*layers])]
    if windowed:
        groups.append(SimpleNamespace(kv_cache_spec=window, layer_names=list(windowed)))
    return SimpleNamespace(kv_cache_groups=groups)


@pytest.mark.parametrize("method", WITHOUT_KV)
def test_a_method_without_kv_changes_nothing(method: str) -> None:
    assert refusals(config(method, stages=2), cache(MODEL)) == []
    assert read_model(config(method), cache(MODEL)) == read_model(config(), cache(MODEL))


@pytest.mark.parametrize(
    ("method", "drafter", "layers"),
    [("eagle", 1, AFTER), ("eagle3", 1, AFTER), ("mtp", 1, AFTER), ("draft_model", 2, DRAFT_MODEL)],
)
def test_a_drafters_layers_are_the_models_last(method: str, drafter: int, layers: list[str]) -> None:
    engine, kv = config(method, model(drafter)), cache([*layers, *MODEL])
    assert refusals(engine, kv) == []
    read = read_model(engine, kv)
    assert read.groups.geometry == KvGeometry.dense(layers=4 + drafter, kv_heads=2, head_size=32, item_bytes=4)
    assert [layer.name for layer in read.groups.layers] == [*MODEL, *layers]
    (share,) = read_shares(engine, read.groups)
    assert (share.first_layer, share.layers) == (0, 4 + drafter)


def test_engines_exchange_kv_only_with_the_same_drafter() -> None:
    def facts(method: str, draft: Any = None, **changes: Any) -> dict[str, str]:
        return read_model(config(method, draft, **changes), cache(MODEL + AFTER)).facts

    plain, eagle = read_model(config(), cache(MODEL)).facts, facts("eagle")
    assert plain["layers"] != eagle["layers"]
    assert eagle["speculation"] == "eagle"
    assert eagle == facts("eagle", num_speculative_tokens=5)
    moved = {"max_position_embeddings": 4096, "_name_or_path": "elsewhere"}
    longer = SimpleNamespace(to_dict=lambda: {**HF, **moved, "model": moved})
    inside = SimpleNamespace(to_dict=lambda: {**HF, "model": {}})
    assert facts("eagle", model(1, hf_config=inside)) == facts("eagle", model(1, hf_config=longer))
    for other in (
        facts("eagle3"),
        facts("eagle", model(1, hf_config=SimpleNamespace(to_dict=lambda: {**HF, "hidden_size": 128}))),
        facts("eagle", model(1, architectures=["Other"])),
        facts("eagle", model(1, dtype="torch.bfloat16")),
        facts("eagle", model(1, quantization="fp8")),
        facts("eagle", kv_cache_dtype="fp8"),
    ):
        assert other != eagle


@pytest.mark.parametrize(
    ("engine", "layers", "told"),
    [
        (config("dflash"), MODEL, "by dflash is not supported: use one of ngram"),
        (config("eagle", stages=2), MODEL, "set --pipeline-parallel-size 1"),
        (config("eagle", parallel_drafting=True), MODEL + AFTER, "leave parallel_drafting"),
        (config("draft_model", use_heterogeneous_vocab=True), MODEL + AFTER, "use_heterogeneous_vocab out"),
        (config("draft_model", model(1, max_model_len=512)), MODEL + AFTER, "set --max-model-len to at most 512"),
        (
            config("draft_model", model(1, heads=1)),
            MODEL + AFTER,
            "1 KV heads of 32, in a model whose layers have 2 KV",
        ),
        (config("eagle", model(1, use_mla=True)), MODEL + AFTER, "a latent of 32, in a model whose layers have 2 KV"),
        (config("mtp", model(2)), [*MODEL, *AFTER, "model.layers.5.self_attn.attn"], "every layer of its own"),
        (config("mtp"), MODEL, "does not write KV of every layer of its own"),
    ],
)
def test_what_is_not_supported_is_told_in_one_line(engine: Any, layers: list[str], told: str) -> None:
    (line,) = refusals(engine, cache(layers))
    assert told in line
    assert "\n" not in line


def test_a_drafter_of_a_model_with_windows_is_refused() -> None:
    (line,) = refusals(config("eagle"), cache([*MODEL[:2], *AFTER], *MODEL[2:]))
    assert "of a model with several kinds of attention is not supported yet" in line
