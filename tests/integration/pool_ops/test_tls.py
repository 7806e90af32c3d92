"""TLS between a pool and its clients: bytes, certificates, and everybody who gets it wrong."""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.client.blocking import PoolClient
from kvrelay.errors import BadRequestError, PoolUnavailableError
from kvrelay.pool import handshakes
from kvrelay.testing.certificates import Authority
from kvrelay.testing.pool import PoolThread
from kvrelay.transport.address import parse_address
from kvrelay.transport.certificates import server_context

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def pool(authority: Authority, tmp_path: Path) -> Iterator[PoolThread]:
    pair = authority.server("localhost", "127.0.0.1")
    with PoolThread(tmp_path, size=64 << 20, tls=server_context(pair.cert, pair.key)) as running:
        yield running
    running.server.core.check_integrity()


@pytest.fixture
def mtls_pool(authority: Authority, tmp_path: Path) -> Iterator[PoolThread]:
    pair = authority.server("127.0.0.1")
    with PoolThread(tmp_path, tls=server_context(pair.cert, pair.key, authority.ca)) as running:
        yield running


def test_objects_of_all_sizes_go_there_and_back(pool: PoolThread, authority: Authority) -> None:
    sizes = (1, 100, 16 << 10, (16 << 10) + 1, 65_537, 1 << 20, 12 << 20)
    with PoolClient.connect(pool.tcp, name="test", tls=authority.trusting()) as client:
        for size in sizes:
            client.put(b"%d" % size, random.Random(size).randbytes(size))
        for size in sizes:
            assert client.get(b"%d" % size) == random.Random(size).randbytes(size)


def test_the_address_may_carry_the_authority(pool: PoolThread, authority: Authority) -> None:
    with PoolClient.connect(f"{pool.tcp}?ca={authority.ca}", name="test") as client:
        assert client.exists([b"nothing"]) == [False]


async def test_many_tasks_share_one_connection(pool: PoolThread, authority: Authority) -> None:
    data = {b"%d" % number: random.Random(number).randbytes(300_000 + number) for number in range(24)}
    async with await AsyncPoolClient.connect(pool.tcp, name="test", tls=authority.trusting()) as client:
        await asyncio.gather(*(client.put(key, value) for key, value in data.items()))
        assert await asyncio.gather(*(client.get(key) for key in data)) == list(data.values())


async def test_a_client_that_shows_its_certificate_is_let_in(mtls_pool: PoolThread, authority: Authority) -> None:
    tls = authority.trusting(authority.client("engine"))
    with PoolClient.connect(mtls_pool.tcp, name="test", tls=tls) as client:
        client.put(b"k", b"v")
    async with await AsyncPoolClient.connect(mtls_pool.tcp, name="test", tls=tls) as other:
        assert await other.get(b"k") == b"v"


def test_a_client_without_one_is_refused_and_told_what_to_give(mtls_pool: PoolThread, authority: Authority) -> None:
    with pytest.raises(PoolUnavailableError, match="asks its clients for a certificate: give cert and key"):
        PoolClient.connect(mtls_pool.tcp, name="test", tls=authority.trusting())


def test_a_client_with_anothers_certificate_is_refused(
    mtls_pool: PoolThread, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger").client("engine")
    with pytest.raises(PoolUnavailableError, match=r"certificate|closed the connection"):
        PoolClient.connect(mtls_pool.tcp, name="test", tls=authority.trusting(stranger))


def test_a_pool_whose_authority_is_unknown_is_not_trusted(pool: PoolThread, tmp_path: Path) -> None:
    with pytest.raises(PoolUnavailableError, match="give the ca that signed it"):
        PoolClient.connect(pool.tcp, name="test", tls=Authority(tmp_path, "other").trusting())


def test_a_pool_of_another_name_is_not_trusted(pool: PoolThread, authority: Authority) -> None:
    tls = authority.trusting(server_name="elsewhere.test")
    with pytest.raises(PoolUnavailableError, match=r"mismatch.*connect to a name or address that it names"):
        PoolClient.connect(pool.tcp, name="test", tls=tls)


class Heard(logging.Handler):
    """What the pool's thread logs, as it comes."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put(record.getMessage())


def test_who_speaks_plainly_to_a_tls_port_is_closed_and_logged(
    pool: PoolThread, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    logger, heard = logging.getLogger("kvrelay.pool"), Heard()
    logger.addHandler(heard)
    try:
        with caplog.at_level(logging.INFO, "kvrelay.pool"):
            with pytest.raises(PoolUnavailableError):
                PoolClient.connect(pool.tcp.replace("tls:", "tcp:"), name="plain")
            assert "does not speak TLS: connect with tls:HOST:PORT" in heard.lines.get(timeout=30)
    finally:
        logger.removeHandler(heard)
    with PoolClient.connect(pool.tcp, name="test", tls=authority.trusting()) as client:
        assert client.exists([b"k"]) == [False]


def test_who_says_nothing_keeps_nobody_out(
    pool: PoolThread, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 3600.0)
    with ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(socket.create_connection(("127.0.0.1", parse_address(pool.tcp).port)))
        with PoolClient.connect(pool.tcp, name="test", tls=authority.trusting()) as client:
            client.put(b"k", b"v")


def test_tls_to_a_port_without_it_says_so(tmp_path: Path, authority: Authority) -> None:
    with PoolThread(tmp_path) as plain, pytest.raises(PoolUnavailableError, match="use tcp:HOST:PORT"):
        PoolClient.connect(plain.tcp.replace("tcp:", "tls:"), name="test", tls=authority.trusting())


async def test_no_tls_to_a_port_with_it_says_so(pool: PoolThread) -> None:
    clear = pool.tcp.replace("tls:", "tcp:")
    with pytest.raises(PoolUnavailableError, match="if it serves with TLS, use tls:HOST:PORT"):
        await AsyncPoolClient.connect(clear, name="test")
    with pytest.raises(PoolUnavailableError, match="if it serves with TLS, use tls:HOST:PORT"):
        PoolClient.connect(clear, name="test")


def test_certificates_for_an_address_without_tls_are_refused(authority: Authority) -> None:
    with pytest.raises(BadRequestError, match="use tls:HOST:PORT"):
        PoolClient.connect("tcp:127.0.0.1:1", name="test", tls=authority.trusting())
