"""`kvrelay pool ls|purge|bench|check|config` as users call them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.pool_ops.conftest import Command, Serve, Served

    from kvrelay.testing.certificates import Authority


@pytest.fixture
def pool(serve: Serve) -> Served:
    return serve()


def test_ls_shows_keys_sizes_and_times_to_live(pool: Served, kvrelay: Command) -> None:
    with pool.connect() as client:
        client.put_many([(b"\x00\xffa", memoryview(bytes(100))), (b"zz", memoryview(bytes(4096)))])
        lines = kvrelay("pool", "ls", pool.unix).stdout.splitlines()
        assert sorted(line.split()[0] for line in lines) == ["00ff61", "7a7a"]
        assert any("100 B" in line and "sealed" in line and "dram" in line for line in lines)
        (line,) = kvrelay("pool", "ls", pool.tcp, "--prefix", "00", "--json").stdout.splitlines()
        assert json.loads(line)["key"] == "00ff61"
        assert json.loads(line)["size"] == 100
        assert len(kvrelay("pool", "ls", pool.unix, "--limit", "1").stdout.splitlines()) == 1
    wrong = kvrelay("pool", "ls", pool.unix, "--prefix", "0")
    assert wrong.returncode == 2
    assert "not hexadecimal" in wrong.stderr


def test_ls_goes_through_all_pages(pool: Served, kvrelay: Command) -> None:
    with pool.connect() as client:
        client.put_many([(b"%d" % number, memoryview(bytes(64))) for number in range(9_000)])
        assert len(kvrelay("pool", "ls", pool.unix, "--limit", "0").stdout.splitlines()) == 9_000


def test_purge_asks_first_and_spares_what_is_leased(pool: Served, kvrelay: Command) -> None:
    with pool.connect() as client:
        client.put_many([(b"a", memoryview(b"1")), (b"b", memoryview(b"2"))])
        lease = client.match_prefix([b"a"], lease_s=60)
        unasked = kvrelay("pool", "purge", pool.unix)
        assert unasked.returncode == 2
        assert "say --yes" in unasked.stderr
        done = kvrelay("pool", "purge", pool.unix, "--yes")
        assert (done.returncode, done.stdout) == (0, "1 objects forgotten, 1 kept: pinned, leased or being written\n")
        assert client.exists([b"a", b"b"]) == [True, False]
        client.release(lease)


def test_pins_are_set_and_undone_by_key_and_prefix_as_ls_shows(pool: Served, kvrelay: Command) -> None:
    keys = [b"\x00\x01", b"\x00\x02", b"\x01"]
    with pool.connect() as client:
        client.put_many([(key, memoryview(b"v")) for key in keys])

        def pinned() -> set[str]:
            lines = kvrelay("pool", "ls", pool.unix).stdout.splitlines()
            return {line.split()[0] for line in lines if line.endswith("1 pins")}

        done = kvrelay("pool", "pin", pool.unix, "--prefix", "00")
        assert (done.returncode, done.stdout) == (0, "2 objects pinned\n")
        assert pinned() == {"0001", "0002"}
        assert client.purge() == 1
        undone = kvrelay("pool", "unpin", pool.tcp, "--object", "0001", "--object", "01", "--object", "0001")
        assert (undone.returncode, undone.stdout) == (1, "1 objects unpinned\n")
        assert "1 of 2 keys are not in the pool's memory" in undone.stderr
        assert pinned() == {"0002"}
        assert kvrelay("pool", "pin", pool.unix, "--object", "0001").stdout == "1 objects pinned\n"
        assert kvrelay("pool", "unpin", pool.unix, "--prefix", "").stdout == "2 objects unpinned\n"
        assert pinned() == set()
    for words, told in (
        ((), "--object HEX"),
        (("--object", "00", "--prefix", "00"), "--object HEX"),
        (("--object", "xyz"), "--object 'xyz' is not hexadecimal"),
        (("--object", ""), "b'' is not a key"),
    ):
        wrong = kvrelay("pool", "pin", pool.unix, *words)
        assert wrong.returncode in {1, 2}
        assert told in wrong.stderr


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_bench_measures_and_leaves_nothing(pool: Served, kvrelay: Command, transport: str) -> None:
    address = pool.unix if transport == "unix" else pool.tcp
    done = kvrelay("pool", "bench", address, "--seconds", "0.3", "--object-size", "16KiB", "--batch", "16")
    assert done.returncode == 0, done.stderr
    head, _, *rows = done.stdout.splitlines()
    assert ("shared memory" if transport == "unix" else "socket") in head
    assert [row.split()[0] for row in rows] == ["put", "get", "match"]
    assert all(re.search(r"\d GB/s +[\d,]+ keys/s$", row) for row in rows[:2])
    with pool.connect() as client:
        stats = client.stat()
        assert (stats["objects"], stats["unsealed"], stats["leases"]) == (0, 0, 0)
        assert stats["sealed"] >= 16


def test_bench_that_is_interrupted_leaves_nothing(pool: Served) -> None:
    words = [sys.executable, "-m", "kvrelay", "pool", "bench", pool.unix, "--seconds", "60", "--batch", "4"]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench,
        pool.connect() as client,
    ):
        for _ in range(1_000_000):
            if client.stat()["sealed"] >= 4:
                break
        bench.send_signal(signal.SIGINT)
        assert bench.wait(30) == 130
        stats = client.stat()
        assert (stats["objects"], stats["unsealed"], stats["leases"]) == (0, 0, 0)


def test_bench_of_more_than_fits_says_what_to_change(pool: Served, kvrelay: Command) -> None:
    done = kvrelay("pool", "bench", pool.unix, "--object-size", "4MiB", "--batch", "64", "--seconds", "1")
    assert done.returncode == 2
    assert "--batch 64 of --object-size 4 MiB does not fit the pool, which has" in done.stderr
    with pool.connect() as client:
        assert client.stat()["objects"] == 0


def test_check_and_config_take_the_flags_of_serve(kvrelay: Command) -> None:
    fine = kvrelay("pool", "check", "--size", "1MiB")
    assert fine.returncode == 0
    assert re.search(r"^ok +memory +1 MiB asked for, .* available", fine.stdout, re.MULTILINE)
    bad = kvrelay("pool", "check", "--size", "100TiB")
    assert bad.returncode == 1
    assert re.search(r"^error +memory .*\n +give a smaller --size", bad.stdout, re.MULTILINE)
    shown = kvrelay("pool", "config", "--size", "1MiB", "--mlock")
    assert re.search(r"^mlock = true +# --mlock$", shown.stdout, re.MULTILINE)
    wrong = kvrelay("pool", "config", "--size", "lots")
    assert wrong.returncode == 2


def test_commands_speak_tls(serve: Serve, kvrelay: Command, authority: Authority) -> None:
    pair, client = authority.server("127.0.0.1"), authority.client("ops")
    pool = serve("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-client-ca", str(authority.ca))
    given = ("--ca", str(authority.ca), "--cert", str(client.cert), "--key", str(client.key))
    assert kvrelay("pool", "stat", pool.tcp, *given).returncode == 0
    refused = kvrelay("pool", "stat", pool.tcp, "--ca", str(authority.ca))
    assert refused.returncode == 1
    assert "give cert and key" in refused.stderr
