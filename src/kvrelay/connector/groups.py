"""What vLLM's KV cache groups are to the connector: groups of layers, block tables, and kinds that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrelay.connector import compat, speculation
from kvrelay.connector.core.geometry import KvGeometry, KvGroup, RankShare, rank_share
from kvrelay.connector.core.tables import Table, Tables
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

    Shape = tuple[str, int, int, int, int, int]
    """(kind, window, heads, planes, head size, item bytes), which layers of one group share."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, **dict.fromkeys(compat.FLOAT8, 1)}
"""Of the KV types that are supported."""
FULL, WINDOW, LATENT = "full_attention", "sliding_window", "latent_attention"
KINDS = {"FullAttentionSpec": FULL, "SlidingWindowSpec": WINDOW, "MLAAttentionSpec": LATENT}
"""Names of vLLM's specs that the connector supports."""
WHY = {
    "MambaSpec": "mamba layers (vLLM tells no connector when their state is computed)",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "SlidingWindowMLASpec": "MLA with a sliding window",
    "CrossAttentionSpec": "cross-attention",
    "EncoderOnlyAttentionSpec": "encoder attention",
    "SinkFullAttentionSpec": "attention sinks kept in blocks",
    "RSWASpec": "attention with a gap",
}
LAYER_TYPES = {"full_attention": FULL, "sliding_attention": WINDOW}
"""What models' configurations call kinds of layers."""
NULL_BLOCK = 0
"""VLLM's block that stands for none: the first of every block pool."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One of this process's attention layers."""

    name: str
    number: int
    """In the whole model, a drafter's layers being its last."""
    group: int
    """Of the geometry."""
    table: int
    """VLLM's KV cache group."""


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """The KV of one engine's model."""

    geometry: KvGeometry
    kinds: tuple[str, ...]
    """Of each group."""
    tables: Tables
    layers: tuple[LayerFacts, ...]
    """In the model's order."""
    dtype: str
    """Of KV items: see `kv_type`."""


def dtype_name(dtype: object) -> str:
    """Such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def kv_type(config: VllmConfig, spec: Any) -> str:
    """What an item of a layer's KV is: such as ``float32``, or what vLLM calls a quantisation."""
    return compat.quantised_kv(config) if getattr(spec, "kv_quant_mode", 0) else dtype_name(spec.dtype)


def layer_index(name: str) -> int:
    """The layer's number in the whole model, from a name such as ``model.layers.3.self_attn.attn``."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(f"attention layer {name!r} does not name one layer number: this model is not supported yet")
    return int(numbers[0])


def layer_numbers(config: VllmConfig, cache: KVCacheConfig) -> list[int]:
    """Of all layers: see `LayerFacts.number`."""
    return [speculation.layer_number(name, layer_index(name), config) for _, name, _ in _specs(cache)]


def _specs(cache: KVCacheConfig) -> Iterator[tuple[int, str, KVCacheSpec]]:
    """(table, layer, spec) of every layer."""
    for table, group in enumerate(cache.kv_cache_groups):
        spec = group.kv_cache_spec
        each = getattr(spec, "kv_cache_specs", None)
        for name in group.layer_names:
            yield table, name, spec if each is None else each[name]


def _table_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """What the layers under a block table are like, also where all of them are another stage's of a pipeline."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [group.kv_cache_spec] if each is None else list(each.values())


def group_refusals(config: VllmConfig, cache: KVCacheConfig) -> list[str]:
    """What the connector does not support of a model's KV, each reason once."""
    found: dict[str, None] = {}
    specs = [spec for group in cache.kv_cache_groups for spec in _table_specs(group)]
    for spec in specs:
        found.update(dict.fromkeys(_spec_refusals(config, spec)))
    if not cache.kv_cache_groups:
        found["a model without KV cache is not supported: run it without the connector"] = None
    if found:
        return list(found)
    if len({kv_type(config, spec) for spec in specs}) > 1:
        found["KV of different types in one model is not supported yet: set --kv-cache-dtype auto"] = None
    shapes = _shapes(config, cache)
    if len(shapes) > 1 and speculation.drafter(config) is not None:
        found[
            f"speculative decoding by {config.speculative_config.method} of a model with several kinds of attention is "
            "not supported yet: use a method without KV of its own, or none"
        ] = None
    if config.parallel_config.pipeline_parallel_size > 1 and not _knows_other_stages(config, shapes):
        found[
            "pipeline parallelism of a model with several kinds of attention is not supported where its configuration "
            "does not say which layers are of which (layer_types): set --pipeline-parallel-size 1"
        ] = None
    return list(found)


