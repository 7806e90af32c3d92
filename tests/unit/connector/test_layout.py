"""Codecs and paged copies on arrays; `tests/integration/connector` proves the codecs against vLLM's own kernel."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import ConfigError

np = pytest.importorskip("numpy")

from kvrelay.connector.codec import CODECS, find_codec  # noqa: E402 - after the skip
from kvrelay.connector.layout import PagedLayer, Run, prove  # noqa: E402
from kvrelay.connector.pages import PurePages, Span, packed_spans  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADS, DIMS, BLOCKS = 3, 32, 6
SENTINEL = 0xEEEE


def paged(isa: str, block_tokens: int, item_bytes: int = 2) -> tuple[Any, PagedLayer]:
    codec = find_codec("CPU_ATTN", isa, block_tokens=block_tokens, head_size=DIMS, item_bytes=item_bytes)
    pages = np.full((BLOCKS, HEADS, 2 * block_tokens * DIMS), SENTINEL, dtype=f"u{item_bytes}")
    return pages, PagedLayer(pages, codec, block_tokens=block_tokens, head_size=DIMS)


def some_tokens(count: int, item_bytes: int = 2, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 0xE000, (HEADS, 2, count, DIMS)).astype(f"u{item_bytes}")


def place(isa: str, plane: int, token: int, dim: int, block_tokens: int, item_bytes: int) -> int:
    """Where an item lies in one (block, head), by the formulas of vLLM's kernels."""
    half = plane * block_tokens * DIMS
    if isa != "amx":
        return half + (dim * block_tokens + token if plane == 0 else token * DIMS + dim)
    pair = 4 // item_bytes
    row, column, rows = (token, dim, DIMS) if plane == 0 else (dim, token, block_tokens)
    return half + (row // 16) * 16 * rows + (column // pair) * 16 * pair + (row % 16) * pair + column % pair


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_every_item_lies_where_the_formula_says(isa: str, item_bytes: int) -> None:
    pages, layer = paged(isa, 32, item_bytes)
    tokens = some_tokens(32, item_bytes)
    layer.write(Run([4], 0, 32), tokens)
    for plane in range(2):
        for token in range(0, 32, 5):
            for dim in range(DIMS):
                at = place(isa, plane, token, dim, 32, item_bytes)
                assert (pages[4, :, at] == tokens[:, plane, token, dim]).all()


@settings(deadline=None)
@given(
    isa=st.sampled_from(["vec", "amx"]),
    block_tokens=st.sampled_from([32, 64]),
    blocks=st.permutations(range(BLOCKS)),
    data=st.data(),
)
def test_a_run_round_trips_and_no_other_slot_is_touched(
    isa: str, block_tokens: int, blocks: Sequence[int], data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, block_tokens - 1))
    count = data.draw(st.integers(1, BLOCKS * block_tokens - offset))
    pages, layer = paged(isa, block_tokens)
    tokens = some_tokens(count)
    run = Run(blocks, offset, count)
    layer.write(run, tokens)
    assert np.array_equal(layer.read(run), tokens)
    whole = layer.read(Run(blocks, 0, BLOCKS * block_tokens))
    assert (whole[:, :, :offset] == SENTINEL).all()
    assert (whole[:, :, offset + count :] == SENTINEL).all()
    assert (pages != SENTINEL).sum() == tokens.size


@given(blocks=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True))
@settings(deadline=None)
def test_neighbouring_and_scattered_blocks_read_alike(blocks: list[int]) -> None:
    _, layer = paged("vec", 32)
    for block in range(BLOCKS):
        layer.write(Run([block], 0, 32), some_tokens(32, seed=block))
    read = layer.read(Run(blocks, 0, 32 * len(blocks)))
    assert np.array_equal(read, np.concatenate([some_tokens(32, seed=block) for block in blocks], axis=2))


def test_what_is_read_is_a_copy() -> None:
    pages, layer = paged("vec", 32)
    before = layer.read(Run([1], 0, 32)).copy()
    read = layer.read(Run([1], 0, 32))
    pages[:] = 0
    assert np.array_equal(read, before)


def test_pages_that_lie_apart_are_read_in_place() -> None:
    """One storage may hold the blocks of several layers in turn."""
    codec = find_codec("CPU_ATTN", "vec", block_tokens=32, head_size=DIMS, item_bytes=2)
    storage = np.zeros((BLOCKS, 2, HEADS, 2 * 32 * DIMS), dtype="u2")
    layer = PagedLayer(storage[:, 1], codec, block_tokens=32, head_size=DIMS)
    tokens = some_tokens(70)
    run = Run([5, 0, 3], 4, 70)
    layer.write(run, tokens)
    assert np.array_equal(layer.read(run), tokens)
    assert not storage[:, 0].any()
    assert storage[:, 1].any()


