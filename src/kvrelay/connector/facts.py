"""What the connector reads from vLLM's configuration: the namespace's facts, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from kvrelay.connector import compat, speculation
from kvrelay.connector.groups import (
    ModelGroups,
    describe,
    dtype_name,
    group_refusals,
    layer_numbers,
    read_groups,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

FORMAT = "1"
PACKING = "canonical-1"
VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"})
"""Keys of a model's config that do not change its KV, or are facts of their own."""
ROPE_BY_LENGTH = ("longrope", "su", "dynamic")
"""Position encodings that depend on max_model_len."""

MEDIA_OPTIONS = (
    "mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "video_pruning_rate", "video_pruning_method",
    "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
)  # fmt: skip
"""Of vLLM's multimodal configuration: those that change what a medium becomes."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One engine's model as the connector sees it."""

    groups: ModelGroups
    facts: dict[str, str]
    """Of the namespace, weights and chunk size not included."""

    @property
    def types(self) -> compat.Types:
        """Of what is computed and of what is kept."""
        return compat.Types(self.facts["model_dtype"], self.groups.dtype)


def refusals(config: VllmConfig, cache: KVCacheConfig, *, allow_untested_device: bool = False) -> list[str]:
    """Everything in this engine's configuration the connector does not support, with what to change."""
    model, parallel = config.model_config, config.parallel_config
    found: list[str] = []

    def refuse(condition: object, what: str) -> None:
        if condition:
            found.append(what)

    device = config.device_config.device_type
    refuse(device not in ("cpu", "cuda"), f"KV cache on {device} is not supported: run this engine on a CPU or CUDA")
    refuse(
        device == "cuda" and not allow_untested_device,
        "KV cache on cuda has not been run by kvrelay's own tests, which have no such device: run tests/gpu on this "
        "machine, and then set allow_untested_device to true",
    )
    refuse(parallel.use_ubatching, "microbatches are not supported: start without --enable-dbo and --ubatch-size")
    refuse(model.runner_type != "generate", f"runner {model.runner_type!r} is not supported: use a generative model")
    refuse(
        parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "context parallelism is not supported: set decode- and prefill-context-parallel-size to 1",
    )
    refuse(
        compat.computes_kv_scales(config),
        "KV scales that the engine takes from its first prompt are known to no other: start without "
        "--calculate-kv-scales, with scales in the checkpoint or with none",
    )
    refuse(
        getattr(config, "diffusion_config", None) is not None,
        "models that write by diffusion are not supported: their KV changes after it was first computed",
    )
    found += (refused := group_refusals(config, cache))
    if not refused and config.speculative_config is not None:
        found += speculation.refusals(config, layer_numbers(config, cache))
    return found


def read_model(config: VllmConfig, cache: KVCacheConfig) -> ModelFacts:
    """Read the configuration of an engine of which `refusals` found none."""
    groups = read_groups(config, cache)
    return ModelFacts(groups=groups, facts=_facts(config, groups))


def _facts(config: VllmConfig, groups: ModelGroups) -> dict[str, str]:
    model, geometry = config.model_config, groups.geometry
    hf = {key: value for key, value in model.hf_text_config.to_dict().items() if key not in VOLATILE}
    facts = {
        "format": FORMAT,
        "packing": PACKING,
        "architecture": ",".join(model.architectures),
        "layers": str(geometry.layers),
        "kv_heads": _each(group.heads for group in geometry.groups),
        "head_size": _each(group.head_size for group in geometry.groups),
        "kv_groups": describe(groups),
        "model_dtype": dtype_name(model.dtype),
        "kv_dtype": groups.dtype,
        "quantization": str(model.quantization),
        "quantization_config": _canonical(model.quantization_config),
        "rope": _rope(hf),
        "model_config": sha256(_canonical(hf).encode()).hexdigest(),
    }
    if model.is_multimodal_model:
        facts["media"] = sha256(_canonical(_media(config)).encode()).hexdigest()
    elif model.hf_config is not model.hf_text_config:  # what is said outside the language model's part, too
        facts["whole_config"] = sha256(_canonical(_whole(config)).encode()).hexdigest()
    facts |= {name: _canonical(value) for name, value in compat.code_of(config).items() if value}
    ropes = facts["rope"]
    if (draft := speculation.drafter(config)) is not None:
        ropes += _rope(draft.hf_text_config.to_dict())
        facts["speculation"] = config.speculative_config.method
        facts["drafter"] = sha256(_canonical(speculation.identity(draft, config)).encode()).hexdigest()
    if any(kind in ropes for kind in ROPE_BY_LENGTH):
        facts["max_model_len"] = str(model.max_model_len)
    return facts


def _rope(config: dict[str, Any]) -> str:
    """What a model's configuration says of its position encoding."""
    told = {key: value for key, value in config.items() if key.startswith("rope") or key.endswith("rotary_factor")}
    return _canonical(told)


def _each(values: Iterable[int]) -> str:
    """The value of every group; once, if it is the same in all."""
    told = list(map(str, values))
    return told[0] if len(set(told)) == 1 else ",".join(told)


def _media(config: VllmConfig) -> dict[str, Any]:
    """What changes the KV of an image beside the image: the whole model's configuration, and how media are prepared."""
    media = config.model_config.multimodal_config
    return {"model": _whole(config), "prepared": {name: getattr(media, name, None) for name in MEDIA_OPTIONS}}


def _whole(config: VllmConfig) -> dict[str, Any]:
    whole = config.model_config.hf_config.to_dict()
    return {key: value for key, value in whole.items() if key not in VOLATILE}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
