"""Codecs on tensors that vLLM itself lays out, and beside its kernels that can be run on a CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

np = pytest.importorskip("numpy")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's dependencies
]

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LAYERS, BLOCKS, HEADS, DIMS, TOKENS = 3, 6, 2, 32, 75
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def test_these_are_all_layouts() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert {layout.name for layout in KVCacheLayout} == set(LAYOUTS)


def views_of(
    layout: str, *, dtype: str, latent: bool = False, padded: int = 0, kernel_block: int | None = None
) -> tuple[Any, list[Any]]:
    """VLLM's views of all layers in one storage, and that storage."""
    import torch
    from vllm.v1 import kv_cache_interface as vllm

    kind = {"block_size": 32, "head_size": DIMS, "dtype": getattr(torch, dtype)}
    make, heads = (vllm.MLAAttentionSpec, 1) if latent else (vllm.FullAttentionSpec, HEADS)
    spec = make(num_kv_heads=heads, **kind)
    if padded:
        spec = make(num_kv_heads=heads, page_size_padded=spec.page_size_bytes + padded, **kind)
    order = vllm.KVCacheLayout[layout]
    layer_stride, block_stride, *_ = vllm.compute_layout_strides(spec, BLOCKS, LAYERS, order)
    raw = torch.full((LAYERS * BLOCKS * spec.page_size_bytes,), -18, dtype=torch.int8)
    placed = vllm.KVCacheTensor(raw.numel(), [f"l{at}" for at in range(LAYERS)], layer_stride, block_stride)
    return raw, vllm.create_kv_cache_views(raw, spec, BLOCKS, order, placed, kernel_block)


def slots_of(ids: Sequence[int], count: int) -> list[int]:
    return [ids[at // 32] * 32 + at % 32 for at in range(count)]


def write_rows(view: Any, tokens: Any, slots: Sequence[int]) -> None:
    """``reshape_and_cache_flash`` as FlashAttention, FlashInfer and Triton call it, from its documented indexing."""
    import torch

    keys, values = view.transpose(1, 2).split(DIMS, dim=-1)
    given = torch.from_numpy(tokens).view(view.dtype)
    block = keys.shape[1]
    for token, slot in enumerate(slots):
        keys[slot // block, slot % block] = given[:, 0, token]
        values[slot // block, slot % block] = given[:, 1, token]


def write_latent(view: Any, tokens: Any, slots: Sequence[int]) -> None:
    """``concat_and_cache_mla``, from its documented indexing."""
    import torch

    given = torch.from_numpy(tokens).view(view.dtype)
    for token, slot in enumerate(slots):
        view[slot // 32, 0, slot % 32] = given[0, 0, token]


def check(
    layout: str,
    backend: str,
    write: Callable[[Any, Any, Sequence[int]], None],
    *,
    dtype: str,
    native: bool,
    padded: int = 0,
    kernel_block: int | None = None,
) -> None:
    """Read what the kernel wrote into one engine, write it into another, and compare that with the kernel's bytes."""
    import torch

    from kvrelay.connector.codec import find_codec
    from kvrelay.connector.compat import kv_pages
    from kvrelay.connector.layout import PagedLayer, group_kernel_blocks
    from kvrelay.connector.pages import Span

    latent = backend == "CPU_MLA"
    size = getattr(torch, dtype).itemsize
    heads, planes = (1, 1) if latent else (HEADS, 2)
    bits = np.random.default_rng(1).integers(1, 100, (heads, planes, TOKENS, DIMS)).astype(f"u{size}")
    codec = find_codec(backend, "", block_tokens=kernel_block or 32, head_size=DIMS, item_bytes=size)

    def layer(view: Any) -> PagedLayer:
        pages = kv_pages(view)
        if kernel_block:
            pages = group_kernel_blocks(pages, BLOCKS)
        return PagedLayer(pages, codec, block_tokens=32, head_size=DIMS, native=native)

    def engine() -> tuple[Any, list[Any]]:
        return views_of(layout, dtype=dtype, latent=latent, padded=padded, kernel_block=kernel_block)

    (_, theirs), (raw, ours), (expected, reference) = engine(), engine(), engine()
    write(theirs[1], bits, slots_of([4, 0, 5], TOKENS))
    spans = [Span.whole(64, 0), Span.whole(TOKENS - 64, 64)]
    objects = [bytearray(heads * layer(theirs[1]).segment_bytes(span.tokens)) for span in spans]
    sums = layer(theirs[1]).save([4, 0, 5], spans, objects)
    if not native:
        assert b"".join(objects[:1]) == bits[:, :, :64].tobytes()
    assert layer(ours[2]).load([1, 3, 2], spans, objects, sums) is None
    write(reference[2], bits, slots_of([1, 3, 2], TOKENS))
    assert torch.equal(raw, expected)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_k_and_v_in_every_layout(layout: str, dtype: str, native: bool) -> None:
    check(layout, "FLASH_ATTN", write_rows, dtype=dtype, native=native)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_latent_in_every_layout(layout: str, native: bool) -> None:
    check(layout, "CPU_MLA", write_latent, dtype="bfloat16", native=native)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_padded_pages(layout: str, native: bool) -> None:
    check(layout, "FLASHINFER", write_rows, dtype="bfloat16", native=native, padded=512)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_kernel_blocks_smaller_than_the_schedulers(layout: str, native: bool) -> None:
    check(layout, "FLASHINFER", write_rows, dtype="bfloat16", native=native, kernel_block=16)


TRITON = """
import importlib, sys
import torch, triton, triton.language
import vllm.triton_utils
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language  # on a CPU they are placeholders
torch.cuda.get_device_capability = lambda _: (9, 0)  # it chooses a tile size by it
ops = importlib.import_module("vllm.v1.attention.ops.triton_reshape_and_cache_flash")
sys.path.insert(0, sys.argv[1])
import test_layouts_of_vllm as tests

def write(view, tokens, slots):
    given = torch.from_numpy(tokens).view(view.dtype)
    keys, values = view.transpose(1, 2).split(tests.DIMS, dim=-1)
    one = torch.ones(1)
    ops.triton_reshape_and_cache_flash(
        given[:, 0].transpose(0, 1).contiguous(), given[:, 1].transpose(0, 1).contiguous(), keys, values,
        torch.tensor(slots), "auto", one, one,
    )

for layout in tests.LAYOUTS:
    for native in (False, True):
        tests.check(layout, "TRITON_ATTN", write, dtype="float32", native=native)
print("proven")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.timeout(240)
def test_tritons_own_kernel_writes_rows_as_its_codec_says() -> None:
    """Triton's interpreter runs it; that has to be chosen before the kernel is imported, so in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", TRITON, str(Path(__file__).parent)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.stdout.endswith("proven\n"), done.stderr
