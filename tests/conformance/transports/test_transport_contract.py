"""What every transport does alike: docs/client.md says it, these tests hold it."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvrelay.errors import (
    BadRequestError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    PoolFullError,
)
from kvrelay.wire import limits
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.client.blocking import PoolClient
    from kvrelay.testing.paths import Blocking, Looped

    Client = Blocking | Looped

rng = random.Random(11)


def buffers(items: dict[bytes, bytes]) -> list[bytearray]:
    return [bytearray(len(data)) for data in items.values()]


def put(client: Client, items: dict[bytes, bytes]) -> bytes:
    states: bytes = client.do("put_many", list(items.items())).states
    return states


def got(client: Client, items: dict[bytes, bytes]) -> list[bytes]:
    into = buffers(items)
    count = client.do("get_many", list(items), into)
    return [bytes(data) for data in into[:count]]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4095, 4096, 4097, 65_536, 1 << 20, (9 << 20) + 7])
def test_an_object_of_any_size_comes_back_as_it_was(client: Client, size: int) -> None:
    data = rng.randbytes(size)
    client.do("put", b"k", data)
    assert client.do("get", b"k") == data
    assert got(client, {b"k": data}) == [data]


def test_objects_of_many_sizes_travel_together(client: Client) -> None:
    items = {b"%d" % n: rng.randbytes(rng.choice([1, 100, 5000, 70_000, 300_000])) for n in range(300)}
    assert put(client, items) == bytes([Stored.STORED]) * 300
    assert got(client, items) == list(items.values())
    assert client.do("exists", [*items, b"absent"]) == [*[True] * 300, False]


def test_a_batch_over_the_limits_of_a_message_is_split(client: Client) -> None:
    count = limits.MAX_KEYS + 100
    data = rng.randbytes(count * 8)
    keys = [b"%06d" % n for n in range(count)]
    tensor = np.frombuffer(data, dtype=np.uint64)
    blocks = [(key, n) for n, key in enumerate(keys)]
    assert client.do("write_cache", tensor, blocks, 1).count(Stored.STORED) == count
    target = np.zeros(count, dtype=np.uint64)
    client.do("read_cache", target, blocks, 1)
    assert (target == tensor).all()
    assert client.do("count_prefix", [*keys, b"absent"]) == (count, count, count)
    assert client.do("delete", keys) == count


def test_pages_of_a_tensor_are_written_and_read_by_elements(client: Client) -> None:
    source = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
    blocks = [(b"page %d" % n, (n * 37 % 64) * 1024) for n in range(64)]
    client.do("write_cache", source, blocks, 1024)
    target = np.zeros_like(source)
    client.do("read_cache", target, blocks, 1024)
    assert (target == source).all()
    client.do("sync")


def test_a_page_that_is_not_there_is_named(client: Client) -> None:
    source = np.arange(100, dtype=np.int16)
    client.do("write_cache", source, [(b"a", 0), (b"c", 20)], 10)
    with pytest.raises(NotFoundError, match=f"page 1 of 3, key {b'b'.hex()}"):
        client.do("read_cache", np.zeros(100, np.int16), [(b"a", 0), (b"b", 10), (b"c", 20)], 10)


def test_arrays_that_nobody_else_holds_are_written_as_they_were(client: Client) -> None:
    """Of a type whose memory is known by its address only."""
    count, items = 8, 8192
    step = items * 8
    expected = [np.full(items, n, np.int64).tobytes() for n in range(count)]
    client.do("put_many", ((b"%d" % n, np.full(items, n, "datetime64[s]")) for n in range(count)))
    assert [client.do("get", b"%d" % n) for n in range(count)] == expected
    pieces = ((n * step, np.full(items, n, "datetime64[s]")) for n in range(count))
    client.do("write_ranges", b"whole", count * step, pieces, segment_bytes=step)
    assert client.do("get", b"whole") == b"".join(expected)


def test_registered_memory_is_read_and_written_in_place(client: Client) -> None:
    source = np.frombuffer(bytearray(rng.randbytes(1 << 20)), dtype=np.uint8)
    target = np.zeros(1 << 20, dtype=np.uint8)
    for connection in getattr(client.client, "clients", [client.one]):
        connection.register_memory(source)
        connection.register_memory(target)
    blocks = [(b"%d" % n, n * 4096) for n in range(256)]
    client.do("write_cache", source, blocks, 4096)
    client.do("read_cache", target, blocks, 4096)
    assert (target == source).all()


@pytest.mark.parametrize("hole", [0, 1, 40, 99])
def test_a_get_and_a_count_end_at_the_first_hole(client: Client, hole: int) -> None:
    items = {b"%03d" % n: rng.randbytes(40_000) for n in range(100)}
    put(client, items)
    keys = list(items)
    client.do("delete", [keys[hole], keys[min(99, hole + 20)]])
    assert got(client, items) == list(items.values())[:hole]
    assert client.do("count_prefix", keys) == (hole, hole, hole)
    assert len(client.do("match_prefix", keys)) == hole
    client.do("put", keys[hole], items[keys[hole]])
    assert len(got(client, items)) == (100 if hole == 99 else min(99, hole + 20))


def test_nothing_is_there_at_first(client: Client) -> None:
    assert client.do("get", b"k") is None
    assert client.do("get_many", [b"k"], [bytearray(4)]) == 0
    assert client.do("get_many", [], []) == 0
    assert client.do("put_many", []).states == b""
    assert client.do("exists", [b"k"]) == [False]
    assert client.do("read_ranges", b"k", [(0, 1)]) is None


def test_an_object_never_changes(client: Client) -> None:
    assert client.do("put", b"k", b"first") is Stored.STORED
    assert client.do("put", b"k", b"other") is Stored.PRESENT
    assert put(client, {b"k": b"other", b"l": b"new"}) == bytes([Stored.PRESENT, Stored.STORED])
    assert client.do("get", b"k") == b"first"
    with pytest.raises(ConflictError, match="1 of 2"):
        put(client, {b"k": b"longer than before", b"m": b"stored all the same"})
    assert client.do("get", b"k") == b"first"
    assert client.do("get", b"m") == b"stored all the same"


def test_a_put_may_be_said_again(client: Client) -> None:
    items = {b"%d" % n: rng.randbytes(5000) for n in range(50)}
    assert put(client, items) == bytes(50)
    assert put(client, items) == bytes([Stored.PRESENT]) * 50
    assert got(client, items) == list(items.values())


def test_a_key_named_twice_is_stored_once(client: Client) -> None:
    states = client.do("put_many", [(b"k", b"one"), (b"k", b"two")], partly=True).states
    assert states[0] == Stored.STORED
    assert states[1] in {Stored.PRESENT, Stored.BUSY}
    assert client.do("get", b"k") == b"one"


def test_a_buffer_of_another_size_is_refused_by_number(client: Client) -> None:
    items = {b"%d" % n: rng.randbytes(1000) for n in range(20)}
    put(client, items)
    into = buffers(items)
    into[7] = bytearray(999)
    with pytest.raises(BadRequestError, match="object 7 has 1000 bytes, its buffer 999"):
        client.do("get_many", list(items), into)
    assert got(client, items) == list(items.values())


def test_keys_of_impossible_lengths_are_refused_and_the_connection_goes_on(client: Client) -> None:
    for key in (b"", bytes(limits.MAX_KEY_BYTES + 1)):
        with pytest.raises(BadRequestError):
            client.do("put", key, b"data")
        with pytest.raises(BadRequestError):
            client.do("get", key)
    client.do("put", bytes(limits.MAX_KEY_BYTES), b"data")
    assert client.do("get", bytes(limits.MAX_KEY_BYTES)) == b"data"


def test_damaged_bytes_are_an_error_and_reach_nobody_twice(client: Client, vandal: PoolClient) -> None:
    items = {b"%d" % n: rng.randbytes(5000) for n in range(20)}
    put(client, items)
    assert vandal.arena is not None
    vandal.arena[vandal.match_prefix([b"13"]).views[0].offset + 4000] ^= 1
    with pytest.raises(CorruptionError):
        client.do("get_many", list(items), buffers(items))
    assert got(client, items) == list(items.values())[:13]
    client.do("put", b"13", items[b"13"])
    assert got(client, items) == list(items.values())
    vandal.arena[vandal.match_prefix([b"3"]).views[0].offset] ^= 1
    with pytest.raises(CorruptionError):
        client.do("get", b"3")
    assert client.do("get", b"3") is None


def test_a_full_pool_stores_what_fits_and_says_so(client: Client) -> None:
    big = {b"%d" % n: rng.randbytes(12 << 20) for n in range(5)}
    put(client, big)
    leased = client.do("match_prefix", list(big), lease_s=60.0)
    assert len(leased) == 5
    with pytest.raises(PoolFullError, match="1 of 2"):
        client.do("put_many", [(b"too big", bytes(12 << 20)), (b"small", b"fits")])
    assert client.do("get", b"small") == b"fits"
    client.do("release", leased)
    client.do("put", b"too big", bytes(12 << 20))


def test_an_object_of_many_segments_is_got_whole_among_others(client: Client) -> None:
    data = rng.randbytes(4 * 4096)
    client.do("put", b"a", b"plain")
    assert not client.do("write_ranges", b"b", len(data), [(4096, data[4096:12288])], segment_bytes=4096)
    assert client.do("write_ranges", b"b", len(data), [(0, data[:4096]), (12288, data[12288:])], segment_bytes=4096)
    client.do("put", b"c", b"plain too")
    items = {b"a": b"plain", b"b": data, b"c": b"plain too", b"d": b"?"}
    assert got(client, items) == [b"plain", data, b"plain too"]
    assert client.do("get", b"b") == data
    assert client.do("read_ranges", b"b", [(4000, 200), (16_383, 1)]) == [data[4000:4200], data[-1:]]


def test_every_key_asked_for_is_counted_once(client: Client) -> None:
    """A key that is not there is one miss, and one that is one hit, of whatever size and in however many segments."""
    data = rng.randbytes(2 * 4096)
    put(client, {b"a": b"plain", b"c": bytes(300_000)})
    assert client.do("write_ranges", b"b", len(data), [(0, data)], segment_bytes=4096)

    def counted(operation: str, *asked: object) -> tuple[int, int]:
        before = client.do("stat")
        client.do(operation, *asked)
        after = client.do("stat")
        return after["hits"] - before["hits"], after["misses"] - before["misses"]

    assert counted("get", b"a") == (1, 0)
    assert counted("get", b"b") == (1, 0)
    assert counted("get", b"c") == (1, 0)
    assert counted("get", b"none") == (0, 1)
    sizes = {b"a": b"plain", b"b": data, b"c": bytes(300_000)}
    assert counted("get_many", list(sizes), buffers(sizes)) == (3, 0)
    holed = [b"a", b"none", b"b", b"c"]
    assert counted("get_many", holed, [bytearray(len(sizes.get(key, b"?"))) for key in holed]) == (1, 3)


def test_pieces_may_be_written_again_and_others_are_a_conflict(client: Client, connect: Callable[[], Client]) -> None:
    def write(who: Client, data: bytes, group: str) -> bool:
        done: bool = who.do("write_ranges", b"k", 8192, [(0, data)], segment_bytes=4096, group=group)
        return done

    other = connect()
    assert not write(client, bytes(4096), "one")
    assert not write(client, bytes(4096), "one")
    with pytest.raises(ConflictError, match="another group"):
        write(other, bytes(4096), "two")
    assert not write(other, bytes(4096), "one")
    assert client.do("get", b"k") is None
    with pytest.raises(ConflictError):
        write(client, b"\1" * 4096, "one")
    assert not write(other, b"\1" * 4096, "two")  # who contradicts itself has given the object up


@pytest.mark.parametrize("other", [b"b" * 4096, b"x" * 4096], ids=["the same bytes", "other bytes"])
def test_pieces_of_one_call_that_overlap_are_refused_and_nothing_of_them_is_written(
    client: Client, other: bytes
) -> None:
    pieces = [(8192, b"c" * 4096), (4096, other), (0, b"a" * 4096 + b"b" * 4096)]
    with pytest.raises(BadRequestError, match="pieces 2 and 1 overlap: bytes 0 to 8191 and 4096 to 8191 of the object"):
        client.do("write_ranges", b"k", 12288, pieces, segment_bytes=4096)
    assert client.do("stat")["unsealed"] == 0
    assert client.do("write_ranges", b"k", 12288, [pieces[0], pieces[2]], segment_bytes=4096)
    assert client.do("get", b"k") == b"a" * 4096 + b"b" * 4096 + b"c" * 4096


def test_pins_and_times_to_live_are_kept(client: Client) -> None:
    client.do("put", b"pinned", b"data")
    client.do("put", b"passing", b"data", ttl_s=3600.0)
    client.do("put", b"gone", b"data", ttl_s=0.001)
    assert client.do("pin", [b"pinned", b"absent"]) == 1
    assert client.do("touch", [b"passing", b"absent"], 60.0) == 1
    while client.do("exists", [b"gone"])[0]:
        pass
    listed = {info.key: info for info in client.do("list_objects", b"p")}
    assert set(listed) == {b"pinned", b"passing"}
    assert listed[b"pinned"].pins
    assert 0 < listed[b"passing"].ttl_s <= 60
    assert client.do("purge") == 1
    assert client.do("exists", [b"pinned", b"passing"]) == [True, False]
    assert client.do("unpin", [b"pinned"]) == 1
    assert client.do("purge") == 1


def test_writers_of_one_key_never_mix(connect: Callable[[], Client]) -> None:
    """Three clients put the same keys with other bytes each: every object is wholly one of them."""
    clients = [connect() for _ in range(3)]
    keys = [b"%d" % n for n in range(40)]
    versions = [{key: bytes([number]) * 50_000 for key in keys} for number in range(3)]
    states: list[bytes] = [b""] * 3

    def work(number: int) -> None:
        states[number] = put(clients[number], versions[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index, key in enumerate(keys):
        winners = [number for number in range(3) if states[number][index] == Stored.STORED]
        assert len(winners) == 1
        assert clients[0].do("get", key) == versions[winners[0]][key]