def test_an_unknown_instruction_set_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ConfigError, match=r"CPU_ATTN with instruction set 'neon' has no codec .*CPU_ATTN/amx"):
        find_codec("CPU_ATTN", "neon", block_tokens=32, head_size=64, item_bytes=4)


def test_pages_of_another_size_are_refused() -> None:
    codec = find_codec("CPU_ATTN", "vec", block_tokens=32, head_size=DIMS, item_bytes=2)
    with pytest.raises(ConfigError, match="a KV page has 100 items a head, not 2 x 32 tokens x 32 dims"):
        PagedLayer(np.zeros((1, 1, 100), "u2"), codec, block_tokens=32, head_size=DIMS)


def kernel(isa: str, item_bytes: int, *, stray: bool = False) -> Any:
    """A write kernel made of the formulas; ``stray``: it also writes a slot that is not its own."""

    def write(pages: Any, tokens: Any, slots: Sequence[int]) -> None:
        for index, slot in enumerate(slots):
            for plane in range(2):
                for dim in range(DIMS):
                    at = place(isa, plane, slot % 32, dim, 32, item_bytes)
                    pages[slot // 32, :, at] = tokens[:, plane, index, dim]
        if stray:
            pages[1, 0, 0] = 1

    return write


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_a_codec_is_proven_only_by_the_kernel_it_describes(item_bytes: int) -> None:
    isas = {"vec": "vec", "amx": "amx"}
    for isa in isas:
        for kernel_isa in isas:
            codec = CODECS["CPU_ATTN", isa, "none"](32, DIMS, item_bytes)
            size = {"heads": 2, "block_tokens": 32, "head_size": DIMS, "dtype": np.dtype(f"u{item_bytes}")}
            if isa == kernel_isa:
                prove(codec, kernel(kernel_isa, item_bytes), **size)
            else:
                with pytest.raises(ConfigError, match="does not match what this engine's attention kernel writes"):
                    prove(codec, kernel(kernel_isa, item_bytes), **size)


def test_a_kernel_that_writes_elsewhere_too_proves_nothing() -> None:
    with pytest.raises(ConfigError, match="does not match"):
        prove(
            CODECS["CPU_ATTN", "vec", "none"](32, DIMS, 2),
            kernel("vec", 2, stray=True),
            heads=2,
            block_tokens=32,
            head_size=DIMS,
            dtype=np.dtype("u2"),
        )


@settings(deadline=None)
@given(offset=st.integers(0, 15), count=st.integers(1, 80), blocks=st.permutations(range(BLOCKS)))
def test_one_latent_plane_round_trips(offset: int, count: int, blocks: Sequence[int]) -> None:
    codec = find_codec("CPU_MLA", "", block_tokens=16, head_size=DIMS, item_bytes=4)
    pages = np.full((BLOCKS, 1, 16 * DIMS), SENTINEL, "u4")
    layer = PagedLayer(pages, codec, block_tokens=16, head_size=DIMS)
    tokens = some_tokens(count, 4)[:1, :1]
    layer.write(Run(blocks, offset, count), tokens)
    assert np.array_equal(layer.read(Run(blocks, offset, count)), tokens)
    slots = pages.reshape(BLOCKS, 16, DIMS)
    for token in range(count):
        block, slot = divmod(offset + token, 16)
        assert (slots[blocks[block], slot] == tokens[0, 0, token]).all()
    assert (pages != SENTINEL).sum() == tokens.size


def test_what_is_compared_with_its_checksum_is_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A load's lease is lost. 2. It compares an object. 3. Another writer has the place before it writes."""
    codec = find_codec("CPU_ATTN", "vec", block_tokens=32, head_size=DIMS, item_bytes=2)
    pages = np.zeros((BLOCKS, HEADS, 2 * 32 * DIMS), np.uint16)
    arena = bytearray(some_tokens(32).tobytes())
    twin = PurePages(pages, codec.planes)
    sums = twin._sums(memoryview(arena))

    def compared(view: memoryview) -> list[int]:
        found = PurePages._sums(twin, view)
        arena[:] = b"\xee" * len(arena)
        return found

    monkeypatch.setattr(twin, "_sums", compared)
    packed = struct.pack(f"<{HEADS}Q", *sums)
    assert twin.load(struct.pack("<Q", 1), packed_spans([Span.whole(32, 0)]), [arena], packed) is None
    assert not (pages[1] == SENTINEL).any()
