"""Arguments of the wrong kind are named, with what is legal, whatever the transport and the shell; nothing is sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.client.blocking import PoolClient
from kvrelay.client.striped import StripedPoolClient
from kvrelay.errors import BadRequestError, LeaseExpiredError
from kvrelay.testing.pool import PoolThread
from kvrelay.wire import messages as m
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DATA = bytes(range(16))
ELEMENTS = np.zeros(16, np.float32)


def released() -> memoryview:
    view = memoryview(b"abc")
    view.release()
    return view


WHOLE: list[tuple[str, Callable[[Any], Any], str]] = [
    ("a dict", lambda c: c.put_many({b"a": b"x"}), "items = {b'a': b'x'} of type dict: legal is .* its items"),
    ("nothing", lambda c: c.put_many(None), "items = None of type NoneType: legal is a sequence of pairs of key and"),
    ("keys alone", lambda c: c.put_many([(b"a", b"x"), b"key"]), r"items\[1\] = b'key' .*: legal is a pair of key and"),
    ("three", lambda c: c.put_many([(b"a", b"b", b"c")]), r"items\[0\] = .* of type tuple: legal is a pair"),
    ("released memory", lambda c: c.put(b"a", released()), "a memoryview that was released"),
    ("one key", lambda c: c.get_many(b"k", [bytearray(16)]), "keys = b'k' of type bytes: legal is a sequence of keys"),
    ("a set of keys", lambda c: c.get_many({b"k"}, [bytearray(16)]), "keys = {b'k'} of type set: legal is a sequence"),
    ("no keys", lambda c: c.get_many(None, [bytearray(16)]), "keys = None of type NoneType"),
    ("no buffers", lambda c: c.get_many([b"k"], None), "NoneType is not a sequence of buffers"),
    ("a wait", lambda c: c.get(b"k", wait_s="1"), "a wait of '1' s: legal are 0 to 600"),
    ("a page size", lambda c: c.write_cache(ELEMENTS, [(b"a", 0)], None), "page_size = None of type NoneType: legal"),
    ("an offset", lambda c: c.write_cache(ELEMENTS, [(b"a", 0.5)], 4), "offset = 0.5 of type float: legal is a whole"),
    ("pages", lambda c: c.read_cache(bytearray(16), {b"k": 0}, 16), "blocks = {b'k': 0} of type dict"),
]
OTHER: list[tuple[str, Callable[[Any], Any], str]] = [
    ("exists", lambda c: c.exists({b"k": 1}), "keys = {b'k': 1} of type dict: legal is a sequence of keys"),
    ("count_prefix", lambda c: c.count_prefix(None), "keys = None of type NoneType"),
    ("delete", lambda c: c.delete(b"key"), "keys = b'key' of type bytes: legal is a sequence of keys"),
    ("match_prefix", lambda c: c.match_prefix({b"k"}), "keys = {b'k'} of type set"),
    ("list_objects", lambda c: c.list_objects(limit="1"), "limit = '1' of type str: legal is a whole number"),
    (
        "ranges",
        lambda c: c.read_ranges(b"k", (0, 4)),
        r"ranges\[0\] = 0 of type int: legal is a pair of offset and size",
    ),
    ("a range", lambda c: c.read_ranges(b"k", [(0, 1.5)]), "size = 1.5 of type float: legal is a whole number"),
    ("pieces", lambda c: c.write_ranges(b"r", 8, {0: b"aaaa"}, segment_bytes=4), "pieces = {0: b'aaaa'} of type dict"),
    ("a size", lambda c: c.write_ranges(b"r", "8", [(0, b"aaaa")], segment_bytes=4), "size = '8' of type str"),
    ("a piece", lambda c: c.write_ranges(b"r", 8, [("0", b"aaaa")], segment_bytes=4), "offset = '0' of type str"),
]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolThread]:
    with PoolThread(tmp_path_factory.mktemp("pool")) as pool:
        with PoolClient.connect(pool.unix, name="filler") as filler:
            filler.put(b"k", DATA)
        yield pool


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, pool: PoolThread) -> str:
    return str(getattr(pool, request.param))


@pytest.fixture
def client(address: str) -> Iterator[PoolClient]:
    with PoolClient.connect(address, name="client") as client:
        yield client
        assert client.stat()["unsealed"] == 0


@pytest.mark.parametrize(
    ("call", "told"), [case[1:] for case in WHOLE + OTHER], ids=[case[0] for case in WHOLE + OTHER]
)
def test_an_argument_of_the_wrong_kind_is_named(client: PoolClient, call: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(BadRequestError, match=told):
        call(client)
    assert client.list_objects()[0].key == b"k"


def test_every_shell_names_them_alike(address: str) -> None:
    async def with_asyncio() -> None:
        async with await AsyncPoolClient.connect(address, name="async") as client:
            for _, call, told in WHOLE + OTHER:
                with pytest.raises(BadRequestError, match=told):
                    await call(client)

    asyncio.run(with_asyncio())
    with StripedPoolClient.connect(address, name="striped", connections=2) as client:
        for _, call, told in WHOLE:
            with pytest.raises(BadRequestError, match=told):
                call(client)


def test_numbers_and_bytes_of_numpy_are_taken_as_what_they_are(client: Any) -> None:
    assert client.put(np.bytes_(b"numpy"), np.arange(4, dtype=np.int32), ttl_s=np.float32(60.0)) is Stored.STORED
    try:
        assert client.read_ranges(b"numpy", [(np.int64(4), np.int32(4))]) == [b"\1\0\0\0"]
        assert client.write_ranges(
            b"pieces", np.int64(8), [(np.int64(0), b"aaaa"), (np.uint8(4), b"bbbb")], segment_bytes=np.int16(4)
        )
        assert client.get(b"pieces", wait_s=np.float64(0.5)) == b"aaaabbbb"
        assert len(client.list_objects(limit=np.int64(2))) == 2
    finally:
        assert client.delete([b"numpy", b"pieces"]) == 2


def test_keys_may_come_from_anything_that_has_an_order(client: Any) -> None:
    """An index that does not answer, as one of a pool that is asked, must not leave a generator used up."""
    keys = [b"k", b"none"]
    assert client.exists(iter(keys)) == [True, False]
    assert client.count_prefix(key for key in keys).sealed == 1
    client._index = None
    assert client.exists(iter(keys)) == [True, False]
    assert client.count_prefix(key for key in keys).sealed == 1
    target = bytearray(16)
    assert client.get_many(iter(keys[:1]), [target]) == 1
    assert target == DATA


def test_segments_that_are_none_are_refused_and_so_are_those_of_a_prefix_that_was_released(client: PoolClient) -> None:
    prefix = client.match_prefix([b"k"], lease_s=60.0)
    client.wait(prefix, 1, timeout_s=1.0)
    for wrong in (m.Range(1, 0, 1), m.Range(-1, 0, 1), m.Range(0, -1, 1), m.Range(0, 0, 0), m.Range(0, 1, -1)):
        with pytest.raises(BadRequestError, match="legal are one or more, from 0 on, of objects 0 to 0"):
            client.fetch(prefix, [wrong])
    assert [bytes(view) for view in client.fetch(prefix, [m.Range(0, 0, 1)])] == [DATA]
    client.release(prefix)
    with pytest.raises(LeaseExpiredError, match="was released"):
        client.fetch(prefix, [m.Range(0, 0, 1)])
