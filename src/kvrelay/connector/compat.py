"""Everything the connector takes from vLLM that differs, or may come to differ, between its versions."""

from __future__ import annotations

import functools
import logging
import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvrelay.connector.adapters import Adapter
from kvrelay.errors import ConfigError
from kvrelay.identity.core.chunks import Extra
from kvrelay.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import torch
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvrelay.connector.core.geometry import KvGroup
    from kvrelay.connector.engine_calls import EngineCalls
    from kvrelay.connector.holds import Holds
    from kvrelay.connector.layout import WriteKernel

log = logging.getLogger(__name__)

TESTED = (0, 32)
"""The vLLM version (major, minor) this connector is tested with."""


def check_version(version: str, *, allow_untested: bool) -> None:
    """Raise `ConfigError` for an untested vLLM, or warn if that is allowed."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers == TESTED:
        return
    tested = ".".join(map(str, TESTED))
    text = f"vLLM {version} is not the tested {tested}.x"
    if not allow_untested:
        raise ConfigError(f"{text}: install vllm=={tested}.*, or set allow_untested_vllm to try")
    log.warning("kvrelay: %s: the connector may misbehave", text)


def version() -> str:
    """Of the vLLM that runs."""
    import vllm.version

    return str(vllm.version.__version__)


def make_known(name: str, module: str) -> None:
    """Enter a connector in vLLM's registry, where its MultiConnector looks for the statistics of its parts."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


LOADED_WHOLE = ("auto", "hf", "safetensors", "pt", "npcache", "gguf", "mistral", "bitsandbytes", "fastsafetensors")
"""Load formats that read the weight files of a folder, or one file."""


def model_folder(config: VllmConfig) -> str:
    """Folder or file the weights are read from: that of the snapshot, for a hub model.

    Raises:
        ConfigError: the weights are not read from files of this machine.
    """
    return _folder(config.model_config, config.load_config)


def drafter_folder(config: VllmConfig, draft: ModelConfig) -> str | None:
    """Where a drafter's weights are read from, as `model_folder` says it; ``None``: they are among the model's."""
    if draft.model == config.model_config.model:
        return None
    return _folder(draft, config.speculative_config.draft_load_config or config.load_config)


