"""kill -9 of a writer at every stage of a put: readers see whole objects or none, and nothing stays held."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.errors import PoolUnavailableError
from kvrelay.testing.amid import hook
from kvrelay.testing.paths import SHELLS, WAYS
from kvrelay.testing.pool import PoolProcess, pool_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COUNT, SIZE = 600, 100_000  # four batches
COMPLETE = {("sent", 4), ("answered", 4)}
"""Stages at which everything may have been published already."""

WRITER = """
import random, sys, time
from kvrelay.client.blocking import PoolClient

address, stage, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = PoolClient.connect(address, name="doomed")
left = at

def stop_here():
    print("there", flush=True)
    time.sleep(60)

def counted(method, after=False):
    def call(*args, **named):
        global left
        left -= 1
        if left == 0 and not after:
            stop_here()
        result = method(*args, **named)
        if left == 0 and after:
            stop_here()
        return result
    return call

if stage == "room":  # places are known, nothing is copied
    client._mover.copy_in = counted(client._mover.copy_in)
elif stage == "half copied":
    def half(blocks, arena, offsets, original=client._mover.copy_in):
        global left
        left -= 1
        if left == 0:
            original(blocks.cut(0, len(blocks) // 2), arena, offsets[: 8 * (len(blocks) // 2)])
            stop_here()
        return original(blocks, arena, offsets)
    client._mover.copy_in = half
elif stage == "sent":  # the request is on its way, its answer is not taken
    send = client._stream.send
    def sending(request, *args, **named):
        global left
        send(request, *args, **named)
        if type(request).__name__ in ("Fill", "Put"):
            left -= 1
            if left == 0:
                client._stream.flush()
                stop_here()
    client._stream.send = sending
elif stage == "answered":
    client._session.on_message = counted(client._session.on_message)

rng = random.Random(3)
client.put_many([(b"%03d" % n, rng.randbytes(SIZE)) for n in range(COUNT)])
stop_here()
""".replace("SIZE", str(SIZE)).replace("COUNT", str(COUNT))


@pytest.fixture(scope="module")
def pool_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    with pool_process(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def survivor(pool_for_all: PoolProcess) -> PoolProcess:
    with PoolClient.connect(pool_for_all.unix, name="cleaner") as client:
        client.purge()
    return pool_for_all


def items() -> dict[bytes, bytes]:
    rng = random.Random(3)
    return {b"%03d" % n: rng.randbytes(SIZE) for n in range(COUNT)}


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize(
    ("way", "stage"),
    [
        ("shm", "room"),
        ("shm", "half copied"),
        ("shm", "sent"),
        ("shm", "answered"),
        ("tcp", "sent"),
        ("tcp", "answered"),
    ],
)
def test_a_writer_killed_amid_a_put_leaves_whole_objects_or_none(
    survivor: PoolProcess, way: str, stage: str, at: int
) -> None:
    expected = items()
    address = survivor.unix if way == "shm" else survivor.tcp
    command = [sys.executable, "-c", WRITER, address, stage, str(at)]
    with PoolClient.connect(survivor.tcp, name="reader") as reader:

        def look() -> int:
            """How many objects can be read; every one is right."""
            there = [key for key, is_there in zip(expected, reader.exists(list(expected)), strict=True) if is_there]
            for key in there:
                assert reader.get(key) == expected[key]
            return len(there)

        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "there\n"
            before = look()
            assert before < COUNT or (stage, at) in COMPLETE
        finally:
            writer.kill()
            writer.wait(10)
            assert writer.stdout is not None
            writer.stdout.close()
        deadline = time.monotonic() + 10
        while any((stats := reader.stat())[name] for name in ("unsealed", "leases", "lingering_bytes")):
            assert time.monotonic() < deadline, stats
        after = look()
        assert before <= after
        assert after < COUNT or (stage, at) in COMPLETE
        assert reader.put_many(expected.items()).states.count(0) == COUNT - after  # a retry fills in what is missing
        assert look() == COUNT


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_a_pool_killed_amid_a_put_starts_again_empty_and_takes_it_whole(tmp_path: Path, way: str, at: int) -> None:
    """1. The pool is killed before a batch is copied, or its answer taken. 2. Another starts on the same path. 3. The
    put is made again.
    """
    expected = items() | {b"x" + key: data for key, data in list(items().items())[:200]}  # a batch more
    with pool_process(tmp_path, size="128MiB") as first:
        client = SHELLS["blocking"](first.unix if way == "shm" else first.tcp, WAYS[way])
        hook(client, at, first.kill)
        with pytest.raises(PoolUnavailableError):
            client.do("put_many", list(expected.items()))
        assert first.process.poll() is not None, "it was killed amid the put"
        client.close()
    with pool_process(tmp_path, size="128MiB") as second:
        client = SHELLS["blocking"](second.unix if way == "shm" else second.tcp, WAYS[way])
        assert not any(client.do("exists", list(expected)))
        assert client.do("put_many", list(expected.items())).states.count(0) == len(expected)
        into = [bytearray(SIZE) for _ in expected]
        assert client.do("get_many", list(expected), into) == len(expected)
        assert into == [*expected.values()]
        client.close()
