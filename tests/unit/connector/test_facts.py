"""What is read from vLLM's configuration, on stand-ins for its objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.connector import compat
from kvrelay.connector.core.geometry import KvGeometry
from kvrelay.connector.core.tables import Table
from kvrelay.connector.facts import read_model, refusals
from kvrelay.connector.groups import layer_index, read_shares
from kvrelay.connector.packing import in_native_packing
from kvrelay.errors import ConfigError
from kvrelay.types import Reason


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class MLAAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """Named as vLLM's."""


class MambaSpec(SimpleNamespace):
    """Named as vLLM's."""


class UniformTypeKVCacheSpecs(SimpleNamespace):
    """Named as vLLM's."""


LAYERS = [f"model.layers.{at}.self_attn.attn" for at in range(12)]
HF = {"hidden_size": 256, "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default"}}


def spec(**changes: Any) -> FullAttentionSpec:
    fields: dict[str, Any] = {
        "block_size": 32, "head_size": 32, "dtype": "torch.float32", "sliding_window": None,
        "attention_chunk_size": None,
    }  # fmt: skip
    return FullAttentionSpec(**{**fields, **changes})


def window(size: int, **changes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**{**vars(spec(sliding_window=size)), "head_size_v": 32, "num_kv_heads": 4, **changes})


def latent(**changes: Any) -> MLAAttentionSpec:
    fields = {"head_size": 576, "head_size_v": 0, "num_kv_heads": 1, "tokens_per_state": 1, "model_version": None}
    return MLAAttentionSpec(**{**vars(spec()), **fields, "block_size": 16, **changes})


def mixed(*tables: tuple[Any, list[int]]) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=one, layer_names=[LAYERS[at] for at in of]) for one, of in tables]
    return SimpleNamespace(kv_cache_groups=groups)


def cache(*specs: Any, layers: list[str] | None = None) -> Any:
    groups = [
        SimpleNamespace(kv_cache_spec=one, layer_names=LAYERS if layers is None else layers)
        for one in specs or (spec(),)
    ]
    return SimpleNamespace(kv_cache_groups=groups)


def stage_layers(parallel: Any) -> tuple[int, int]:
    size = 12 // parallel.pipeline_parallel_size
    stage = parallel.rank // parallel.tensor_parallel_size
    return stage * size, (stage + 1) * size


def config(hf: dict[str, Any] | None = None, **changes: Any) -> Any:
    model: dict[str, Any] = {
        "use_mla": False, "is_hybrid": False, "is_attention_free": False, "is_multimodal_model": False,
        "multimodal_config": None, "model_class_overrides": {}, "trust_remote_code": False, "code_revision": None,
        "runner_type": "generate", "architectures": ["LlamaForCausalLM"], "dtype": "torch.float32",
        "quantization": None, "quantization_config": None, "max_model_len": 8192,
        "hf_text_config": SimpleNamespace(to_dict=lambda: HF if hf is None else hf), "hf_config": None,
        "get_total_num_hidden_layers": lambda: 12, "get_total_num_kv_heads": lambda: 4,
        "get_layers_start_end_indices": stage_layers,
    }  # fmt: skip
    parallel: dict[str, Any] = {
        "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "rank": 0, "use_ubatching": False,
    }  # fmt: skip
    for name, value in changes.items():
        (model if name in model else parallel)[name] = value
    model["hf_config"] = model["hf_config"] or model["hf_text_config"]
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel),
        device_config=SimpleNamespace(device_type=changes.get("device", "cpu")),
        cache_config=SimpleNamespace(
            cache_dtype=changes.get("kv_cache_dtype", "auto"),
            calculate_kv_scales=changes.get("calculate_kv_scales", False),
        ),
        compilation_config=SimpleNamespace(is_custom_op_enabled=changes.get("kernels", ()).__contains__),
        load_config=SimpleNamespace(load_format=changes.get("load_format", "auto")),
        diffusion_config=changes.get("diffusion_config"),
        lora_config=changes.get("lora_config"),
        speculative_config=changes.get("speculative_config"),
    )


def facts(*args: Any, **changes: Any) -> dict[str, str]:
    return read_model(config(*args, **changes), cache()).facts


