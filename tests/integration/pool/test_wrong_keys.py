"""What is no key is named, with what is legal, by every call that takes keys."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.client.blocking import PoolClient
from kvrelay.client.striped import AsyncStripedPoolClient, StripedPoolClient
from kvrelay.errors import BadRequestError
from kvrelay.testing.pool import PoolThread
from kvrelay.wire import limits
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WRONG: list[tuple[Any, str]] = [
    ("a name", "'a name' of type str"),
    ("\ud800", "'\\ud800' of type str"),
    (b"", "b''"),
    (b"k" * 65, "of 65 bytes"),
    (b"k" * (5 << 20), "of 5242880 bytes"),
    (7, "7 of type int"),
    (1 << 70, "of type int"),
    (None, "None of type NoneType"),
    (object(), "of type object"),
    (("k", 1), "('k', 1) of type tuple"),
]
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "put": lambda client, key: client.put(key, b"v"),
    "get": lambda client, key: client.get(key),
    "put_many": lambda client, key: client.put_many([(b"k", b"v"), (key, b"v")]),
    "get_many": lambda client, key: client.get_many([b"k", key], [bytearray(1), bytearray(1)]),
    "write_cache": lambda client, key: client.write_cache(bytes(8), [(b"page", 0), (key, 4)], 4),
    "read_cache": lambda client, key: client.read_cache(bytearray(8), [(b"page", 0), (key, 4)], 4),
}
OF_NAMES: dict[str, Callable[[Any, Any], Any]] = {
    "exists": lambda client, key: client.exists([b"k", key]),
    "count_prefix": lambda client, key: client.count_prefix([b"k", key]),
    "delete": lambda client, key: client.delete([b"other", key]),
    "pin": lambda client, key: client.pin([b"k", key]),
    "unpin": lambda client, key: client.unpin([b"k", key]),
    "touch": lambda client, key: client.touch([b"k", key], 60.0),
    "prefetch": lambda client, key: client.prefetch([b"k", key]),
    "match_prefix": lambda client, key: client.match_prefix([b"k", key]),
    "read_ranges": lambda client, key: client.read_ranges(key, [(0, 1)]),
    "write_ranges": lambda client, key: client.write_ranges(key, 4, [(0, bytes(4))], segment_bytes=4),
}


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[str]:
    with PoolThread(tmp_path) as pool, PoolClient.connect(pool.unix, name="filler") as filler:
        assert filler.put(b"k", b"v") is Stored.STORED
        filler.write_cache(bytes(8), [(b"page", 0)], 4)
        yield pool.unix if request.param == "unix" else pool.tcp


async def refused(call: Callable[[Any, Any], Any], client: Any, key: Any) -> str:
    async def asked() -> None:
        answer = call(client, key)
        if inspect.isawaitable(answer):
            await answer

    with pytest.raises(BadRequestError) as caught:
        await asked()
    return str(caught.value)


async def try_all(client: Any, calls: dict[str, Callable[[Any, Any], Any]]) -> None:
    for name, call in calls.items():
        for key, told in WRONG:
            said = await refused(call, client, key)
            assert told in said, name
            assert "a key is 1 to 64 bytes" in said, name
            assert len(said) < 200, name


async def test_blocking(address: str) -> None:
    with PoolClient.connect(address, name="c") as client:
        await try_all(client, CALLS | OF_NAMES)
        assert client.get(b"k") == b"v", "the connection goes on"
        client.sync()


async def test_asynchronous(address: str) -> None:
    async with await AsyncPoolClient.connect(address, name="c") as client:
        await try_all(client, CALLS | OF_NAMES)
        assert await client.get(b"k") == b"v"


async def test_over_several_connections(address: str) -> None:
    with StripedPoolClient.connect(address, connections=2, name="c") as client:
        await try_all(client, CALLS)
    async with await AsyncStripedPoolClient.connect(address, connections=2, name="c") as several:
        await try_all(several, CALLS)


async def test_a_prefix_to_list_may_be_empty_and_nothing_else_than_a_key(address: str) -> None:
    with PoolClient.connect(address, name="c") as client:
        assert len(client.list_objects(b"")) == 2
        for key, told in WRONG:
            if key != b"":
                said = await refused(lambda client, key: client.list_objects(key), client, key)
                assert told in said
                assert "is not a prefix of keys: a key is 1 to 64 bytes" in said


def test_more_keys_than_one_lease_takes_are_counted(address: str) -> None:
    with (
        PoolClient.connect(address, name="c") as client,
        pytest.raises(BadRequestError, match=f"20000 keys in one request: at most {limits.MAX_KEYS}"),
    ):
        client.match_prefix([b"k"] * 20_000)


def test_bytes_given_for_a_list_of_keys_are_no_keys(address: str) -> None:
    with (
        PoolClient.connect(address, name="c") as client,
        pytest.raises(BadRequestError, match="keys = b'k' of type bytes: legal is a sequence"),
    ):
        client.delete(b"k")  # type: ignore[arg-type]


def test_other_errors_stay_what_they_are(address: str) -> None:
    with (
        PoolClient.connect(address, name="c") as client,
        pytest.raises(BadRequestError, match="object 0 has 1 bytes, its buffer 2"),
    ):
        client.get_many([b"k"], [bytearray(2)])


def test_a_field_out_of_its_bounds_is_named_with_its_value(address: str) -> None:
    with PoolClient.connect(address, name="c") as client:
        for call, told in (
            (lambda: client.touch([b"k"], -1.0), r"ttl_s = -1.0: legal is `float` >= 0.0"),
            (lambda: client.put(b"new", b"v", ttl_s=math.nan), r"ttl_s = nan: legal is `float` >= 0.0"),
            (lambda: client.match_prefix([b"k"], lease_s=math.inf), r"lease_s = inf: legal is `float` <= 3600.0"),
            (lambda: client.open_ticket("", 1.0), r"ticket = '': legal is `str` of length >= 1"),
            (lambda: client.get(b"absent", wait_s=math.nan), r"a wait of nan s: legal are 0 to 600"),
            (lambda: client.get(b"absent", wait_s=1e12), r"a wait of 1000000000000.0 s: legal are 0 to 600"),
            (lambda: client.collect("t", -1), r"a wait of -1 s"),
        ):
            with pytest.raises(BadRequestError, match=told):
                call()
        assert client.get(b"k") == b"v"


async def test_a_wait_out_of_its_bounds_is_refused_in_a_loop_too(address: str) -> None:
    async with await AsyncPoolClient.connect(address, name="c") as client:
        with pytest.raises(BadRequestError, match="a wait of nan s"):
            await client.get(b"absent", wait_s=math.nan)
        assert await client.get(b"k") == b"v"