def _spec_refusals(config: VllmConfig, spec: Any) -> Iterator[str]:
    name = type(spec).__name__
    if name not in KINDS:
        yield f"KV cache of kind {WHY.get(name, name)} is not supported yet: use full, sliding-window or MLA attention"
        return
    if KINDS[name] == LATENT and compat.rotates_latents_wrongly(config):
        yield (
            "vLLM's rotary kernel for CPUs is wrong for MLA attention: answers would depend on which requests share a "
            f"step; start with {compat.WITHOUT_ROTARY_KERNEL}"
        )
    if getattr(spec, "attention_chunk_size", None) is not None:
        yield "chunked attention is not supported yet: use full, sliding-window or MLA attention"
    if (items := kv_type(config, spec)) not in ITEM_BYTES:
        yield (
            f"KV cache dtype {items} is not supported: set --kv-cache-dtype auto, float16, bfloat16, fp8 or fp8_e5m2"
        )
    if getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "model_version", None) is not None:
        yield "compressed MLA is not supported yet: use a model of DeepSeek's V2 or V3 architecture"
    if getattr(spec, "extra_retained_tokens", 0):
        yield (
            "speculative decoding that keeps tokens beyond the window is not supported yet: use a method without KV of "
            "its own"
        )
    wanted = 0 if KINDS[name] == LATENT else spec.head_size
    if getattr(spec, "head_size_v", wanted) != wanted:
        yield "K and V of different head sizes are not supported"
    total = config.model_config.get_total_num_kv_heads()
    expected = 1 if KINDS[name] == LATENT else max(1, total // config.parallel_config.tensor_parallel_size)
    if getattr(spec, "num_kv_heads", expected) != expected:
        yield f"layers of {spec.num_kv_heads} KV heads in a model of {total} are not supported yet"


def _shape(config: VllmConfig, spec: Any) -> Shape:
    kind = KINDS[type(spec).__name__]
    latent = kind == LATENT
    heads = 1 if latent else config.model_config.get_total_num_kv_heads()
    window = spec.sliding_window if kind == WINDOW else 0  # a full spec may name one: vLLM keeps all tokens then
    return kind, window, heads, 1 if latent else 2, spec.head_size, ITEM_BYTES[kv_type(config, spec)]


def _shapes(config: VllmConfig, cache: KVCacheConfig) -> list[Shape]:
    """Of the whole model's layers, in an order that all engines agree on: every stage is told of all block tables."""
    found = {_shape(config, spec) for group in cache.kv_cache_groups for spec in _table_specs(group)}
    return sorted(found, key=lambda shape: (shape[1] > 0, shape))


def _layer_types(config: VllmConfig) -> list[str]:
    """The kind of every layer of the whole model, as its configuration tells; empty if it does not."""
    told = getattr(config.model_config.hf_text_config, "layer_types", None) or ()
    named = [LAYER_TYPES.get(name, "") for name in told[: config.model_config.get_total_num_hidden_layers()]]
    return named if len(named) == config.model_config.get_total_num_hidden_layers() and all(named) else []


def _knows_other_stages(config: VllmConfig, shapes: Sequence[Shape]) -> bool:
    """Whether a pipeline's stage, which sees its own layers, can tell what those of the others are like."""
    return len(shapes) == 1 or sorted(kind for kind, *_ in shapes) == sorted(set(_layer_types(config)))


def _whole_model(config: VllmConfig, own: dict[int, Shape], shapes: Sequence[Shape]) -> dict[int, Shape]:
    """The shape of every layer of the whole model; ``own``: those of this process. Raises `ConfigError` in doubt."""
    if len(shapes) == 1:
        return dict.fromkeys(range(_total_layers(config, own)), shapes[0])
    if config.parallel_config.pipeline_parallel_size == 1:
        return own
    of = {shape[0]: shape for shape in shapes}
    whole = {number: of[kind] for number, kind in enumerate(_layer_types(config))}
    if wrong := [number for number, shape in own.items() if whole.get(number) != shape]:
        raise ConfigError(
            f"attention layers {wrong} are of another kind than the model's layer_types say: "
            "set --pipeline-parallel-size 1"
        )
    return whole


def read_groups(config: VllmConfig, cache: KVCacheConfig) -> ModelGroups:
    """Read the KV of a model of which `group_refusals` found none; raises `ConfigError` for layers it cannot tell."""
    specs = [
        (number, name, table, spec)
        for number, (table, name, spec) in zip(layer_numbers(config, cache), _specs(cache), strict=True)
    ]
    specs.sort(key=lambda layer: layer[0])
    numbers = [number for number, *_ in specs]
    if len(set(numbers)) < len(numbers):
        raise ConfigError("layers with several KV caches each (such as an indexer's) are not supported yet")
    shapes = _shapes(config, cache)
    shape_of = {number: _shape(config, spec) for number, _, _, spec in specs}
    whole = _whole_model(config, shape_of, shapes)
    groups = tuple(
        KvGroup(
            layers=tuple(number for number in sorted(whole) if whole[number] == shape),
            heads=heads,
            head_size=head_size,
            item_bytes=item_bytes,
            planes=planes,
            window=window,
            tag=b"%d" % at if len(shapes) > 1 else b"",
        )
        for at, shape in enumerate(shapes)
        for _, window, heads, planes, head_size, item_bytes in (shape,)
    )
    layers = tuple(LayerFacts(name, number, shapes.index(shape_of[number]), table) for number, name, table, _ in specs)
    tables = []
    for group in cache.kv_cache_groups:
        of = {_shape(config, spec) for spec in _table_specs(group)}
        if len(of) != 1:
            raise ConfigError("layers of different shapes under one block table are not supported yet")
        tables.append(Table(group.kv_cache_spec.block_size, shapes.index(of.pop())))
    return ModelGroups(
        geometry=KvGeometry(groups),
        kinds=tuple(kind for kind, *_ in shapes),
        tables=Tables(tuple(tables), tuple(group.window for group in groups), NULL_BLOCK),
        layers=layers,
        dtype=kv_type(config, specs[0][3]),
    )


def _total_layers(config: VllmConfig, numbers: Collection[int]) -> int:
    """How many the whole model has, with a drafter's. ``numbers``: of the layers that this process knows."""
    model = int(config.model_config.get_total_num_hidden_layers())
    if speculation.drafter(config) is None:
        return model
    return model + sum(number >= model for number in numbers)


def describe(groups: ModelGroups) -> str:
    """The groups as a fact of the namespace: kinds and windows, and whose layers if there are several."""
    told = []
    for kind, group in zip(groups.kinds, groups.geometry.groups, strict=True):
        window = f"({group.window})" if group.window else ""
        layers = f":{_ranges(group.layers)}" if len(groups.kinds) > 1 else ""
        told.append(f"{kind}{window}{layers}")
    return ";".join(told)


def _ranges(numbers: Sequence[int]) -> str:
    """Such as ``0-4,6,8-9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def read_shares(config: VllmConfig, groups: ModelGroups) -> tuple[RankShare, ...]:
    """What this worker holds of each group; raises `ConfigError` when that is no plain range of its layers."""
    parallel = config.parallel_config
    own = [layer.number for layer in groups.layers]
    total = _total_layers(config, own)
    if own != list(range(own[0], own[0] + len(own))) or own[-1] >= total:
        raise ConfigError(f"attention layers {own} are not one range of {total} layers: not supported yet")
    first, end = config.model_config.get_layers_start_end_indices(parallel)
    end += total - config.model_config.get_total_num_hidden_layers()  # a drafter's, of a model without stages
    if own != list(range(first, end)):
        raise ConfigError(
            f"{len(own)} of {end - first} layers keep KV of their own: cross-layer KV sharing, as in Gemma 3n, and "
            "layers without attention are not supported yet"
        )
    shares = []
    for group in groups.geometry.groups:
        held = [at for at, number in enumerate(group.layers) if number in own]
        shares.append(
            rank_share(
                group,
                tp_rank=parallel.rank % parallel.tensor_parallel_size,
                tp_size=parallel.tensor_parallel_size,
                first_layer=held[0] if held else 0,
                layers=len(held),
            )
        )
    return tuple(shares)