def test_a_dense_model_is_not_refused() -> None:
    assert refusals(config(), cache()) == []
    assert refusals(config(speculative_config=SimpleNamespace(method="ngram")), cache()) == []
    assert refusals(config(device="cuda"), cache(), allow_untested_device=True) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"runner_type": "pooling"}, "runner 'pooling' is not supported"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"device": "xpu"}, "KV cache on xpu is not supported: run this engine on a CPU or CUDA"),
        ({"device": "cuda"}, "run tests/gpu on this machine, and then set allow_untested_device to true"),
        ({"use_ubatching": True}, "start without --enable-dbo"),
        ({"diffusion_config": SimpleNamespace(canvas_length=64)}, "models that write by diffusion"),
        ({"calculate_kv_scales": True}, "start without --calculate-kv-scales"),
    ],
)
def test_an_unsupported_engine_is_told_in_one_line_what_to_change(changes: dict[str, Any], told: str) -> None:
    (line,) = refusals(config(**changes), cache())
    assert told in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ((MambaSpec(),), "kind mamba layers (vLLM tells no connector when their state is computed) is not supported"),
        ((spec(), MambaSpec()), "mamba"),
        ((SimpleNamespace(),), "kind SimpleNamespace is not supported yet: use full, sliding-window or MLA attention"),
        ((spec(attention_chunk_size=8192),), "chunked attention"),
        ((latent(tokens_per_state=4),), "compressed MLA is not supported yet"),
        ((latent(model_version="deepseek_v4"),), "compressed MLA is not supported yet"),
        ((window(64, extra_retained_tokens=2),), "beyond the window"),
        ((spec(num_kv_heads=2),), "layers of 2 KV heads in a model of 4"),
        ((spec(), spec(dtype="torch.bfloat16")), "different types in one model"),
        ((spec(dtype="torch.float8_e4m3fn"),), "KV cache dtype float8_e4m3fn is not supported: set --kv-cache-dtype"),
        ((spec(head_size_v=64),), "different head sizes"),
    ],
)
def test_an_unsupported_kv_cache_is_told_in_one_line(group: tuple[Any, ...], told: str) -> None:
    (line,) = refusals(config(kv_cache_dtype="fp8"), cache(*group))
    assert told in line


FP8 = {"kv_quant_mode": 1, "dtype": "torch.uint8"}


def test_kv_of_8_bits_is_named_by_what_its_bytes_mean() -> None:
    """vLLM keeps both kinds as bytes, and calls one of them by two names."""

    def told(name: str) -> str:
        engine = config(kv_cache_dtype=name)
        assert refusals(engine, cache(spec(**FP8))) == []
        model = read_model(engine, cache(spec(**FP8)))
        assert model.groups.geometry.groups[0].item_bytes == 1
        assert model.types == compat.Types("float32", model.facts["kv_dtype"])
        return model.facts["kv_dtype"]

    assert [told(name) for name in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")] == ["fp8_e4m3"] * 3 + ["fp8_e5m2"]
    assert facts()["kv_dtype"] == "float32"


@pytest.mark.parametrize("name", ["fp8_inc", "int8_per_token_head", "nvfp4", "fp8_ds_mla"])
def test_quantisations_whose_bytes_are_not_known_are_refused_by_name(name: str) -> None:
    (line,) = refusals(config(kv_cache_dtype=name), cache(spec(**FP8)))
    assert line.startswith(f"KV cache dtype {name} is not supported")


def test_layers_left_out_of_the_quantisation_are_refused() -> None:
    (line,) = refusals(config(kv_cache_dtype="fp8"), mixed((spec(**FP8), [0, 1]), (spec(), [2])))
    assert "different types in one model" in line


def test_mla_is_refused_where_vllms_kernel_would_rotate_it_wrongly() -> None:
    (line,) = refusals(config(kernels=["rotary_embedding"]), cache(latent()))
    assert line.endswith("""start with --compilation-config '{"custom_ops": ["-rotary_embedding"]}'""")
    assert refusals(config(), cache(latent())) == []
    assert refusals(config(kernels=["rotary_embedding"]), cache()) == []


def test_all_reasons_are_told_at_once() -> None:
    assert len(refusals(config(use_ubatching=True, runner_type="pooling"), cache(MambaSpec()))) == 3


def test_the_geometry_is_the_whole_models() -> None:
    model = read_model(config(tensor_parallel_size=4, rank=3), cache()).groups
    assert model.geometry == KvGeometry.dense(layers=12, kv_heads=4, head_size=32, item_bytes=4)
    assert (model.tables.tables, model.tables.windows, model.dtype) == ((Table(32, 0),), (0,), "float32")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "torch.bfloat16"},
        {"quantization": "awq"},
        {"quantization_config": {"linear": "fp8"}},
        {"architectures": ["MistralForCausalLM"]},
        {"get_total_num_kv_heads": lambda: 2},
        {"hf": {**HF, "rope_theta": 500000.0}},
        {"hf": {**HF, "rope_parameters": {"rope_type": "yarn"}}},
        {"hf": {**HF, "rms_norm_eps": 1e-6}},
        {"hf_config": SimpleNamespace(to_dict=lambda: {"text_config": HF, "quantization_config": {"bits": 4}})},
        {"model_class_overrides": {"LlamaForCausalLM": "elsewhere:Llama"}},
        {"load_format": "mistral"},
        {"trust_remote_code": True, "hf_config": SimpleNamespace(auto_map={"AutoModel": "m.M"}, to_dict=lambda: HF)},
    ],
)
def test_what_changes_the_bytes_changes_the_facts(changes: dict[str, Any]) -> None:
    assert facts(**changes) != facts()


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel_size": 2},
        {"max_model_len": 4096},
        {"load_format": "safetensors"},
        {"trust_remote_code": True},
        {"hf": {**HF, "transformers_version": "5.0", "_name_or_path": "elsewhere", "use_cache": False}},
    ],
)
def test_what_does_not_change_the_bytes_does_not_change_the_facts(changes: dict[str, Any]) -> None:
    assert facts(**changes) == facts()


