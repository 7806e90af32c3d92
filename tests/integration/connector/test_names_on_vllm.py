"""What the connector reads of vLLM's own requests: token ids that grow, media, embeddings, adapters."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's dependencies
]

TOKENS = list(range(10, 90))


def request(**more: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        "r", **{"prompt_token_ids": TOKENS, "sampling_params": SamplingParams(), "pooling_params": None, **more}
    )


def keys(asked: Any, size: int = 32) -> list[bytes]:
    """The keys the connector would make."""
    from kvrelay.connector import compat
    from kvrelay.identity.core.chunks import prompt_chunks

    tokens, digests = compat.nameable_tokens(asked), compat.embeddings(asked)
    assert tokens is not None
    extras = [*compat.media(asked), *(digests(size) if digests else ())]
    return [chunk.key for chunk in prompt_chunks(b"seed", tokens[: asked.num_prompt_tokens], size, extras)]


def same(one: list[bytes], other: list[bytes]) -> int:
    """How many chunks from the first on are the same."""
    return sum(1 for a, b in zip(one, other, strict=True) if a == b)


def test_token_ids_grow_with_what_is_generated() -> None:
    from kvrelay.connector import compat

    asked = request()
    tokens = compat.nameable_tokens(asked)
    assert tokens is not None
    asked.append_output_token_ids([1, 2])
    asked.append_output_token_ids(3)
    assert list(tokens[:85]) == [*TOKENS, 1, 2, 3]
    assert len(tokens) == 83


def image(identifier: str, offset: int = 40, length: int = 10, modality: str = "image") -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(None, modality, identifier, PlaceholderRange(offset, length), identifier)


def test_images_are_told_by_what_vllm_hashed_and_where_they_stand() -> None:
    from kvrelay.connector import compat

    cat, dog = "a" * 64, "b" * 64
    plain, one = keys(request()), keys(request(mm_features=[image(cat)]))
    assert keys(request(mm_features=[image(cat)])) == one
    assert same(plain, one) == 1, "the image lies in the second chunk"
    for other in (image(dog), image(cat, 41), image(cat, length=9), image(cat, modality="audio")):
        assert same(one, keys(request(mm_features=[other]))) == 1
    assert compat.nameable_tokens(request(mm_features=[image("a-clients-name")])) is None


def test_vllms_own_hashes_of_media_are_taken_for_what_they_are() -> None:
    from vllm.multimodal.hasher import MultiModalHasher

    from kvrelay.connector import compat

    for algorithm in ("blake3", "sha256", "sha512"):
        digest = MultiModalHasher.hash_kwargs(algorithm, model_id="m", image=b"pixels")
        assert compat.nameable_tokens(request(mm_features=[image(digest)])) is not None


def test_embeddings_are_told_by_their_content() -> None:
    import torch

    torch.manual_seed(1)
    embeds = torch.randn(80, 8, dtype=torch.bfloat16)
    other = embeds.clone()
    other[70, 3] += 1
    only = keys(request(prompt_token_ids=None, prompt_embeds=embeds))
    assert keys(request(prompt_token_ids=None, prompt_embeds=embeds.clone())) == only
    assert same(only, keys(request(prompt_token_ids=None, prompt_embeds=other))) == 2
    assert same(only, keys(request(prompt_token_ids=[0] * 80))) == 0
    mixed = [True] * 30 + [False] * 50
    some = keys(request(prompt_embeds=embeds, prompt_is_token_ids=mixed))
    assert same(some, keys(request(prompt_embeds=embeds, prompt_is_token_ids=[True] * 31 + [False] * 49))) == 0
    assert same(some, keys(request(prompt_embeds=other, prompt_is_token_ids=mixed))) == 2


def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is watched of an engine is put back after the test."""
    from vllm.v1.engine.core import EngineCore

    for name in ("add_lora", "collective_rpc", "sleep", "_reset_caches", "reset_prefix_cache"):
        monkeypatch.setattr(EngineCore, name, getattr(EngineCore, name))


