"""All of vLLM's layouts, and codecs, item sizes and packings, natively and in NumPy, against what kernels write."""

from __future__ import annotations

import mmap
import random
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import BadRequestError, ConfigError
from kvrelay.native import native
from kvrelay.transport.checksum import segment_sums

np = pytest.importorskip("numpy")

from kvrelay.connector import pages as pages_module  # noqa: E402 - after the skip
from kvrelay.connector.codec import find_codec  # noqa: E402
from kvrelay.connector.layout import PagedLayer, Run, group_kernel_blocks, prove  # noqa: E402
from kvrelay.connector.pages import Span  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KERNELS = ("numpy",) if native is None else (*native.KERNELS, "numpy")
LAYERS, BLOCKS = 3, 5
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""Axes [L, B, H, N, C] in the order of memory, as in vLLM's ``KVCacheLayout``."""
CODECS = {
    "cpu": ("CPU_ATTN", "vec", "none"),
    "amx": ("CPU_ATTN", "amx", "none"),
    "flash": ("FLASH_ATTN", "", "none"),
    "fp8": ("FLASHINFER", "", "fp8_per_tensor"),
    "mla": ("CPU_MLA", "", "none"),
}
ROWS = ("flash", "fp8", "mla")
"""Those that leave tokens apart."""