def _folder(model: ModelConfig, load: LoadConfig) -> str:
    mend = "set weights_id in kv_connector_extra_config to a name that changes whenever the weights do"
    if load.load_format not in LOADED_WHOLE or model.model_weights:
        raise ConfigError(f"weights of load format {load.load_format!r} cannot be identified: {mend}")
    if Path(model.model).exists():
        return str(model.model)
    from huggingface_hub import snapshot_download

    try:
        return str(
            snapshot_download(model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"the weights of {model.model!r} cannot be identified ({error}): {mend}") from error


READS_OTHER_FILES = ("pt", "npcache", "gguf", "mistral", "bitsandbytes")
"""Load formats that may read other files of a folder than the usual ones, or read them otherwise."""


def trusts_code(model: ModelConfig) -> bool:
    """Whether a model is computed by code that came with it."""
    return bool(model.trust_remote_code and getattr(model.hf_config, "auto_map", None))


def code_of(config: VllmConfig) -> dict[str, Any]:
    """What weights are read and computed with, as facts, where that is not the usual."""
    model, load_format = config.model_config, config.load_config.load_format
    return {
        "code": f"its own, revision {model.code_revision}" if trusts_code(model) else "",
        "model_class": model.model_class_overrides,
        "load_format": load_format if load_format in READS_OTHER_FILES else "",
    }


def replica(config: VllmConfig) -> int | None:
    """This engine's number among the data-parallel replicas behind one address; ``None`` where there are none.

    Replicas of a dense model are engines of their own to vLLM, which then says there is one: only the index and the
    suffix it has given the engine id still tell.
    """
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        return int(parallel.data_parallel_rank)
    index = int(parallel.data_parallel_index)
    return index if str(config.kv_transfer_config.engine_id).endswith(f"_dp{index}") else None


# --- the scheduler's objects ---


CONTENT_DIGEST = re.compile(r"([^:]*:)?([0-9a-f]{64}|[0-9a-f]{128})")
"""What vLLM calls a medium whose content it has hashed, after the name of an adapter that changes its encoding."""


def nameable_tokens(request: Request) -> Sequence[int] | None:
    """The request's token ids, which vLLM appends to; where something else is in the prompt they stand for it.

    ``None`` if that something has no name: media whose content vLLM did not hash (called by the client or by the
    request instead), embeddings on another device, a prompt that may still grow.
    """
    if request.resumable or not all(CONTENT_DIGEST.fullmatch(media.identifier) for media in request.mm_features):
        return None
    if request.prompt_embeds is not None and request.prompt_embeds.device.type != "cpu":
        return None
    return request.all_token_ids  # type: ignore[no-any-return]


def media(request: Request) -> list[Extra]:
    """Images and the like in the prompt, each by the digest of its content and the tokens that stand for it."""
    return [
        Extra(
            medium.mm_position.offset,
            medium.mm_position.offset + medium.mm_position.length,
            sha256(f"{medium.modality}:{medium.identifier}".encode()).digest(),
        )
        for medium in request.mm_features
    ]


def embeddings(request: Request) -> Callable[[int], list[Extra]] | None:
    """Makes the digests of the prompt's embeddings, for chunks of as many tokens; ``None`` if it has none."""
    tensor = request.prompt_embeds
    if tensor is None:
        return None
    is_token = request.prompt_is_token_ids

    def digests(chunk_tokens: int) -> list[Extra]:
        import torch

        found = []
        for start in range(0, len(tensor), chunk_tokens):
            part = tensor[start : start + chunk_tokens].contiguous()
            told = sha256(f"{part.dtype}:{tuple(part.shape)}:".encode())
            told.update(bytes(is_token[start : start + len(part)]) if is_token is not None else b"")
            told.update(part.view(torch.uint8).numpy().data)
            found.append(Extra(start, start + len(part), told.digest()))
        return found

    return digests


LORA_OPTIONS = ("enable_tower_connector_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras")
"""Of vLLM's LoRA configuration: those that change what an adapter's files mean."""


def adapter(asked: LoRARequest | None, config: VllmConfig) -> Adapter | None:
    """The LoRA adapter of a request, or that the engine is told to load."""
    if asked is None:
        return None
    lora = config.lora_config
    variant = "/".join(
        (
            str(lora.lora_dtype),
            *(["3d"] if asked.is_3d_lora_weight else []),
            *(name for name in LORA_OPTIONS if getattr(lora, name)),
            *([f"only {','.join(sorted(lora.target_modules))}"] if lora.target_modules else []),
        )
    )
    return Adapter(asked.lora_name, asked.lora_int_id, asked.lora_path, variant, asked.load_inplace)


def adapter_folder(path: str) -> str:
    """Where vLLM finds an adapter's files: it has fetched them already if they are a hub's."""
    if Path(path).is_absolute():
        return path
    from vllm.lora.utils import get_adapter_absolute_path

    return str(get_adapter_absolute_path(path))


LEAVES_WEIGHTS = frozenset({
    "compute_weight_checksums", "get_encoder_timing_stats", "get_model_inspection", "init_weight_transfer_engine",
    "save_tensorized_model", "shutdown_weight_transfer_engine", "update_max_model_len",
})  # fmt: skip
"""Of what vLLM itself has an engine's workers do by name: what leaves the weights as they are."""


def watch_engine(config: VllmConfig, calls: EngineCalls) -> None:
    """Have ``calls`` told what this process's engine is told to do.

    Whatever its workers are told to do by name may replace weights, be it vLLM's own way (``update_weights``,
    ``reload_weights``) or that of somebody's worker extension: all that is not known to leave them counts. Sleep of
    level 1 and pauses drop the caches and leave the weights; but into an engine that runs in its caller's process
    anybody can reach, and replace them without a call that is seen here.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    add_lora, collective_rpc, sleep = EngineCore.add_lora, EngineCore.collective_rpc, EngineCore.sleep
    reset_caches, reset_prefix_cache = getattr(EngineCore, "_reset_caches", None), EngineCore.reset_prefix_cache

    # vLLM decodes what it is called with after the annotations of the method it finds: they must stay the original's.
    @functools.wraps(add_lora)
    def adding(self: EngineCore, lora_request: LoRARequest) -> bool:
        if config.lora_config is not None and (asked := adapter(lora_request, config)) is not None:
            calls.adapter_loading(asked)
        return bool(add_lora(self, lora_request))

    @functools.wraps(collective_rpc)
    def having_done(self: EngineCore, method: Any, *args: Any, **more: Any) -> Any:
        if not isinstance(method, str) or method not in LEAVES_WEIGHTS:
            calls.weights_replaced(method if isinstance(method, str) else repr(method))
        return collective_rpc(self, method, *args, **more)

    @functools.wraps(sleep)
    def sleeping(self: EngineCore, level: int = 1, *args: Any, **more: Any) -> Any:
        if level > 1:
            calls.weights_replaced(f"sleep of level {level}")
        return sleep(self, level, *args, **more)

    @functools.wraps(reset_prefix_cache)
    def resetting(self: EngineCore, *args: Any, **more: Any) -> bool:
        done = bool(reset_prefix_cache(self, *args, **more))
        if done:
            calls.prefix_cache_dropped()
        return done

    EngineCore.add_lora, EngineCore.collective_rpc, EngineCore.sleep = adding, having_done, sleeping
    EngineCore.reset_prefix_cache = resetting
    if reset_caches is None:
        log.warning("kvrelay: this vLLM drops its caches in a way of its own: a pause or sleep ends all exchange of KV")
        return

    @functools.wraps(reset_caches)
    def dropping(self: EngineCore, *args: Any, **more: Any) -> None:
        with calls.dropping(weights_stay=isinstance(self, EngineCoreProc)):
            reset_caches(self, *args, **more)

    EngineCore._reset_caches = dropping


def skip_reason(request: Request) -> Reason:
    """Why the engine itself takes no external KV for this request."""
    sampling = request.sampling_params
    if sampling is not None and sampling.prompt_logprobs is not None:
        return Reason.PROMPT_LOGPROBS
    return Reason.MISS if request.skip_reading_prefix_cache else Reason.NONE


def scheduled(output: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """(request, tokens computed before this step, tokens computed in it), for every request of a step."""
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, counts[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed, counts[request_id]


def block_tables(output: SchedulerOutput, request_id: str) -> Sequence[Sequence[int]]:
    """The request's whole block tables, one a KV cache group."""
    return output.kv_connector_block_state.get_block_ids(request_id)  # type: ignore[no-any-return]


def bind_holds(holds: Holds, pool: BlockPool, *, share: int = 1) -> None:
    """Let blocks be held by reference in the engine's block pool, of which these holds have one ``share``th."""
    blocks = pool.blocks
    holds.bind(
        blocks=len(blocks) // share,
        touch=lambda ids: pool.touch([blocks[block] for block in ids]),
        free=lambda ids: pool.free_blocks([blocks[block] for block in ids]),
    )


def preempted(output: SchedulerOutput) -> set[str]:
    """Requests that lost their blocks in this step."""
    return output.preempted_req_ids or set()


# --- the worker's tensors ---


ROTARY_KERNEL = "rotary_embedding"
WITHOUT_ROTARY_KERNEL = f"""--compilation-config '{{"custom_ops": ["-{ROTARY_KERNEL}"]}}'"""


def rotates_latents_wrongly(config: VllmConfig) -> bool:
    """Whether an engine's MLA layers would be rotated by vLLM's kernel for CPUs.

    It takes the distance between two heads for that between two tokens: right for flat rows, wrong for the
    ``[token][head][dim]`` that MLA hands it. Some heads are rotated by other tokens' positions, the rest not at all,
    and which depends on how many tokens a step computes. vLLM's PyTorch code, used without the kernel, is right.
    """
    return bool(
        config.device_config.device_type == "cpu" and config.compilation_config.is_custom_op_enabled(ROTARY_KERNEL)
    )


def attention_kind(config: VllmConfig, layer_name: str) -> tuple[str, str]:
    """Attention backend of a layer, and the instruction set it really uses."""
    layer = config.compilation_config.static_forward_context[layer_name]
    backend = layer.get_attn_backend().get_name()
    return backend, str(getattr(layer, "isa", ""))


FLOAT8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Quantisations of KV to 8 bits with one scale a layer, and torch's names of what is stored."""


class Types(NamedTuple):
    """What an engine computes with, and what it keeps of it; names as of `kvrelay.connector.groups.kv_type`."""

    model: str
    kv: str

    @property
    def written(self) -> str:
        """As vLLM's write kernels are told it."""
        return self.kv if self.kv in FLOAT8 else "auto"

    def given(self, tokens: np.ndarray[Any, Any]) -> torch.Tensor:
        """KV items, as unsigned integers, as what the engine computed: exact, since every item is one of its own."""
        import torch

        items = torch.from_numpy(tokens).view(getattr(torch, FLOAT8.get(self.kv, self.kv)))
        return items.to(getattr(torch, self.model)) if self.kv in FLOAT8 else items

    def kept(self, pages: np.ndarray[Any, Any]) -> torch.Tensor:
        """Pages as the engine has them: items of 8 bits as bytes."""
        import torch

        return torch.from_numpy(pages).view(torch.uint8 if self.kv in FLOAT8 else getattr(torch, self.kv))


def quantised_kv(config: VllmConfig) -> str:
    """What vLLM calls the quantisation of this engine's KV, one name for each meaning of the bytes."""
    name = str(config.cache_config.cache_dtype)
    if name not in ("auto", "fp8", "fp8_e4m3"):  # "auto" where the checkpoint says so, which it does of no other
        return name
    if config.device_config.device_type == "cuda":
        from vllm.platforms import current_platform

        if current_platform.is_fp8_fnuz():
            return "fp8_e4m3fnuz"
    return "fp8_e4m3"


def computes_kv_scales(config: VllmConfig) -> bool:
    """Whether the engine takes its KV's scales from its first prompt. vLLM 0.32 cannot; others can be told to."""
    return bool(getattr(config.cache_config, "calculate_kv_scales", False))


def cpu_isa(types: Types, block_tokens: int, head_size: int) -> str:
    """The instruction set the CPU backend will choose on this machine; `ConfigError` if it has none for these types."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    try:
        return str(_get_attn_isa(getattr(torch, types.model), block_tokens, head_size, types.written))
    except NotImplementedError as error:
        raise ConfigError(f"{error} Set --kv-cache-dtype auto, or use another machine or model") from error


def expected_attention(device: str, types: Types, block_tokens: int, group: KvGroup) -> tuple[str, str]:
    """The attention backend the platform will choose for a group, or one of the same codec, and its instruction set."""
    if device == "cpu":
        return ("CPU_MLA", "") if group.planes == 1 else ("CPU_ATTN", cpu_isa(types, block_tokens, group.head_size))
    return ("FLASH_ATTN_MLA" if group.planes == 1 else "FLASH_ATTN"), ""


def check_kv(tensor: torch.Tensor, item_bytes: int) -> None:
    """Raise `ConfigError` for a layer's KV tensor that is not ``[block][head][token][content]`` of such items."""
    if tensor.element_size() != item_bytes or tensor.ndim != 4:
        raise ConfigError(
            f"KV cache of shape {tuple(tensor.shape)} with items of {tensor.element_size()} bytes is not "
            f"(blocks, heads, tokens, content) of {item_bytes}: not supported yet"
        )


def kv_pages(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A layer's KV tensor in host memory, with strides of its own, as unsigned integers in place."""
    import torch

    bits = tensor.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()])
    pages: np.ndarray[Any, Any] = bits.numpy()
    if pages.size and pages.__array_interface__["data"][0] != tensor.data_ptr():
        raise ConfigError("the KV cache cannot be mapped without a copy")
    return pages


