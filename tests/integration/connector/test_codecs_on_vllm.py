"""Codecs against vLLM's own cache-write kernel, and the connector's classes against vLLM's."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's dependencies
]

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_tokens", [32, 64, 128])
@pytest.mark.parametrize(
    ("isa", "head_size"), [("vec", 32), ("vec", 64), ("vec", 128), ("vec16", 80), ("amx", 64), ("amx", 128)]
)
def test_a_codec_is_what_the_kernel_writes(isa: str, head_size: int, block_tokens: int, dtype: str) -> None:
    from kvrelay.connector.codec import find_codec
    from kvrelay.connector.compat import Types, cpu_write_kernel
    from kvrelay.connector.layout import prove

    item_bytes = DTYPES[dtype]
    codec = find_codec("CPU_ATTN", isa, block_tokens=block_tokens, head_size=head_size, item_bytes=item_bytes)
    prove(
        codec,
        cpu_write_kernel(isa, Types(dtype, dtype), block_tokens),
        heads=3,
        block_tokens=block_tokens,
        head_size=head_size,
        dtype=np.dtype(f"u{item_bytes}"),
    )


@pytest.mark.parametrize("model_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("block_tokens", [32, 128])
@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_fp8_lies_as_its_codec_says(isa: str, block_tokens: int, kind: str, model_dtype: str) -> None:
    """The kernel quantises what is exact in 8 bits already, at scale 1, and so leaves it as it is."""
    import torch

    from kvrelay.connector.codec import FP8, find_codec
    from kvrelay.connector.compat import Types, cpu_write_kernel
    from kvrelay.connector.layout import prove

    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM stores no fp8 on this processor")
    size = {"block_tokens": block_tokens, "head_size": 64}
    codec = find_codec("CPU_ATTN", isa, item_bytes=1, quantisation=FP8, **size)
    kernel = cpu_write_kernel(isa, Types(model_dtype, kind), block_tokens)
    for native in (False, True):
        prove(codec, kernel, heads=2, dtype=np.dtype("u1"), native=native, **size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_tokens", [32, 128])
@pytest.mark.parametrize("head_size", [64, 80])
def test_whatever_this_machine_chooses_has_a_codec(head_size: int, block_tokens: int, dtype: str) -> None:
    from kvrelay.connector.codec import find_codec
    from kvrelay.connector.compat import Types, cpu_isa

    isa = cpu_isa(Types(dtype, dtype), block_tokens, head_size)
    find_codec("CPU_ATTN", isa, block_tokens=block_tokens, head_size=head_size, item_bytes=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("native", [False, True])
def test_the_latents_codec_is_what_the_mla_backend_writes(dtype: str, native: bool) -> None:
    from kvrelay.connector.codec import find_codec
    from kvrelay.connector.compat import Types, write_kernel
    from kvrelay.connector.layout import prove

    sizes: dict[str, Any] = {"block_tokens": 16, "head_size": 576}
    codec = find_codec("CPU_MLA", "", item_bytes=DTYPES[dtype], **sizes)
    kernel = write_kernel("CPU_MLA", "", Types(dtype, dtype), 16)
    prove(codec, kernel, heads=1, dtype=np.dtype(f"u{DTYPES[dtype]}"), native=native, **sizes)


def test_vllms_rotary_kernel_takes_the_heads_of_mla_for_tokens() -> None:
    """Why engines with MLA are refused with it. When vLLM has mended it, the refusal can go."""
    import torch
    from vllm import _custom_ops as ops

    tokens, heads, dims = 5, 4, 64
    positions = torch.arange(tokens)
    turns = torch.randn(8, dims, generator=torch.Generator().manual_seed(1))
    flat = torch.randn(tokens, heads * dims, generator=torch.Generator().manual_seed(2))
    by_head, key = flat.clone().view(tokens, heads, dims), torch.zeros(tokens, 1, dims)
    ops.rotary_embedding(positions, flat, key.view(tokens, dims), dims, turns, False)
    ops.rotary_embedding(positions, by_head, key, dims, turns, False)
    assert not torch.allclose(by_head.view(tokens, -1), flat)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engines_kv_tensor_is_read_in_place(dtype: str) -> None:
    import torch

    from kvrelay.connector.compat import check_kv, kv_pages
    from kvrelay.errors import ConfigError

    tensor = torch.zeros(5, 32, 3, 128, dtype=getattr(torch, dtype)).transpose(1, 2)
    pages = kv_pages(tensor)
    assert pages.shape == (5, 3, 32, 128)
    pages[2, 1, 7, 3] = 1
    assert tensor.count_nonzero() == 1
    with pytest.raises(ConfigError, match=r"shape \(5, 96, 128\) .* is not \(blocks, heads, tokens, content\)"):
        check_kv(tensor.flatten(1, 2), DTYPES[dtype])


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


def engine_of(**extra: object) -> tuple[Any, Any]:
    """Stand-ins for a plain engine's configuration, and its KV cache's."""
    text = SimpleNamespace(to_dict=dict)
    model = SimpleNamespace(
        use_mla=False, is_hybrid=False, is_attention_free=False, is_multimodal_model=False, runner_type="generate",
        architectures=["LlamaForCausalLM"], dtype="torch.float32", quantization=None, quantization_config=None,
        max_model_len=64, hf_text_config=text, hf_config=text, trust_remote_code=False, model_class_overrides={},
        get_total_num_hidden_layers=lambda: 1,
        get_total_num_kv_heads=lambda: 2,
    )  # fmt: skip
    parallel = SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1, world_size=1,
        pipeline_parallel_size=1, data_parallel_size=1, data_parallel_index=0, rank=0, use_ubatching=False,
    )  # fmt: skip
    transfer = SimpleNamespace(
        kv_connector_extra_config={"pool": "unix:/nowhere", **extra}, engine_id="e", kv_role="kv_both",
        kv_load_failure_policy="recompute", is_kv_producer=True, is_kv_consumer=True,
    )  # fmt: skip
    config = SimpleNamespace(
        model_config=model, parallel_config=parallel, kv_transfer_config=transfer, lora_config=None,
        speculative_config=None, device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(cache_dtype="auto"), load_config=SimpleNamespace(load_format="auto"),
    )  # fmt: skip
    spec = FullAttentionSpec(
        block_size=32, head_size=64, dtype="torch.float32", sliding_window=None, attention_chunk_size=None
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["model.layers.0.attn"])
    return config, SimpleNamespace(kv_cache_groups=[group])


def test_a_machine_without_a_codec_is_refused_before_there_are_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrelay.connector.assembly import read_engine
    from kvrelay.errors import ConfigError

    assert read_engine(*engine_of(engine="P0")).config.engine == "P0"
    monkeypatch.setattr("vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *_: "neon")
    with pytest.raises(ConfigError, match="instruction set 'neon' has no codec"):
        read_engine(*engine_of())


def test_a_machine_that_keeps_no_8_bits_is_refused_before_there_are_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrelay.connector.assembly import read_engine
    from kvrelay.errors import ConfigError

    config, cache = engine_of()
    config.cache_config.cache_dtype = "fp8"
    cache.kv_cache_groups[0].kv_cache_spec.kv_quant_mode = 1
    for supported in ("_is_avx512_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(f"torch.cpu.{supported}", lambda: False)
    with pytest.raises(ConfigError, match=r"requires x86 with AVX-512 or AMX\. Set --kv-cache-dtype auto"):
        read_engine(config, cache)


def test_the_connector_implements_what_vllm_calls() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
    from vllm.utils.func_utils import supports_kw

    from kvrelay.connector.vllm import KvRelayConnector

    assert issubclass(KvRelayConnector, KVConnectorBase_V1)
    assert issubclass(KvRelayConnector, SupportsHMA)
    assert not KvRelayConnector.__abstractmethods__
    assert supports_kw(KvRelayConnector, "kv_cache_config")
    assert KvRelayConnector.requires_piecewise_for_cudagraph({})


def test_statistics_add_up_and_reach_prometheus() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from kvrelay.connector.stats import KvRelayPromMetrics, KvRelayStats

    class Config:
        kv_transfer_config = None

    registry = CollectorRegistry()

    stats = KvRelayStats(data={"saved_tokens": 3.0}).aggregate(
        KvRelayStats(data={"saved_tokens": 4.0, "recomputed_writer_lost": 9.0, "unknown": 1.0})
    )
    assert not stats.is_empty()
    assert stats.reduce()["saved_tokens"] == 7
    metrics = KvRelayPromMetrics(
        Config(),
        {Counter: partial(Counter, registry=registry), Gauge: Gauge, Histogram: Histogram},
        ["engine"],
        {0: ["0"]},
    )
    metrics.observe(stats.data)
    labels = {"engine": "0"}
    assert registry.get_sample_value("kvrelay:saved_tokens_total", labels) == 7
    assert registry.get_sample_value("kvrelay:recomputed_total", {**labels, "reason": "writer_lost"}) == 9
    stats.reset()
    assert stats.is_empty()