def test_the_engine_says_which_adapters_it_loads_before_it_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore

    from kvrelay.connector import compat
    from kvrelay.connector.adapters import Adapter

    order: list[Any] = []

    def add_lora(_: object, asked: LoRARequest) -> bool:
        order.append(asked.lora_name)
        return True

    unwatched(monkeypatch)
    monkeypatch.setattr(EngineCore, "add_lora", add_lora)
    config: Any = SimpleNamespace(lora_config=LoRAConfig(lora_dtype=torch.float32))
    calls: Any = SimpleNamespace(adapter_loading=order.append)
    compat.watch_engine(config, calls)
    asked = LoRARequest("sql", 3, "/adapters/sql", load_inplace=True)
    assert EngineCore.add_lora(object(), asked) is True
    assert order == [Adapter("sql", 3, "/adapters/sql", "torch.float32", in_place=True), "sql"]
    assert compat.adapter(request(lora_request=asked).lora_request, config) == order[0]
    assert compat.adapter(request().lora_request, config) is None


def test_what_an_engine_makes_of_an_adapters_files_is_part_of_what_it_is_called() -> None:
    import torch
    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest

    from kvrelay.connector import compat

    def variant(**options: Any) -> str:
        config: Any = SimpleNamespace(lora_config=LoRAConfig(**{"lora_dtype": torch.float32, **options}))
        made = compat.adapter(LoRARequest("sql", 3, "/adapters/sql"), config)
        assert made is not None
        return made.variant

    others: list[dict[str, Any]] = [
        {"lora_dtype": torch.bfloat16}, {"target_modules": ["o_proj"]}, {"target_modules": ["o_proj", "qkv_proj"]},
        {"enable_tower_connector_lora": True}, {"enable_moe_shared_loras": True},
        {"enable_mixed_moe_lora_format": True},
    ]  # fmt: skip
    assert len({variant(), *(variant(**options) for options in others)}) == 1 + len(others)
    assert variant(target_modules=["a", "b"]) == variant(target_modules=["b", "a"])
    assert variant(max_loras=4, max_lora_rank=64, fully_sharded_loras=True) == variant()


def test_what_the_server_sends_the_engine_to_load_is_still_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    from kvrelay.connector import compat

    unwatched(monkeypatch)
    nobody: Any = None
    compat.watch_engine(nobody, nobody)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(LoRARequest("sql", 3, "/adapters/sql")))
    assert isinstance(sent, list)
    (decoded,) = EngineCoreProc._convert_msgspec_args(MethodType(EngineCore.add_lora, object()), (sent,))
    assert decoded == LoRARequest("sql", 3, "/adapters/sql")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # of what reads images
def test_images_that_vllm_itself_has_read_are_told_by_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.request import Request

    from kvrelay.connector import compat
    from kvrelay.connector.facts import VOLATILE, _media
    from kvrelay.testing.seeing_model import IMAGE_PIXELS, IMAGE_TOKENS, build_tiny_blip2

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = str(build_tiny_blip2(tmp_path / "blip2", seed=3))
    config = EngineArgs(model=model, dtype="float32", block_size=32, enforce_eager=True).create_engine_config()
    renderer = renderer_from_config(config)
    processor = InputProcessor(config, renderer)

    def seen(colour: str, name: str) -> Any:
        image = Image.new("RGB", (IMAGE_PIXELS, IMAGE_PIXELS), colour)
        prompt = {"prompt": "What is this? " * 12, "multi_modal_data": {"image": image}}
        (rendered,) = renderer.render_cmpl([prompt])
        asked = processor.process_inputs(name, rendered, SamplingParams(), supported_tasks=("generate",))
        return Request.from_engine_core_request(asked, None)

    red, again, blue = seen("red", "1"), seen("red", "2"), seen("blue", "3")
    (extra,) = compat.media(red)
    assert (extra.start, extra.end) == (0, IMAGE_TOKENS)
    assert red.prompt_token_ids == blue.prompt_token_ids, "by its tokens no image differs from another"
    assert keys(red) == keys(again)
    assert same(keys(red), keys(blue)) == 0
    assert "vision_config" in _media(config)["model"]
    assert not _media(config)["model"].keys() & VOLATILE