def write_kernel(backend: str, isa: str, types: Types, block_tokens: int) -> WriteKernel:
    """VLLM's own cache-write kernel, as `kvrelay.connector.layout.prove` wants it; scales are 1."""
    if backend in ("CPU_MLA", "AMX_MLA"):
        return mla_write_kernel(types)
    if backend == "CPU_ATTN":
        return cpu_write_kernel(isa, types, block_tokens)
    return cuda_latent_write_kernel(types) if backend.endswith("MLA") else cuda_write_kernel(backend, types)


def cuda_write_kernel(backend: str, types: Types) -> WriteKernel:
    """How backends that split a token's content into K and V write their cache: on the current CUDA device."""
    import torch

    triton = backend == "TRITON_ATTN"
    if triton:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
            triton_reshape_and_cache_flash as reshape_and_cache,
        )
    else:
        from vllm._custom_ops import reshape_and_cache_flash as reshape_and_cache

    def write(pages: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any], slots: Sequence[int]) -> None:
        size = tokens.shape[-1]
        host = types.kept(pages).view(*pages.shape[:2], -1, 2 * size)
        cache = host.cuda()
        keys, values = cache.transpose(1, 2).split(size, dim=-1)
        if triton and types.kv in FLOAT8:
            keys, values = (part.view(getattr(torch, FLOAT8[types.kv])) for part in (keys, values))
        given = types.given(tokens).cuda().transpose(0, 2)  # [token][plane][head][dim]
        scale = torch.ones((), device=cache.device)
        where = torch.tensor(list(slots), dtype=torch.int64, device=cache.device)
        reshape_and_cache(
            given[:, 0].contiguous(), given[:, 1].contiguous(), keys, values, where, types.written, scale, scale
        )
        host.copy_(cache)

    return write


