"""Copies of a real device: byte for byte those of host memory, and never too early."""

from __future__ import annotations

from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from kvrelay.connector.layout import prove  # noqa: E402 - after the skip
from kvrelay.testing.device_cache import BLOCK, ORDERS, DeviceCache, prompt  # noqa: E402

LONG_CYCLES = 400_000_000
"""Some tenths of a second."""


def cache_of(device: str, **kind: Any) -> DeviceCache:
    from kvrelay.connector.cuda import CudaCopies

    return DeviceCache(CudaCopies(torch.device(device)), device=device, **kind)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_objects_are_those_of_the_same_blocks_in_host_memory(
    device: str, order: str, item_bytes: int, kernel_blocks: int, *, native: bool
) -> None:
    cache = cache_of(device, order=order, item_bytes=item_bytes, kernel_blocks=kernel_blocks, native=native)
    blocks, spans = [3, 9, 4, 5], prompt(101, 32)
    ours, theirs = cache.room(spans), cache.room(spans)
    sums = cache.layer.save(blocks, spans, ours)
    assert sums == cache.host.save(blocks, spans, theirs)
    assert ours == theirs
    assert cache.layer.load([11, 0, 7, 2], spans, ours, sums) is None
    assert cache.host.load([11, 0, 7, 2], spans, theirs, sums) is None
    assert cache.same


def test_a_layer_is_read_when_it_has_been_computed(device: str) -> None:
    cache = cache_of(device)
    spans = prompt(64, 64)
    torch.cuda._sleep(LONG_CYCLES)
    cache.tensor[3:5] = 7
    cache.layer.computed()
    torch.cuda._sleep(LONG_CYCLES)
    cache.tensor[3:5] = 9
    objects, expected = cache.room(spans), cache.room(spans)
    cache.layer.save([3, 4], spans, objects)
    cache.theirs[3:5] = 7
    cache.host.save([3, 4], spans, expected)
    assert objects == expected


def test_blocks_are_written_when_whoever_had_them_before_has_come_to_an_end(device: str) -> None:
    cache = cache_of(device)
    spans = prompt(64, 64)
    objects = cache.room(spans)
    sums = cache.host.save([1, 2], spans, objects)
    torch.cuda._sleep(LONG_CYCLES)
    cache.tensor[5:7] = -1
    cache.copies.step_begins()
    assert cache.layer.load([5, 6], spans, objects, sums) is None
    torch.cuda.synchronize()
    assert torch.equal(cache.tensor[5:7].cpu(), cache.theirs[1:3])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kv", ["float16", "bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("backend", "heads", "head_size"),
    [("FLASH_ATTN", 2, 64), ("FLASHINFER", 2, 64), ("TRITON_ATTN", 2, 64), ("FLASH_ATTN_MLA", 1, 576)],
)
def test_the_codec_is_what_the_engines_own_kernel_writes(
    backend: str, heads: int, head_size: int, kv: str, *, native: bool
) -> None:
    pytest.importorskip("vllm")
    from kvrelay.connector.codec import FP8, PLAIN, find_codec
    from kvrelay.connector.compat import FLOAT8, Types, write_kernel

    item_bytes, quantisation, model = (1, FP8, "bfloat16") if kv in FLOAT8 else (2, PLAIN, kv)
    sizes = {"block_tokens": BLOCK, "head_size": head_size}
    codec = find_codec(backend, "", item_bytes=item_bytes, quantisation=quantisation, **sizes)
    kernel = write_kernel(backend, "", Types(model, kv), BLOCK)
    prove(codec, kernel, heads=heads, dtype=np.dtype(f"u{item_bytes}"), native=native, **sizes)
