"""A real pool process with tiers below it."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.client.core.operations import StagePart
from kvrelay.testing.pool import PoolProcess, pool_process
from kvrelay.testing.tier_media import TinyDisk
from kvrelay.transport.checksum import checksum
from kvrelay.wire.messages import Range, Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvrelay.testing.s3_server import S3Server

KIB, MIB = 1 << 10, 1 << 20
SIZE = 256 * KIB
ADMIN = ("--admin-listen", "127.0.0.1:0")


def content(number: int, size: int = SIZE) -> bytes:
    return (checksum(number.to_bytes(4, "big")).to_bytes(8, "little") * (size // 8 + 1))[:size]


def name(number: int) -> bytes:
    return b"object %d" % number


def fill(client: PoolClient, numbers: range, size: int = SIZE) -> None:
    """Store objects, a few at a time, waiting for room to be made."""
    for number in numbers:
        client.put(name(number), content(number, size))


def read_back(client: PoolClient, numbers: range, size: int = SIZE, wait_s: float = 10.0) -> list[int]:
    """The objects that are still to be had; their bytes are right."""
    found: list[int] = []
    for number in numbers:
        view = memoryview(bytearray(size))
        if client.get_many([name(number)], [view], wait_s=wait_s):
            assert view == content(number, size), f"wrong bytes for object {number}"
            found.append(number)
    return found


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait for something a pool does by and by."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def fill_slowly(client: PoolClient, count: int) -> None:
    """Store objects number 0 to ``count``, no faster than the pool copies them down: none is lost."""
    for first in range(0, count, 4):
        fill(client, range(first, min(first + 4, count)))
        until(lambda: client.stat()["free_bytes"] >= client.stat()["arena_bytes"] // 10, "room is made")


def disk(tmp_path: Path, size: str = "256MiB") -> tuple[str, ...]:
    return ("--tier", f"disk:{tmp_path / 'ssd'}:{size}")


@pytest.fixture(params=["disk", "folder", "s3"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    """Flags for a pool with one tier of each kind."""
    if request.param == "disk":
        return disk(tmp_path)
    if request.param == "folder":
        return ("--tier", f"folder:{tmp_path / 'shared'}")
    request.getfixturevalue("credentials")
    server: S3Server = request.getfixturevalue("s3_server")
    (tmp_path / "pool.toml").write_text(
        f'[[tiers]]\nkind = "s3"\nurl = "s3://{server.bucket}/{tmp_path.name}"\nendpoint = "{server.endpoint}"\n'
    )
    return ("--config", str(tmp_path / "pool.toml"))


@pytest.fixture
def pool(tmp_path: Path, options: tuple[str, ...]) -> Iterator[PoolProcess]:
    with pool_process(tmp_path, size="16MiB", options=options) as process:
        yield process


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_what_does_not_fit_in_memory_comes_back_from_below(pool: PoolProcess, transport: str) -> None:
    with PoolClient.connect(getattr(pool, transport), name="client") as client:
        fill_slowly(client, 160)
        assert client.stat()["objects"] < 70
        assert read_back(client, range(160)) == list(range(160))
        names = [name(number) for number in range(160)]
        # A lookup that a tier fails at, such as a store that is late, is a miss: all is still there for the next.
        until(lambda: client.count_prefix(names).below == 160, "all is counted below")
        assert client.stat()["corrupt"] == 0


def test_many_objects_are_read_at_once_in_the_order_asked_for(tmp_path: Path) -> None:
    with (
        pool_process(tmp_path, size="16MiB", options=disk(tmp_path)) as pool,
        PoolClient.connect(pool.unix, name="client") as client,
    ):
        fill_slowly(client, 120)
        # Forty objects fit beside each other: they are brought up by one request.
        views = [memoryview(bytearray(SIZE)) for _ in range(40)]
        assert client.get_many([name(number) for number in range(40)], views, wait_s=10) == 40
        assert all(view == content(number) for number, view in enumerate(views))
        # A prefix ends at what is nowhere, whatever is below behind it.
        client.delete([name(5)])
        assert client.get_many([name(number) for number in range(10)], views[:10], wait_s=10) == 5


def test_a_restarted_pool_finds_what_lies_on_its_disk_and_nothing_else(tmp_path: Path) -> None:
    options = disk(tmp_path)
    with (
        pool_process(tmp_path, size="16MiB", options=options) as pool,
        PoolClient.connect(pool.unix, name="c") as client,
    ):
        fill_slowly(client, 100)
        pool.kill()
    with (
        pool_process(tmp_path, size="16MiB", options=options) as pool,
        PoolClient.connect(pool.unix, name="c") as client,
    ):
        assert client.stat()["objects"] == 0
        found = read_back(client, range(100))
        assert found[:40] == list(range(40)), "what was evicted long ago was on the disk"
        fill(client, range(200, 210))
        assert read_back(client, range(200, 210)) == list(range(200, 210))


@pytest.mark.parametrize(("flags", "kept"), [(("--flush-timeout", "60"), 40), ((), 0)], ids=["flush", "no flush"])
def test_a_stop_copies_down_what_is_in_memory_only_if_it_is_given_time(
    tmp_path: Path, flags: tuple[str, ...], kept: int
) -> None:
    options = (*disk(tmp_path), *flags)
    with pool_process(tmp_path, size="16MiB", options=options) as pool:
        with PoolClient.connect(pool.unix, name="c") as client:
            fill(client, range(40))  # too few for any to be evicted
        assert pool.terminate() == 0
    with (
        pool_process(tmp_path, size="16MiB", options=options) as pool,
        PoolClient.connect(pool.unix, name="c") as client,
    ):
        assert read_back(client, range(40)) == list(range(kept))


def test_an_object_of_layers_and_segments_comes_back_as_one(tmp_path: Path) -> None:
    with (
        pool_process(tmp_path, size="16MiB", options=disk(tmp_path)) as pool,
        PoolClient.connect(pool.unix, name="writer") as writer,
        PoolClient.connect(pool.tcp, name="reader") as reader,
    ):
        spec = Spec(key=b"kv", size=64 * KIB, layers=4, segments=2)
        grant = writer.announce([spec], group="P", lease_s=30).grants[0]
        part = StagePart(grant, spec, first=0, count=8)
        (view,) = writer.stage([part])
        view[:] = content(7, 64 * KIB)
        writer.commit([part], [view])
        fill_slowly(writer, 100)
        assert reader.exists([b"kv"]) == [False]
        assert reader.prefetch([b"kv"]) == 1
        prefix = reader.match_prefix([b"kv"], lease_s=30, unsealed=True)
        assert len(prefix) == 1, "it is announced as an object being written"
        assert reader.wait(prefix, 4, timeout_s=10) == 4
        (layers,) = reader.fetch(prefix, [Range(0, 0, 8)])
        assert bytes(layers) == content(7, 64 * KIB)
        reader.release(prefix)


def test_matching_what_is_below_brings_it_up_for_the_next_one(tmp_path: Path) -> None:
    with (
        pool_process(tmp_path, size="16MiB", options=disk(tmp_path)) as pool,
        PoolClient.connect(pool.unix, name="client") as client,
    ):
        fill_slowly(client, 100)
        keys = [name(number) for number in range(8)]
        client.match_prefix(keys, lease_s=1)
        until(lambda: client.exists(keys) == [True] * 8, "what was asked for is prefetched")


def test_what_is_deleted_or_purged_does_not_come_back_from_below(tmp_path: Path) -> None:
    options = disk(tmp_path)
    with (
        pool_process(tmp_path, size="16MiB", options=options) as pool,
        PoolClient.connect(pool.unix, name="c") as client,
    ):
        fill_slowly(client, 100)
        client.delete([name(number) for number in range(10)])
        assert read_back(client, range(10), wait_s=1.0) == []
        assert read_back(client, range(10, 20)) == list(range(10, 20))
        client.put(name(3), content(333))
        assert client.get(name(3)) == content(333)
        client.purge()
        assert read_back(client, range(100), wait_s=1.0) == []
    with (
        pool_process(tmp_path, size="16MiB", options=options) as pool,
        PoolClient.connect(pool.unix, name="c") as client,
    ):
        assert read_back(client, range(100), wait_s=1.0) == []


def test_an_object_with_a_time_to_live_expires_below_too(tmp_path: Path) -> None:
    with (
        pool_process(tmp_path, size="16MiB", options=disk(tmp_path)) as pool,
        PoolClient.connect(pool.unix, name="client") as client,
    ):
        client.put(b"short", content(1), ttl_s=4.0)
        client.put(b"long", content(2), ttl_s=600.0)
        began = time.monotonic()
        fill_slowly(client, 100)
        assert client.get(b"long") == content(2)
        until(lambda: time.monotonic() > began + 6, "its time is over")
        assert client.get(b"short") is None
        assert client.get(b"long") == content(2)


# --- faults ---


def admin(pool: PoolProcess, path: str) -> Any:
    """Ask the admin API."""
    assert pool.admin is not None
    with urllib.request.urlopen(f"{pool.admin}{path}", timeout=10) as answer:
        return json.load(answer)


def test_damaged_files_are_misses_and_are_counted(tmp_path: Path) -> None:
    with (
        pool_process(tmp_path, size="16MiB", options=(*disk(tmp_path), *ADMIN)) as pool,
        PoolClient.connect(pool.unix, name="client") as client,
    ):
        fill_slowly(client, 120)
        for file in (tmp_path / "ssd").glob("region-*.kv"):
            data = bytearray(file.read_bytes())
            for at in range(100_000, len(data), 600_000):
                data[at] ^= 0x10
            file.write_bytes(data)
        found = read_back(client, range(120))  # asserts that the bytes are right
        assert 20 < len(found) < 115
        (state,) = admin(pool, "/tiers")["tiers"]
        assert state["corrupt"] >= 120 - len(found) > 5
        assert state["up"]
        fill(client, range(200, 204))
        assert read_back(client, range(200, 204)) == [200, 201, 202, 203]


def test_a_disk_that_is_full_or_goes_away_costs_misses_only(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("mounting a small file system needs root")
    tiny = TinyDisk(tmp_path / "tiny", 12 * MIB)
    try:
        options = ("--tier", f"disk:{tiny.path / 'ssd'}:64MiB")
        with (
            pool_process(tmp_path, size="16MiB", options=options) as pool,
            PoolClient.connect(pool.unix, name="client") as client,
        ):
            for first in range(0, 160, 4):
                fill(client, range(first, first + 4))
            found = read_back(client, range(160), wait_s=1.0)
            assert found
            for file in (tiny.path / "ssd").iterdir():
                file.unlink()
            fill(client, range(200, 300))
            assert read_back(client, range(290, 300), wait_s=1.0)
            assert pool.process.poll() is None
    finally:
        tiny.close()


@pytest.mark.usefixtures("credentials")
def test_without_its_object_store_a_pool_starts_and_serves_memory(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text(
        '[[tiers]]\nkind = "s3"\nurl = "s3://bucket/x"\nendpoint = "http://127.0.0.1:1"\n'
    )
    with (
        pool_process(tmp_path, size="16MiB", options=("--config", str(tmp_path / "pool.toml"))) as pool,
        PoolClient.connect(pool.unix, name="client") as client,
    ):
        fill(client, range(100))
        assert len(read_back(client, range(100), wait_s=0.5)) > 30


def test_a_second_pool_on_the_same_disk_says_why_it_does_not_start(tmp_path: Path) -> None:
    with pool_process(tmp_path, size="16MiB", options=disk(tmp_path)):
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(RuntimeError, match="did not start"):
            PoolProcess(other, size="16MiB", options=disk(tmp_path))


def test_a_slow_tier_does_not_hold_up_what_is_in_memory(tmp_path: Path) -> None:
    """A tier capped at 4 MiB/s is written to and waited for: meanwhile memory is read again and again."""
    (tmp_path / "pool.toml").write_text(
        f'[[tiers]]\nkind = "disk"\npath = "{tmp_path / "ssd"}"\nsize = "256MiB"\n'
        'read_limit = "4MiB"\nwrite_limit = "4MiB"\n'
    )
    with (
        pool_process(tmp_path, size="32MiB", options=("--config", str(tmp_path / "pool.toml"))) as pool,
        PoolClient.connect(pool.unix, name="reader") as reader,
        PoolClient.connect(pool.unix, name="writer") as writer,
        PoolClient.connect(pool.unix, name="waiter") as waiter,
    ):
        reader.put(b"hot", content(1))
        reader.pin([b"hot"])
        fill(writer, range(1_000, 1_120))
        problems: list[BaseException] = []

        def write() -> None:
            try:
                for number in range(2_000, 2_100):
                    writer.put_many([(name(number), content(number))], partly=True)
            except BaseException as error:  # noqa: BLE001 (told to the main thread)
                problems.append(error)

        def wait() -> None:
            try:
                read_back(waiter, range(1_000, 1_120), wait_s=1.0)
            except BaseException as error:  # noqa: BLE001 (told to the main thread)
                problems.append(error)

        threads = [threading.Thread(target=write), threading.Thread(target=wait)]
        for thread in threads:
            thread.start()
        num_read = 0
        while any(thread.is_alive() for thread in threads):
            assert reader.get(b"hot") is not None
            num_read += 1
        for thread in threads:
            thread.join(60)
        assert not problems
        assert num_read > 50, "reads of memory wait for the tier"
