"""One blocking client, several threads: every call gets its own answer, whoever moves the bytes."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest

from kvrelay.errors import PoolUnavailableError
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.client.blocking import PoolClient


def in_threads(count: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_threads_share_a_connection_and_each_gets_its_own_answers(client: PoolClient) -> None:
    def work(number: int) -> None:
        local = random.Random(number)
        for turn in range(15):
            items = {b"%d %d %d" % (number, turn, n): local.randbytes(local.randrange(1, 60_000)) for n in range(8)}
            assert client.put_many(items.items()).states == bytes(8)
            into = [bytearray(len(data)) for data in items.values()]
            assert client.get_many(list(items), into) == 8
            assert into == list(items.values())
            assert client.exists([*items, b"absent"]) == [*[True] * 8, False]
            assert client.read_ranges(next(iter(items)), [(0, 1)]) == [items[next(iter(items))][:1]]
            assert client.delete(list(items)) == 8

    in_threads(6, work)
    stats = client.stat()
    assert (stats["leases"], stats["unsealed"]) == (0, 0)


def test_a_thread_that_waits_long_holds_up_no_other(client: PoolClient) -> None:
    client.open_ticket("t", 30.0)
    notes: list[bytes] = []
    waiting = threading.Thread(target=lambda: notes.extend(client.collect("t", 20.0)))
    waiting.start()
    for number in range(200):
        assert client.exists([b"%d" % number]) == [False]
    client.put(b"big", bytes(3 << 20))
    assert client.get(b"big") == bytes(3 << 20)
    client.post("t", b"now")
    waiting.join(10)
    assert notes == [b"now"]


def test_a_poll_takes_nothing_from_the_thread_that_waits(client: PoolClient) -> None:
    client.open_ticket("t", 30.0)
    slow = client.start(m.Collect(0, "t", 20.0), m.Notes)
    notes: list[m.Reply] = []
    waiting = threading.Thread(target=lambda: notes.append(slow.result(20.0)))
    waiting.start()

    def work(_number: int) -> None:
        for _ in range(50):
            quick = client.start(m.Exists(0, [b"k"]), m.Existing)
            while not quick.poll():
                pass
            assert quick.result(1.0) == m.Existing(quick.number, [False])

    in_threads(3, work)
    client.post("t", b"note")
    waiting.join(10)
    assert notes == [m.Notes(slow.number, [b"note"])]


def test_closing_a_client_ends_every_threads_wait(client: PoolClient) -> None:
    client.open_ticket("t", 30.0)
    errors: list[PoolUnavailableError] = []
    begun = threading.Barrier(4)

    def wait() -> None:
        call = client.start(m.Collect(0, "t", 25.0), m.Notes)
        begun.wait(10)
        try:
            call.result(25.0)
        except PoolUnavailableError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait(10)
    client.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(errors) == 3


@pytest.mark.parametrize("what", ["put", "get"])
def test_an_interrupted_call_closes_the_connection(client: PoolClient, what: str) -> None:
    """Ctrl-C arrives while answers are taken: nothing may move through the caller's memory afterwards."""
    client.put(b"k", bytes(1000))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    client._session.on_message = interrupt  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        client.put(b"l", bytes(1000)) if what == "put" else client.get_many([b"k"], [bytearray(1000)])
    assert client.closed
    with pytest.raises(PoolUnavailableError):
        client.stat()
