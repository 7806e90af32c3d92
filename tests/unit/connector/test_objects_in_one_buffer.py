"""Segments of objects that lie somewhere in one buffer, as in an arena: natively and in NumPy, as if each lay alone."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import BadRequestError
from kvrelay.native import native

np = pytest.importorskip("numpy")

from kvrelay.connector import pages as pages_module  # noqa: E402 - after the skip
from kvrelay.connector.codec import find_codec  # noqa: E402
from kvrelay.connector.layout import PagedLayer  # noqa: E402
from kvrelay.connector.pages import Objects, Span, packed_spans  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

KERNELS = ("numpy",) if native is None else (*native.KERNELS, "numpy")
LAYERS, BLOCKS, HEADS, BLOCK, DIMS = 3, 12, 2, 32, 32
TOKENS = 70
SPANS = [Span.whole(min(32, TOKENS - at), at) for at in range(0, TOKENS, 32)]
SAVED, LOADED = [4, 0, 2], [11, 5, 6]


@pytest.fixture(params=KERNELS, autouse=True)
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "numpy":
        monkeypatch.setattr(pages_module, "native", None)
    elif native is not None:
        native.use_kernel(request.param)
    yield
    if native is not None:
        native.use_kernel(native.KERNELS[0])


class Prompt:
    """A prompt's KV in a cache's blocks, and as whole objects of all layers in one buffer, with gaps between them."""

    def __init__(self, packing: str, seed: int = 1) -> None:
        shape = (LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIMS)
        self.cache = np.random.default_rng(seed).integers(0, 1 << 32, shape, dtype=np.uint32)
        codec = find_codec("CPU_ATTN", "vec", block_tokens=BLOCK, head_size=DIMS, item_bytes=4)
        self.layers = [
            PagedLayer(pages, codec, block_tokens=BLOCK, head_size=DIMS, native=packing == "native")
            for pages in self.cache
        ]
        sizes = [self.layers[0].segment_bytes(span.tokens) for span in SPANS]
        starts = [64 + sum(LAYERS * HEADS * size + 192 for size in sizes[:at]) for at in range(len(sizes))]
        self.source = bytearray(starts[-1] + LAYERS * HEADS * sizes[-1])
        self.sums = np.zeros((len(SPANS), LAYERS * HEADS), np.uint64)
        self.parts: list[list[memoryview]] = []
        for at, layer in enumerate(self.layers):
            first = at * HEADS
            views = [
                memoryview(self.source)[start + first * size : start + (first + HEADS) * size]
                for start, size in zip(starts, sizes, strict=True)
            ]
            told = np.frombuffer(layer.save(SAVED, SPANS, views), np.uint64).reshape(-1, HEADS)
            self.sums[:, first : first + HEADS] = told
            self.parts.append(views)
        self.offsets = array("Q", starts)

    @property
    def objects(self) -> Objects:
        return Objects(self.source, self.offsets, self.sums.tobytes(), LAYERS * HEADS)

    def load(
        self, layer: int, objects: Objects | None = None, *, first: int | None = None, **changed: Any
    ) -> int | None:
        spans = changed.get("spans", SPANS)
        return self.layers[layer].load_at(
            array("Q", changed.get("blocks", LOADED)),
            packed_spans(spans),
            objects or self.objects,
            layer * HEADS if first is None else first,
        )


@pytest.mark.parametrize("packing", ["canonical", "native"])
def test_each_layer_finds_its_own_segments_and_writes_no_other_slot(packing: str) -> None:
    ours, theirs = Prompt(packing), Prompt(packing)
    for at, layer in enumerate(theirs.layers):
        told = theirs.sums[:, at * HEADS : (at + 1) * HEADS].tobytes()
        assert layer.load(LOADED, SPANS, theirs.parts[at], told) is None
        assert ours.load(at) is None
    assert np.array_equal(ours.cache, theirs.cache)
    assert np.array_equal(ours.cache[:, LOADED[:2]], ours.cache[:, SAVED[:2]])


@pytest.mark.parametrize("packing", ["canonical", "native"])
def test_of_a_part_of_the_tokens_no_other_slot_is_written(packing: str) -> None:
    prompt = Prompt(packing)
    before = prompt.cache.copy()
    spans = [Span(32, 32, 0, 0), Span(32, 0, 32, 0), Span(6, 0, 3, 32)]
    assert prompt.load(1, spans=spans, blocks=LOADED[:2]) is None
    changed = np.argwhere((prompt.cache != before).any(axis=(2, 3, 4)))
    assert {tuple(one) for one in changed.tolist()} == {(1, LOADED[0]), (1, LOADED[1])}


@pytest.mark.parametrize("packing", ["canonical", "native"])
def test_a_wrong_bit_is_found_in_the_segments_that_are_loaded_and_in_no_others(packing: str) -> None:
    prompt = Prompt(packing)
    prompt.parts[1][2][-1] ^= 4
    assert [prompt.load(layer) for layer in range(LAYERS)] == [None, 2, None]
    prompt.parts[1][0][0] ^= 1
    assert [prompt.load(layer) for layer in range(LAYERS)] == [None, 0, None]


@pytest.mark.parametrize(
    ("at", "offset"), [(2, 1 << 40), (2, (1 << 64) - 64), (0, None)], ids=["beyond", "around", "into the end"]
)
def test_an_object_that_reaches_beyond_the_buffer_is_refused_before_a_byte_moves(at: int, offset: int | None) -> None:
    prompt = Prompt("canonical")
    before = prompt.cache.copy()
    prompt.offsets[at] = (
        len(prompt.source) - 2 * HEADS * prompt.layers[0].segment_bytes(32) if offset is None else offset
    )
    with pytest.raises(BadRequestError, match="bytes"):
        prompt.load(2)
    assert np.array_equal(prompt.cache, before)


def test_what_does_not_fit_together_is_refused() -> None:
    prompt = Prompt("canonical")
    whole = prompt.objects
    for first in (-1, LAYERS * HEADS - HEADS + 1, LAYERS * HEADS):
        with pytest.raises(BadRequestError, match="segments"):
            prompt.load(0, first=first)
    for wrong in (
        whole._replace(offsets=prompt.offsets[:2]),
        whole._replace(sums=bytes(whole.sums)[8:]),
        whole._replace(segments=LAYERS * HEADS + 1),
    ):
        with pytest.raises(BadRequestError, match=r"spans|checksums"):
            prompt.load(0, wrong)
