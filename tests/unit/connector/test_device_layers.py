"""KV on a device: byte for byte what it would be in host memory, and never before the device has come so far."""

from __future__ import annotations

import threading
from array import array
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from kvrelay.connector import device as device_module  # noqa: E402 - after the skip
from kvrelay.connector.device import DeviceLayer, Mirrors  # noqa: E402
from kvrelay.connector.pages import Objects, Span, packed_spans  # noqa: E402
from kvrelay.testing.deferred_device import DeferredCopies  # noqa: E402
from kvrelay.testing.device_cache import ORDERS, DeviceCache, prompt  # noqa: E402


def cache_of(**kind: Any) -> tuple[DeviceCache, DeferredCopies]:
    copies = DeferredCopies()
    return DeviceCache(copies, **kind), copies


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_objects_are_those_of_the_same_blocks_in_host_memory(
    order: str, item_bytes: int, kernel_blocks: int, *, native: bool
) -> None:
    cache, _ = cache_of(order=order, item_bytes=item_bytes, kernel_blocks=kernel_blocks, native=native)
    blocks, spans = [3, 9, 4, 5], prompt(101, 32)
    ours, theirs = cache.room(spans), cache.room(spans)
    sums = cache.layer.save(blocks, spans, ours)
    assert sums == cache.host.save(blocks, spans, theirs)
    assert ours == theirs
    assert cache.same, "saving writes nothing"

    into = [11, 0, 7, 2]
    assert cache.layer.load(into, spans, ours, sums) is None
    assert cache.host.load(into, spans, theirs, array("Q", sums)) is None
    assert cache.same

    buffer = b"".join(ours)
    starts = array("Q", (sum(map(len, ours[:at])) for at in range(len(ours))))
    objects = Objects(buffer, starts, sums, len(sums) // 8 // len(spans))
    for layer in (cache.layer, cache.host):
        assert layer.load_at(array("Q", reversed(into)), packed_spans(spans), objects, 0) is None
    assert cache.same


@pytest.mark.parametrize("start", [0, 1, 31, 32, 40])
@pytest.mark.parametrize("end", [65, 70, 95, 96])
def test_tokens_beside_those_that_are_loaded_stay(start: int, end: int) -> None:
    cache, _ = cache_of()
    whole = prompt(96, 48)
    objects = cache.room(whole)
    sums = cache.host.save([1, 2, 3], whole, objects)
    spans = [Span(48, max(0, start - at), min(48, end - at) - max(0, start - at), max(at, start)) for at in (0, 48)]
    assert cache.layer.load([8, 6, 10], spans, objects, sums) is None
    assert cache.host.load([8, 6, 10], spans, objects, sums) is None
    assert cache.same


def test_a_small_mirror_is_used_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, copies = cache_of()
    monkeypatch.setattr(device_module, "MIRROR_BYTES", 2 * cache.kind.block_bytes)
    cache.layer = cache.make_layer()
    blocks, spans = [3, 9, 4, 5, 7], [*prompt(96, 24), Span.whole(64, 96)]
    ours, theirs = cache.room(spans), cache.room(spans)
    sums = cache.layer.save(blocks, spans, ours)
    assert sums == cache.host.save(blocks, spans, theirs)
    assert ours == theirs
    assert max(copies.copied_blocks) == 2
    assert cache.layer.load(blocks[::-1], spans, ours, sums) is None
    assert cache.host.load(blocks[::-1], spans, ours, sums) is None
    assert cache.same


def test_an_object_larger_than_the_mirror_gets_one_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = cache_of()
    monkeypatch.setattr(device_module, "MIRROR_BYTES", cache.kind.block_bytes)
    cache.layer = cache.make_layer()
    spans = prompt(90, 90)
    ours, theirs = cache.room(spans), cache.room(spans)
    assert cache.layer.save([3, 9, 4], spans, ours) == cache.host.save([3, 9, 4], spans, theirs)
    assert ours == theirs


def test_a_damaged_object_is_named_and_its_blocks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = cache_of()
    monkeypatch.setattr(device_module, "MIRROR_BYTES", cache.kind.block_bytes)
    cache.layer = cache.make_layer()
    spans = prompt(96, 32)
    objects = cache.room(spans)
    sums = cache.layer.save([1, 2, 3], spans, objects)
    objects[1][5] ^= 1
    assert cache.layer.load([8, 6, 10], spans, objects, sums) == 1
    assert torch.equal(cache.tensor[8], cache.tensor[1])
    assert torch.equal(cache.tensor[[6, 10]], cache.theirs[[6, 10]])


def test_a_layer_is_saved_when_it_has_been_computed_and_others_need_not_have_been() -> None:
    cache, copies = cache_of()
    spans = prompt(64, 64)
    copies.step_begins()
    copies.launch(lambda: cache.tensor[3].fill_(7))
    copies.launch(lambda: cache.tensor[9].fill_(8))
    cache.layer.computed()
    copies.launch(lambda: cache.tensor[3].fill_(-1))  # the next layer's, or the next step's
    objects = cache.room(spans)
    cache.layer.save([3, 9], spans, objects)
    assert copies.reached == 2
    cache.theirs[3], cache.theirs[9] = 7, 8
    expected = cache.room(spans)
    cache.host.save([3, 9], spans, expected)
    assert objects == expected


def test_layers_saved_at_once_are_each_waited_for_and_lie_one_behind_the_other() -> None:
    cache, copies = cache_of()
    second = DeviceLayer(Mirrors(cache.layer._mirrors.kind, copies), cache.tensor.clone())
    spans = prompt(101, 32)
    copies.launch(lambda: cache.tensor[3].fill_(7))
    cache.layer.computed()
    copies.launch(lambda: second._blocks[9].fill_(8))
    second.computed()
    each = [
        (room, layer.save([3, 9, 4, 5], spans, room)) for layer in (cache.layer, second) for room in [cache.room(spans)]
    ]
    objects = [bytearray(2 * len(room)) for room in cache.room(spans)]
    sums = cache.layer.save([3, 9, 4, 5], spans, objects, [second])
    assert copies.reached == 2
    assert objects == [b"".join(room[at] for room, _ in each) for at in range(len(spans))]
    size = len(each[0][1]) // len(spans)
    assert sums == b"".join(told[size * at : size * (at + 1)] for at in range(len(spans)) for _, told in each)


def test_blocks_are_written_when_whoever_had_them_before_has_come_to_an_end() -> None:
    cache, copies = cache_of()
    spans = prompt(64, 64)
    objects = cache.room(spans)
    sums = cache.host.save([1, 2], spans, objects)
    copies.launch(lambda: cache.tensor[5].fill_(-1))  # a request that has ended, in a step that still runs
    copies.step_begins()
    assert cache.layer.load([5, 6], spans, objects, sums) is None
    assert copies.reached == 1
    copies.finish()
    assert torch.equal(cache.tensor[[5, 6]], cache.theirs[[1, 2]])


def test_threads_do_not_share_a_mirror() -> None:
    cache, _ = cache_of()
    spans = prompt(96, 48)
    wanted = cache.room(spans)
    sums = cache.host.save([1, 2, 3], spans, wanted)
    found: list[bool] = []

    def work() -> None:
        for _ in range(40):
            objects = cache.room(spans)
            found.append(cache.layer.save([1, 2, 3], spans, objects) == sums and objects == wanted)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 160