def cuda_latent_write_kernel(types: Types) -> WriteKernel:
    """How backends of MLA write their cache: on the current CUDA device."""
    import torch
    from vllm._custom_ops import concat_and_cache_mla

    def write(pages: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any], slots: Sequence[int]) -> None:
        given = types.given(tokens)[0, 0].cuda()
        size = given.shape[-1]
        host = types.kept(pages).view(pages.shape[0], -1, size)
        cache = host.cuda()
        latent = latent_items(size)
        where = torch.tensor(list(slots), dtype=torch.int64, device=cache.device)
        scale = torch.ones((), device=cache.device)
        concat_and_cache_mla(
            given[:, :latent].contiguous(), given[:, latent:].contiguous(), cache, where, types.written, scale
        )
        host.copy_(cache)

    return write


def latent_items(size: int) -> int:
    """Where MLA's latent ends and its rotary part begins: where they are joined changes nothing; DeepSeek's 512, 64."""
    return size * 8 // 9


def mla_write_kernel(types: Types) -> WriteKernel:
    """How the CPU's MLA backends write their cache."""
    import torch
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    def write(pages: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any], slots: Sequence[int]) -> None:
        given = types.given(tokens)[0, 0]
        size = given.shape[-1]
        cache = types.kept(pages).view(pages.shape[0], -1, size)
        latent = latent_items(size)
        CPUMLAImpl.do_kv_cache_update(
            None,
            given[:, :latent],
            given[:, None, latent:],
            cache,
            torch.tensor(list(slots), dtype=torch.int64),
            types.written,
            None,
        )

    return write


def cpu_write_kernel(isa: str, types: Types, block_tokens: int) -> WriteKernel:
    """VLLM's own cache-write kernel, as `kvrelay.connector.layout.prove` wants it."""
    import torch
    from vllm import _custom_ops as ops

    def write(pages: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any], slots: Sequence[int]) -> None:
        blocks, heads, items = pages.shape
        cache = types.kept(pages).view(blocks, heads, 2 * block_tokens, items // (2 * block_tokens))
        keys, values = cache.chunk(2, dim=2)
        given = types.given(tokens)
        ops.cpu_attn_reshape_and_cache(
            given[:, 0].transpose(0, 1).contiguous(),
            given[:, 1].transpose(0, 1).contiguous(),
            keys,
            values,
            torch.tensor(list(slots), dtype=torch.int64),
            isa,
            kv_cache_dtype=types.written,
        )

    return write