def test_what_becomes_of_an_image_is_a_fact_of_models_that_see() -> None:
    def media(patch: int, pixels: int, **more: str) -> str:
        whole = SimpleNamespace(to_dict=lambda: {"vision_config": {"patch_size": patch}})
        how = SimpleNamespace(mm_processor_kwargs={"min_pixels": pixels}, **more)
        return facts(is_multimodal_model=True, hf_config=whole, multimodal_config=how)["media"]

    assert media(14, 64) == media(14, 64)
    others = [media(16, 64), media(14, 65), media(14, 64, mm_encoder_attn_dtype="fp8")]
    assert len({media(14, 64), *others}) == 4
    assert "media" not in facts()


def test_positions_that_depend_on_the_longest_prompt_make_it_a_fact() -> None:
    longrope = {**HF, "rope_parameters": {"rope_type": "longrope"}}
    assert facts(longrope) != facts(longrope, max_model_len=4096)


def test_block_size_is_no_fact() -> None:
    assert read_model(config(), cache(spec(block_size=128))).facts == facts()


def test_layers_are_in_the_models_order_whatever_vllm_lists() -> None:
    model = read_model(config(), cache(layers=sorted(LAYERS)))
    assert [layer.name for layer in model.groups.layers] == LAYERS


def test_a_ranks_share_follows_from_its_number_and_its_layers() -> None:
    engine = config(tensor_parallel_size=2, pipeline_parallel_size=2, rank=3)
    (share,) = read_shares(engine, read_model(engine, cache(layers=LAYERS[6:])).groups)
    assert (share.first_layer, share.layers, share.first_head, share.heads) == (6, 6, 2, 2)


