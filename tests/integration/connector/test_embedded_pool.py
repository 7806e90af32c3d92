"""A pool that an engine runs: it serves, it comes back, and it never outlives the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.connector.config import parse_extra_config
from kvrelay.connector.embedded import EmbeddedPool, serve_arguments
from kvrelay.errors import ConfigError, PoolUnavailableError
from kvrelay.launch.kernel import descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEADLINE_S = 30.0
ENGINE = """\
import sys, time
from kvrelay.connector.embedded import EmbeddedPool
EmbeddedPool(sys.argv[1:]).start()
print("serving", flush=True)
time.sleep(600)
"""


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return str(tmp_path / "p.sock")


def arguments(socket_path: str, size: str = "4MiB") -> list[str]:
    return serve_arguments(parse_extra_config({"pool": f"unix:{socket_path}", "embedded_pool": size}, "P0"))


@pytest.fixture
def pool(socket_path: str) -> Iterator[EmbeddedPool]:
    embedded = EmbeddedPool(arguments(socket_path))
    embedded.start()
    yield embedded
    embedded.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def serves(socket_path: str) -> bool:
    try:
        with PoolClient.connect(f"unix:{socket_path}", name="test", map_arena=False) as client:
            return client.stat()["tickets"] == 0
    except PoolUnavailableError:
        return False


def pools(socket_path: str) -> set[int]:
    """Processes below this one that serve there; other tests may have left it others."""
    found = set()
    for child in descendants(os.getpid()):
        with suppress(OSError):  # it has ended
            if socket_path.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(child)
    return found


def test_it_serves_when_start_returns_and_is_gone_when_close_does(socket_path: str) -> None:
    embedded = EmbeddedPool(arguments(socket_path))
    embedded.start()
    assert serves(socket_path)
    embedded.close()
    assert not serves(socket_path)
    assert not pools(socket_path)


@pytest.mark.usefixtures("pool")
def test_a_pool_that_was_killed_is_started_again(socket_path: str) -> None:
    (child,) = pools(socket_path)
    os.kill(child, signal.SIGKILL)
    until(lambda: bool(pools(socket_path) - {child}) and serves(socket_path), "another pool")


def test_a_pool_dies_with_an_engine_that_is_killed(socket_path: str) -> None:
    """1. The engine runs a pool. 2. kill -9 hits the engine, which can clean nothing up. 3. The pool is gone."""
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, *arguments(socket_path)], stdout=subprocess.PIPE, text=True
    )
    with engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "serving\n"
        (child,) = descendants(engine.pid)
        engine.kill()
    until(lambda: not Path(f"/proc/{child}").exists(), "the pool's end")
    assert not serves(socket_path)


def test_a_pool_that_cannot_start_refuses_the_engine(socket_path: str) -> None:
    with pytest.raises(ConfigError, match="the embedded pool did not start"):
        EmbeddedPool(arguments(socket_path, size="1KiB")).start()
    assert not pools(socket_path)


def test_it_listens_where_the_engines_configuration_says() -> None:
    unix = {"pool": "unix:/run/p.sock", "embedded_pool": "4GiB"}
    assert serve_arguments(parse_extra_config(unix, "P0")) == [
        *("--listen", "none", "--size", "4GiB", "--unix", "/run/p.sock"),
    ]
    both = {**unix, "embedded_listen": "10.0.0.1:7000", "token_file": "/run/token"}
    assert serve_arguments(parse_extra_config(both, "P0")) == [
        *("--listen", "10.0.0.1:7000", "--size", "4GiB", "--unix", "/run/p.sock", "--token-file", "/run/token"),
    ]
    tcp = {"pool": "tcp:127.0.0.1:7000", "embedded_pool": "4GiB"}
    assert serve_arguments(parse_extra_config(tcp, "P0")) == ["--listen", "127.0.0.1:7000", "--size", "4GiB"]
