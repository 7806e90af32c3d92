"""`kvrelay pool serve` from its configuration to its end, as a process."""

from __future__ import annotations

import signal
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from kvrelay.client.core.operations import StagePart
from kvrelay.errors import DrainingError, PoolUnavailableError, UnauthorizedError
from kvrelay.testing.talker import Talker
from kvrelay.wire.messages import Get, Spec

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.pool_ops.conftest import Command, Serve, Served

    from kvrelay.client.blocking import PoolClient
    from kvrelay.testing.certificates import Authority


def test_one_file_configures_tenants_tls_and_the_admin_api(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    pair = authority.server("127.0.0.1")
    for name in ("a", "b"):
        (tmp_path / f"{name}-token").write_text(f"token {name}")
    file = tmp_path / "pool.toml"
    file.write_text(
        f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n[admin]\nlisten = "127.0.0.1:0"\n'
        '[[tenants]]\nname = "a"\ntoken_file = "a-token"\nshm = true\n'
        '[[tenants]]\nname = "b"\ntoken_file = "b-token"\n'
    )
    pool = serve("--config", str(file))
    assert "tls:127.0.0.1:" in pool.ready
    assert "token required" in pool.ready
    assert pool.admin
    tls = authority.trusting()
    with pool.connect(pool.tcp, token="token a", tls=tls) as a, pool.connect(pool.tcp, token="token b", tls=tls) as b:
        a.put(b"key", b"of a")
        b.put(b"key", b"of b")
        assert (a.get(b"key"), b.get(b"key")) == (b"of a", b"of b")
        b.delete([b"key"])
        assert a.get(b"key") == b"of a"
    with pool.connect(token="token a") as trusted, pool.connect(token="token b") as other:
        assert trusted.arena is not None
        assert other.arena is None
    for token in (None, "token c"):
        with pytest.raises(UnauthorizedError):
            pool.connect(token=token)
    assert "token a" not in pool.log + pool.ready


def test_a_certificate_lets_a_tenant_in_without_a_token(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    pair = authority.server("127.0.0.1")
    file = tmp_path / "pool.toml"
    file.write_text(
        f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\nclient_ca = "{authority.ca}"\n'
        '[[tenants]]\nname = "a"\ncertificate = "engine-a"\n[[tenants]]\nname = "b"\ncertificate = "engine-b"\n'
    )
    pool = serve("--config", str(file))
    engine_a, engine_b = (authority.trusting(authority.client(name)) for name in ("engine-a", "engine-b"))
    with pool.connect(pool.tcp, tls=engine_a) as a, pool.connect(pool.tcp, tls=engine_b) as b:
        a.put(b"key", b"of a")
        assert b.exists([b"key"]) == [False]
        assert a.exists([b"key"]) == [True]
    with pytest.raises(UnauthorizedError):
        pool.connect(pool.tcp, tls=authority.trusting(authority.client("engine-c")))


def test_a_quota_bounds_what_a_tenant_holds(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    file = tmp_path / "pool.toml"
    file.write_text('[[tenants]]\nname = "a"\ntoken_file = "token"\nquota = "1MiB"\n')
    pool = serve("--config", str(file))
    with pool.connect(token="t") as client:
        for number in range(8):
            client.put(b"%d" % number, bytes(256 << 10))
        assert sum(client.exists([b"%d" % number for number in range(8)])) == 4
        assert client.stat()["evicted_for_quota"] == 4


def test_what_cannot_work_ends_it_with_status_2_and_every_problem(kvrelay: Command, serve: Serve) -> None:
    done = kvrelay("pool", "serve", "--size", "100TiB", "--numa-nodes", "77", "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert "memory: 100 TiB asked for" in done.stderr
    assert "NUMA: no node 77 here" in done.stderr
    pool = serve()
    done = kvrelay("pool", "serve", "--size", "1MiB", "--listen", f"127.0.0.1:{pool.port}")
    assert done.returncode == 2
    assert "in use" in done.stderr


def test_the_admin_port_in_use_is_told_before_the_pool_is_ready(kvrelay: Command, serve: Serve) -> None:
    pool = serve()
    listen = f"127.0.0.1:{pool.port}"
    done = kvrelay("pool", "serve", "--size", "1MiB", "--listen", "127.0.0.1:0", "--admin-listen", listen)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--admin-listen {listen}: cannot listen there: Address already in use" in done.stderr


def test_an_idle_pool_ends_at_once(serve: Serve) -> None:
    pool = serve("--drain-timeout", "600")
    with pool.connect() as client:
        client.put(b"k", b"v")
        pool.signal(signal.SIGTERM)
        assert pool.wait() == 0


def leased(pool: Served) -> tuple[PoolClient, object]:
    client = pool.connect()
    client.put(b"k", b"v")
    return client, client.match_prefix([b"k"], lease_s=60)


def until_draining(client: PoolClient) -> None:
    """Ask until the pool has heard the signal."""
    for _ in range(1_000):
        if client.stat()["draining"]:
            return
    raise AssertionError("the pool does not drain")


def test_a_draining_pool_serves_reads_refuses_writes_and_ends_with_the_last_lease(serve: Serve) -> None:
    pool = serve("--drain-timeout", "600")
    client, prefix = leased(pool)
    with client:
        pool.signal(signal.SIGTERM)
        until_draining(client)
        with pytest.raises(DrainingError):
            client.put(b"new", b"v")
        assert client.get(b"k") == b"v"
        with pool.connect(pool.tcp) as late:
            assert late.get(b"k") == b"v"
        client.release(prefix)  # type: ignore[arg-type]
        assert pool.wait() == 0
    assert "SIGTERM: no new objects are taken; 1 leases: up to 600 s" in pool.log


def test_what_is_being_written_may_be_completed_while_it_drains(serve: Serve) -> None:
    pool = serve("--drain-timeout", "600")
    with pool.connect(pool.tcp) as writer:
        spec = Spec(key=b"k", size=8, layers=1, segments=1)
        (grant,) = writer.announce([spec], group="g", lease_s=60).grants
        pool.signal(signal.SIGTERM)
        until_draining(writer)
        part = StagePart(grant, spec, first=0, count=1)
        (view,) = writer.stage([part])
        view[:] = b"complete"
        writer.commit([part], [view])
        assert pool.wait() == 0


def test_an_answer_on_its_way_is_sent_to_its_end_while_it_drains(serve: Serve) -> None:
    """1. A client asks for more than sockets hold, takes nothing. 2. The pool is told to end. 3. The client reads."""
    pool = serve("--drain-timeout", "600")
    size = 48 << 20
    with pool.connect() as client, Talker(pool.tcp) as slow:
        client.put(b"k", b"v" * size)
        slow.say(Get(2, [b"k"], size.to_bytes(8, "little")))
        assert slow.sock.recv(1, socket.MSG_PEEK)
        pool.signal(signal.SIGTERM)
        until_draining(client)
        _, payload = slow.hear()
        assert payload == b"v" * size
        assert pool.wait() == 0
    assert "1 answers on their way" in pool.log


def test_a_second_signal_ends_it_at_once(serve: Serve) -> None:
    pool = serve("--drain-timeout", "600")
    client, _ = leased(pool)
    with client:
        pool.signal(signal.SIGINT)
        until_draining(client)
        pool.signal(signal.SIGTERM)
        assert pool.wait() == 130
    assert "SIGTERM again; cut off: 1 leases" in pool.log


def test_at_its_deadline_a_drain_cuts_off_what_is_left_and_says_so(serve: Serve) -> None:
    pool = serve("--drain-timeout", "0.2")
    client, _ = leased(pool)
    with client:
        pool.signal(signal.SIGTERM)
        assert pool.wait() == 0
    assert "WARNING kvrelay.pool: cut off: 1 leases" in pool.log


def test_certificates_are_read_again_on_sighup(serve: Serve, tmp_path: Path) -> None:
    from kvrelay.testing.certificates import Authority

    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    cert, key = tmp_path / "pool.pem", tmp_path / "pool.key"

    def install(authority: Authority) -> None:
        pair = authority.server("127.0.0.1")
        cert.write_bytes(pair.cert.read_bytes())
        key.write_bytes(pair.key.read_bytes())

    install(old)
    pool = serve("--tls-cert", str(cert), "--tls-key", str(key))
    with pool.connect(pool.tcp, tls=old.trusting()) as before:
        with pytest.raises(PoolUnavailableError, match="not accepted"):
            pool.connect(pool.tcp, tls=new.trusting())
        install(new)
        pool.signal(signal.SIGHUP)
        with pool.connect() as same_host:  # served after the signal was
            same_host.stat()
        with pool.connect(pool.tcp, tls=new.trusting()) as after:
            after.put(b"k", b"v")
        assert before.get(b"k") == b"v"
        cert.write_text("nonsense")
        pool.signal(signal.SIGHUP)
        with pool.connect() as same_host:
            same_host.stat()
        with pool.connect(pool.tcp, tls=new.trusting()) as still:
            assert still.get(b"k") == b"v"
    assert "the new certificates cannot be used, and the old ones stay" in pool.log


def test_a_wait_ends_when_a_draining_pool_does(serve: Serve) -> None:
    pool = serve("--drain-timeout", "0.3")
    with pool.connect() as client:
        client.open_ticket("t", 60.0)
        told: list[Exception] = []

        def collect() -> None:
            try:
                client.collect("t", 30.0)
            except PoolUnavailableError as error:
                told.append(error)

        thread = threading.Thread(target=collect)
        thread.start()
        pool.signal(signal.SIGTERM)
        assert pool.wait() == 0
        thread.join(10)
        assert told