@dataclass(frozen=True)
class Kind:
    """What a cache is like."""

    codec: str
    layout: str
    item_bytes: int
    block: int
    heads: int
    dims: int
    padding: int = 0

    @property
    def planes(self) -> int:
        return 1 if self.codec == "mla" else 2

    def tensor(self, seed: int) -> tuple[Any, Any]:
        """Storage of random bytes, and its view ``[layer][block][head][token][content]``."""
        sizes = (LAYERS, BLOCKS, self.heads, self.block, self.planes * self.dims)
        order = LAYOUTS[self.layout]
        strides, step = [0] * 5, self.item_bytes
        for axis in reversed(order):
            if axis in (0, 1) and step and not any(strides[:2]):
                step += self.padding * self.item_bytes  # page_size_padded
            strides[axis] = step
            step *= sizes[axis]
        # At a page's bound: torch's allocations begin at a cache line's, which lets large calls go past the caches.
        storage = np.frombuffer(mmap.mmap(-1, step + self.padding * 64), np.uint8)
        storage[:] = np.random.default_rng(seed).integers(0, 256, len(storage), dtype=np.uint8)
        kind = np.dtype(f"u{self.item_bytes}")
        return storage, np.lib.stride_tricks.as_strided(storage.view(kind), sizes, strides)

    def layer(self, pages: Any, kernel: str, *, packing: str = "canonical") -> PagedLayer:
        codec = find_codec(
            *CODECS[self.codec][:2],
            block_tokens=self.block,
            head_size=self.dims,
            item_bytes=self.item_bytes,
            quantisation=CODECS[self.codec][2],
        )
        with using(kernel):
            return PagedLayer(pages, codec, block_tokens=self.block, head_size=self.dims, native=packing == "native")

    def write(self, pages: Any, tokens: Any, slots: Sequence[int]) -> None:
        """The engine's kernel, restated from its source, item by item."""
        half = self.block * self.dims
        pair = 4 // max(2, self.item_bytes)
        for at, slot in enumerate(slots):
            block, token = divmod(slot, self.block)
            page = pages[block]
            if self.codec in ROWS:
                for plane in range(self.planes):
                    page[:, token, plane * self.dims : (plane + 1) * self.dims] = tokens[:, plane, at]
                continue
            for dim in range(self.dims):
                places = [dim * self.block + token, token * self.dims + dim]
                if self.codec == "amx":
                    places = [
                        (row // 16) * 16 * width + (column // pair) * 16 * pair + (row % 16) * pair + column % pair
                        for row, column, width in ((token, dim, self.dims), (dim, token, self.block))
                    ]
                for plane, place in enumerate(places):
                    row, column = divmod(plane * half + place, 2 * self.dims)
                    page[:, row, column] = tokens[:, plane, at, dim]

    def tokens(self, count: int, seed: int) -> Any:
        kind = np.dtype(f"u{self.item_bytes}")
        size = (self.heads, self.planes, count, self.dims)
        return np.random.default_rng(seed).integers(0, np.iinfo(kind).max, size, dtype=kind)


class using:  # noqa: N801 - reads as a verb
    """The native module by one of its kernels, or the twin."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        if self._kernel == "numpy":
            self._patch.setattr(pages_module, "native", None)
        elif native is not None:
            native.use_kernel(self._kernel)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@pytest.fixture(autouse=True)
def _fastest() -> Iterator[None]:
    yield
    if native is not None:
        native.use_kernel(native.KERNELS[0])


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    codec = draw(st.sampled_from(sorted(CODECS)))
    layouts = sorted(LAYOUTS) if codec in ROWS else ["LBHNC", "LHBNC", "BLHNC", "BHLNC"]
    item_bytes = 1 if codec == "fp8" else draw(st.sampled_from([2, 4]))
    block = draw(st.sampled_from([16, 32, 48] if codec != "amx" else [32, 64]))
    heads = 1 if codec == "mla" else draw(st.sampled_from([1, 2, 3]))
    layout = draw(st.sampled_from(layouts))
    padded = LAYOUTS[layout][:2] in ((0, 1), (1, 0))
    dims = draw(st.sampled_from([32, 80] if codec != "mla" else [36, 72]))
    return Kind(codec, layout, item_bytes, block, heads, dims, draw(st.sampled_from([0, 24])) if padded else 0)


def spans_of(count: int, chunk: int) -> list[Span]:
    return [Span.whole(min(chunk, count - at), at) for at in range(0, count, chunk)]


def packed(objects: Sequence[Any]) -> list[bytearray]:
    return [bytearray(np.ascontiguousarray(one).tobytes()) for one in objects]


def sums_of(objects: Sequence[bytearray], heads: int) -> array[int]:
    return array("Q", (value for one in objects for value in segment_sums(one, len(one) // heads)))


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=20)
@given(kind=kinds(), data=st.data())
def test_blocks_become_canonical_objects_and_back_and_nothing_else_changes(
    kernel: str, kind: Kind, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 3 * kind.block))
    first = data.draw(st.integers(0, kind.block - 1))
    chunk = data.draw(st.sampled_from([16, 40, 64]))
    ids = data.draw(st.permutations(range(BLOCKS)))[: -(-(first + count) // kind.block)]
    tokens = kind.tokens(count, 1)
    slots = [ids[at // kind.block] * kind.block + at % kind.block for at in range(first, first + count)]

    _, theirs = kind.tensor(2)
    kind.write(theirs[1], tokens, slots)
    spans = [Span.whole(span.tokens, span.first + first) for span in spans_of(count, chunk)]
    objects = packed([tokens[:, :, s.first - first : s.first - first + s.tokens] for s in spans])
    saved = [bytearray(len(one)) for one in objects]
    with using(kernel):
        sums = kind.layer(theirs[1], kernel).save(ids, spans, saved)
    assert saved == objects
    assert array("Q", sums) == sums_of(objects, kind.heads)

    # Only some tokens are wanted: a prefix is there already, and the end is clipped.
    start, end = data.draw(st.integers(0, count - 1)), count
    end = data.draw(st.integers(start + 1, count))
    wanted, sources = [], []
    for span, one in zip(spans, objects, strict=True):
        begin, stop = max(span.first - first, start), min(span.first - first + span.tokens, end)
        if begin < stop:
            wanted.append(Span(span.tokens, begin - (span.first - first), stop - begin, first + begin))
            sources.append(one)
    storage, ours = kind.tensor(3)
    expected, reference = kind.tensor(3)
    kind.write(reference[2], tokens[:, :, start:end], slots[start:end])
    with using(kernel):
        assert kind.layer(ours[2], kernel).load(ids, wanted, sources, sums_of(sources, kind.heads)) is None
    assert np.array_equal(storage, expected)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=20)
@given(kind=kinds(), data=st.data())
def test_native_objects_hold_the_engines_blocks_and_zeros_after_the_prompt(
    kernel: str, kind: Kind, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 3 * kind.block))
    ids = data.draw(st.permutations(range(BLOCKS)))[: -(-count // kind.block)]
    tokens = kind.tokens(count, 1)
    slots = [ids[at // kind.block] * kind.block + at % kind.block for at in range(count)]
    _, theirs = kind.tensor(2)
    kind.write(theirs[1], tokens, slots)
    spans = spans_of(count, kind.block * data.draw(st.sampled_from([1, 2])))
    # What the kernel would write into blocks of zeros that lie one after the other.
    dense = Kind(kind.codec, "LBHNC", kind.item_bytes, kind.block, kind.heads, kind.dims).tensor(4)[1][0]
    dense[:] = 0
    kind.write(dense, tokens, range(count))
    objects = packed(
        [dense[s.first // kind.block : -(-(s.first + s.tokens) // kind.block)].transpose(1, 0, 2, 3) for s in spans]
    )
    saved = [bytearray(b"\xee" * len(one)) for one in objects]
    with using(kernel):
        sums = kind.layer(theirs[1], kernel, packing="native").save(ids, spans, saved)
    assert saved == objects
    assert array("Q", sums) == sums_of(objects, kind.heads)

    # Loads begin at a block's bound, and may end anywhere.
    start = data.draw(st.sampled_from(range(0, count, kind.block)))
    end = data.draw(st.integers(start + 1, count))
    wanted, sources = [], []
    for span, one in zip(spans, objects, strict=True):
        begin, stop = max(span.first, start), min(span.first + span.tokens, end)
        if begin < stop:
            wanted.append(Span(span.tokens, begin - span.first, stop - begin, begin))
            sources.append(one)
    storage, ours = kind.tensor(3)
    expected, reference = kind.tensor(3)
    kind.write(reference[2], tokens[:, :, start:end], slots[start:end])
    with using(kernel):
        layer = kind.layer(ours[2], kernel, packing="native")
        assert layer.load(ids, wanted, sources, sums_of(sources, kind.heads)) is None
    assert np.array_equal(storage, expected)


@pytest.mark.parametrize("packing", ["canonical", "native"])
@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("codec", ["cpu", "amx", "flash"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_goes_past_the_caches_is_the_same(
    kernel: str, codec: str, item_bytes: int, shift: int, packing: str
) -> None:
    """Large calls store by other instructions, where addresses allow it."""
    kind = Kind(codec, "LBHNC", item_bytes, 128, 3, 64)
    ids, count = [3, 0, 4, 1], 3 * 128 + 37
    tokens = kind.tokens(count, 5)
    _, theirs = kind.tensor(1)
    layer = kind.layer(theirs[0], "numpy")
    layer.write(Run(ids, 0, count), tokens)
    spans = spans_of(count, 128)
    reference = kind.layer(theirs[0], "numpy", packing=packing)
    buffers = [bytearray(3 * reference.segment_bytes(span.tokens)) for span in spans]
    with using("numpy"):
        sums = reference.save(ids, spans, buffers)
    places = [memoryview(bytearray(len(one) + 64))[shift : shift + len(one)] for one in buffers]
    storage, ours = kind.tensor(7)
    expected, plain = kind.tensor(7)
    kind.layer(plain[0], "numpy").write(Run(ids, 0, count), tokens)
    with using(kernel):
        assert kind.layer(theirs[0], kernel, packing=packing).save(ids, spans, places) == sums
        assert [bytes(place) for place in places] == buffers
        assert kind.layer(ours[0], kernel, packing=packing).load(ids, spans, places, sums) is None
    assert np.array_equal(storage, expected)


@pytest.mark.parametrize("packing", ["canonical", "native"])
@pytest.mark.parametrize("count", [70, 400])
@pytest.mark.parametrize("kernel", KERNELS)
def test_layers_saved_at_once_lie_one_behind_the_other_in_each_object(kernel: str, count: int, packing: str) -> None:
    kind = Kind("cpu", "LBHNC", 4, 32, 2, 32)
    _, pages = kind.tensor(1)
    spans, ids = spans_of(count, 32), [at % BLOCKS for at in range(-(-count // 32))]
    with using(kernel):
        first, *others = (kind.layer(pages[at], kernel, packing=packing) for at in (2, 0, 1))
        each: list[tuple[list[bytearray], bytes]] = []
        for layer in (first, *others):
            room = [bytearray(2 * layer.segment_bytes(span.tokens)) for span in spans]
            each.append((room, layer.save(ids, spans, room)))
        objects = [bytearray(3 * 2 * first.segment_bytes(span.tokens)) for span in spans]
        sums = first.save(ids, spans, objects, others)
    assert objects == [b"".join(room[at] for room, _ in each) for at in range(len(spans))]
    assert sums == b"".join(told[16 * at : 16 * (at + 1)] for at in range(len(spans)) for _, told in each)


@pytest.mark.parametrize("kernel", KERNELS)
def test_layers_of_different_kinds_are_not_saved_at_once(kernel: str) -> None:
    kind = Kind("cpu", "LBHNC", 4, 32, 2, 32)
    unlike = [
        Kind("cpu", "LBHNC", 4, 32, 1, 32),
        Kind("cpu", "LBHNC", 4, 64, 2, 32),
        Kind("cpu", "LBHNC", 2, 32, 2, 32),
    ]
    with using(kernel):
        layer = kind.layer(kind.tensor(1)[1][0], kernel)
        room = bytearray(2 * 2 * layer.segment_bytes(8))
        for other in (*(one.layer(one.tensor(1)[1][0], kernel) for one in unlike),):
            with pytest.raises(BadRequestError, match="other layer 1 is not one of the same"):
                layer.save([1], [Span.whole(8, 0)], [room], [layer, other])
        with pytest.raises(BadRequestError, match="bytes"):
            layer.save([1], [Span.whole(8, 0)], [room], [layer, layer])
    assert not any(room)


@pytest.mark.parametrize("packing", ["canonical", "native"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_wrong_bit_anywhere_is_found_and_named(kernel: str, packing: str) -> None:
    kind = Kind("cpu", "LBHNC", 4, 32, 2, 32)
    _, pages = kind.tensor(1)
    spans, rng = spans_of(70, 32), random.Random(1)
    with using(kernel):
        layer = kind.layer(pages[0], kernel, packing=packing)
        objects = [bytearray(2 * layer.segment_bytes(span.tokens)) for span in spans]
        sums = layer.save([4, 0, 2], spans, objects)
        other = kind.layer(pages[1], kernel, packing=packing)
        assert other.load([0, 1, 2], spans, objects, sums) is None
        for index in (2, 0, 1):
            at = rng.randrange(len(objects[index]))
            objects[index][at] ^= 1 << rng.randrange(8)
            assert other.load([0, 1, 2], spans, objects, sums) == index
            assert layer.save([4, 0, 2], spans, objects) == sums


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("blocks", "span", "size", "packing", "says"),
    [
        ([5], Span.whole(8, 0), 8, "canonical", "block 5 is not among the 5 of this layer"),
        ([1], Span.whole(33, 0), 33, "canonical", "of 32 slots"),
        ([1], Span.whole(8, 25), 8, "canonical", "of 32 slots"),
        ([1], Span(8, 4, 5, 0), 8, "canonical", "span 0"),
        ([1], Span.whole(8, 0), 7, "canonical", "bytes"),
        ([1], Span.whole(8, 0), 8, "native", "bytes"),
        ([1, 2], Span.whole(32, 8), 32, "native", "span 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_moves(
    kernel: str, blocks: list[int], span: Span, size: int, packing: str, says: str
) -> None:
    kind = Kind("cpu", "LBHNC", 4, 32, 2, 32)
    storage, pages = kind.tensor(1)
    before = storage.copy()
    buffer = bytearray(2 * 2 * size * 32 * 4)
    with using(kernel):
        layer = kind.layer(pages[0], kernel, packing=packing)
        with pytest.raises(BadRequestError, match=says):
            layer.load(blocks, [span], [buffer], array("Q", [0, 0]))
        with pytest.raises(BadRequestError, match=says):
            layer.save(blocks, [span], [buffer])
    assert np.array_equal(storage, before)
    assert not any(buffer)


@pytest.mark.parametrize("packing", ["canonical", "native"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_blocks_smaller_than_the_schedulers_are_one_block(kernel: str, packing: str) -> None:
    """FlashInfer knows blocks of 16 to 64 tokens, whatever ``--block-size`` is."""
    small = Kind("flash", "LBNHC", 2, 16, 2, 32)
    _, kernel_blocks = small.tensor(1)
    pages = group_kernel_blocks(kernel_blocks[0][:4], 2)
    tokens = small.tokens(40, 2)
    small.write(kernel_blocks[0], tokens, [32 + at if at < 32 else at - 32 for at in range(40)])
    codec = find_codec("FLASHINFER", "", block_tokens=16, head_size=32, item_bytes=2)
    with using(kernel):
        layer = PagedLayer(pages, codec, block_tokens=32, head_size=32, native=packing == "native")
        assert np.array_equal(layer.read(Run([1, 0], 0, 40)), tokens)
        spans = spans_of(40, 32)
        objects = [bytearray(2 * layer.segment_bytes(span.tokens)) for span in spans]
        sums = layer.save([1, 0], spans, objects)
        if packing == "canonical":
            assert objects == packed([tokens[:, :, :32], tokens[:, :, 32:]])
        kernel_blocks[0][:4] = 0
        assert layer.load([0, 1], spans, objects, sums) is None
        assert np.array_equal(layer.read(Run([0, 1], 0, 40)), tokens)
        assert not kernel_blocks[0][2, :, 8:].any()


def test_a_codec_that_needs_a_heads_items_together_refuses_a_layout_that_parts_them() -> None:
    kind = Kind("cpu", "LBNHC", 4, 32, 2, 32)
    with pytest.raises(ConfigError, match=r"strides .* codec cpu-plain needs .*VLLM_KV_CACHE_LAYOUT"):
        kind.layer(kind.tensor(1)[1][0], "numpy")


@pytest.mark.parametrize("native_packing", [False, True])
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_every_codec_is_proven_by_its_kernel_and_by_no_other(codec: str, native_packing: bool) -> None:
    kind = Kind(codec, "LBHNC", 1 if codec == "fp8" else 2, 32, 1, 32)
    backend, isa, quantisation = CODECS[codec]
    found = find_codec(
        backend, isa, block_tokens=32, head_size=32, item_bytes=kind.item_bytes, quantisation=quantisation
    )

    def kernel_of(other: Kind) -> Any:
        def write(pages: Any, tokens: Any, slots: Sequence[int]) -> None:
            other.write(pages.reshape(*pages.shape[:2], 32, -1), tokens, slots)

        return write

    for name in CODECS:
        other = Kind(name, "LBHNC", kind.item_bytes, 32, 1, 32)
        if other.planes != kind.planes:
            continue
        size: Any = {"heads": 1, "block_tokens": 32, "head_size": 32, "dtype": np.dtype(f"u{kind.item_bytes}")}
        if name == codec or {name, codec} == {"flash", "fp8"}:
            prove(found, kernel_of(other), native=native_packing, **size)
        else:
            with pytest.raises(ConfigError, match="does not match"):
                prove(found, kernel_of(other), native=native_packing, **size)