@pytest.mark.parametrize(
    ("layers", "named"),
    [(LAYERS[:6], "cross-layer KV sharing, as in Gemma 3n"), ([*LAYERS[:5], *LAYERS[6:]], "are not one range of")],
)
def test_layers_without_kv_of_their_own_are_refused(layers: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_shares(config(), read_model(config(), cache(layers=layers)).groups)


@pytest.mark.parametrize(("rank", "layers"), [(0, LAYERS[:5]), (1, LAYERS[6:11]), (1, LAYERS[5:11])])
def test_a_stage_of_which_a_layer_keeps_no_kv_is_refused(rank: int, layers: list[str]) -> None:
    """Nobody would write that layer's part of the objects, and readers would wait for it."""
    engine = config(pipeline_parallel_size=2, rank=rank)
    with pytest.raises(ConfigError, match="of 6 layers keep KV of their own: cross-layer KV sharing"):
        read_shares(engine, read_model(engine, cache(layers=layers)).groups)


def test_one_group_of_full_attention_is_named_as_ever() -> None:
    assert {name: facts()[name] for name in ("format", "kv_groups", "kv_heads", "head_size", "layers")} == {
        "format": "1", "kv_groups": "full_attention", "kv_heads": "4", "head_size": "32", "layers": "12",
    }  # fmt: skip
    assert read_model(config(), cache()).groups.geometry.groups[0].key(b"chunk") == b"chunk"


def test_layers_of_one_kind_are_one_group_however_many_tables_vllm_gives_them() -> None:
    engine = mixed((spec(), [5, 11]), (window(64), [0, 2, 4, 7, 9]), (window(64), [1, 3, 6, 8, 10]))
    model = read_model(config(), engine)
    full, sliding = model.groups.geometry.groups
    assert (full.layers, full.window) == ((5, 11), 0)
    assert (sliding.layers, sliding.window) == ((0, 1, 2, 3, 4, 6, 7, 8, 9, 10), 64)
    assert model.groups.tables.tables == (Table(32, 0), Table(32, 1), Table(32, 1))
    assert [layer.table for layer in model.groups.layers] == [1, 2, 1, 2, 1, 0, 2, 1, 2, 1, 2, 0]
    assert model.facts["kv_groups"] == "full_attention:5,11;sliding_window(64):0-4,6-10"
    assert len({full.key(b"chunk"), sliding.key(b"chunk"), b"chunk"}) == 3


def test_windows_and_the_layers_that_have_them_are_facts() -> None:
    told = [
        read_model(config(), engine).facts["kv_groups"]
        for engine in (
            cache(), cache(window(64)), cache(window(128)), cache(latent()),
            mixed((spec(), [11]), (window(64), [*range(11)])), mixed((spec(), [0]), (window(64), [*range(1, 12)])),
        )
    ]  # fmt: skip
    assert told[:4] == ["full_attention", "sliding_window(64)", "sliding_window(128)", "latent_attention"]
    assert len(set(told)) == 6


def test_windows_of_layers_that_keep_every_token_are_no_windows() -> None:
    model = read_model(config(), cache(spec(sliding_window=64)))
    assert model.facts == facts()
    assert model.groups.geometry == read_model(config(), cache()).groups.geometry


def test_mla_is_one_plane_of_one_head_that_one_rank_writes() -> None:
    engine = config(tensor_parallel_size=2, rank=1)
    groups = read_model(engine, cache(latent())).groups
    (group,), (share,) = groups.geometry.groups, read_shares(engine, groups)
    assert (group.heads, group.planes, group.head_size, group.segment_bytes(3)) == (1, 1, 576, 3 * 576 * 4)
    assert (share.first_head, share.heads, share.writes) == (0, 1, False)


def test_each_layer_of_a_uniform_type_has_its_own_spec() -> None:
    each = {name: window(64) for name in LAYERS}
    uniform = UniformTypeKVCacheSpecs(kv_cache_specs=each, block_size=32)
    assert read_model(config(), cache(uniform)).facts["kv_groups"] == "sliding_window(64)"


def test_several_caches_in_one_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match="several KV caches each"):
        read_model(config(), mixed((latent(), [0, 1, 1])))


def typed(*full: int) -> SimpleNamespace:
    """A model's configuration that says which layers see all tokens; the others have windows."""
    kinds = ["full_attention" if at in full else "sliding_attention" for at in range(12)]
    return SimpleNamespace(to_dict=lambda: HF, layer_types=kinds)


def test_a_stage_of_a_pipeline_knows_the_groups_of_the_whole_model() -> None:
    """It is told of all block tables, of the layers its own only: here it has none that see all tokens."""
    engine = config(pipeline_parallel_size=2, rank=1, hf_text_config=typed(0, 3))
    stage = mixed((spec(), []), (window(64), [6, 8, 10]), (window(64), [7, 9, 11]))
    assert refusals(engine, stage) == []
    groups = read_model(engine, stage).groups
    assert [group.layers for group in groups.geometry.groups] == [(0, 3), (1, 2, *range(4, 12))]
    assert groups.tables.tables == (Table(32, 0), Table(32, 1), Table(32, 1))
    full, sliding = read_shares(engine, groups)
    assert (full.layers, sliding.first_layer, sliding.layers) == (0, 4, 6)


def test_a_stage_whose_layers_are_not_what_the_model_says_is_refused() -> None:
    engine = config(pipeline_parallel_size=2, rank=1, hf_text_config=typed(0, 11))
    with pytest.raises(ConfigError, match=r"attention layers \[11\] are of another kind"):
        read_model(engine, mixed((spec(), []), (window(64), [*range(6, 12)])))


@pytest.mark.parametrize(
    "told", [None, ["full_attention"] * 12, ["sliding_attention"] * 11, ["full_attention", ""] * 6]
)
def test_a_pipeline_of_which_no_stage_knows_the_others_layers_is_refused(told: list[str] | None) -> None:
    stage = mixed((spec(), [0]), (window(64), [1, 2]))
    (line,) = refusals(
        config(pipeline_parallel_size=2, hf_text_config=SimpleNamespace(to_dict=lambda: HF, layer_types=told)), stage
    )
    assert "set --pipeline-parallel-size 1" in line


def test_a_pipeline_of_layers_with_windows_of_several_lengths_is_refused() -> None:
    stage = mixed((window(32), [0]), (window(64), [1, 2]))
    (line,) = refusals(config(pipeline_parallel_size=2, hf_text_config=typed()), stage)
    assert "set --pipeline-parallel-size 1" in line


def test_a_layer_whose_name_has_no_single_number_is_refused() -> None:
    assert layer_index("model.layers.11.self_attn.attn") == 11
    for name in ("model.attn", "model.layers.1.sub.2.attn"):
        with pytest.raises(ConfigError, match="does not name one layer number"):
            layer_index(name)


def test_an_untested_vllm_is_refused_unless_allowed(caplog: pytest.LogCaptureFixture) -> None:
    compat.check_version("0.32.0+cpu", allow_untested=False)
    compat.check_version("0.32.7", allow_untested=False)
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.2 is not the tested 0\.32\.x: install vllm==0\.32\.\*, or set"):
        compat.check_version("0.31.2", allow_untested=False)
    compat.check_version("dev", allow_untested=True)
    assert "the connector may misbehave" in caplog.text


def request(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "prompt_embeds": None, "mm_features": [], "resumable": False, "lora_request": None, "all_token_ids": [1, 2],
        "sampling_params": SimpleNamespace(prompt_logprobs=None), "skip_reading_prefix_cache": False,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def test_only_prompts_whose_every_part_can_be_named_have_keys() -> None:
    assert compat.nameable_tokens(request()) == [1, 2]
    for digest in ("0" * 64, "a1" * 64, "adapter:" + "f" * 64):
        assert compat.nameable_tokens(request(mm_features=[SimpleNamespace(identifier=digest)])) == [1, 2]
    for unhashed in ("my-logo", "req-7-image-0", "0" * 63, "G" * 64):
        assert compat.nameable_tokens(request(mm_features=[SimpleNamespace(identifier=unhashed)])) is None
    on_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    for changes in ({"prompt_embeds": on_gpu}, {"resumable": True}):
        assert compat.nameable_tokens(request(**changes)) is None


def test_requests_that_read_no_kv_say_why() -> None:
    assert compat.skip_reason(request()) is Reason.NONE
    logprobs = SimpleNamespace(prompt_logprobs=1)
    assert compat.skip_reason(request(sampling_params=logprobs)) is Reason.PROMPT_LOGPROBS
    assert compat.skip_reason(request(skip_reading_prefix_cache=True)) is Reason.MISS


@pytest.mark.parametrize(
    ("size", "rank", "index", "engine_id", "number"),
    [
        (1, 0, 0, "e", None),
        (2, 1, 1, "e_dp1", 1),
        # Of a dense model: vLLM says that each replica is alone.
        (1, 0, 0, "e_dp0", 0),
        (1, 0, 3, "e_dp3", 3),
        (1, 0, 1, "e_dp11", None),
    ],
)
def test_data_parallel_replicas_are_told_apart(
    size: int, rank: int, index: int, engine_id: str, number: int | None
) -> None:
    parallel = {"data_parallel_size": size, "data_parallel_rank": rank, "data_parallel_index": index}
    engine: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), kv_transfer_config=SimpleNamespace(engine_id=engine_id)
    )
    assert compat.replica(engine) == number


def test_a_steps_requests_are_new_and_running_ones() -> None:
    output: Any = SimpleNamespace(
        num_scheduled_tokens={"new": 7, "old": 1},
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=32)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["old"], num_computed_tokens=[99]),
        preempted_req_ids=None,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: ([4, 5],)),
    )
    assert list(compat.scheduled(output)) == [("new", 32, 7), ("old", 99, 1)]
    assert compat.block_tables(output, "new") == ([4, 5],)
    assert compat.preempted(output) == set()


def test_native_packing_is_for_equals_only() -> None:
    model = read_model(config(), cache(spec(block_size=32)))
    packed = in_native_packing(model, ["cpu-plain"], 64)
    assert packed.groups.geometry.groups[0].segment_bytes(33) == 2 * 64 * 32 * 4
    changed = {name for name, value in packed.facts.items() if model.facts.get(name) != value}
    assert changed == {"packing", "codec", "block_tokens"}
    others = [
        in_native_packing(read_model(config(), cache(spec(block_size=size))), [codec], 64)
        for size, codec in ((32, "cpu-amx"), (64, "cpu-plain"))
    ]
    assert len({str(sorted(one.facts.items())) for one in (model, packed, *others)}) == 4


@pytest.mark.parametrize(("block", "chunk", "next_up"), [(32, 48, 64), (128, 64, 128)])
def test_native_packing_needs_chunks_of_whole_blocks(block: int, chunk: int, next_up: int) -> None:
    model = read_model(config(), cache(spec(block_size=block)))
    with pytest.raises(ConfigError, match=f"{chunk} is not one of {block}; set chunk_tokens to {next_up},"):
        in_native_packing(model, ["cpu-plain"], chunk)
