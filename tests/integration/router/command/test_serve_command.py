"""``kvrelay router serve`` as a process, in front of fake engines that are processes too."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from kvrelay.testing.certificates import Authority
from kvrelay.testing.pool import PoolThread
from kvrelay.testing.router_processes import WAIT_S, ask
from kvrelay.transport.certificates import server_context

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.testing.router_processes import Processes


def lines_of(path: Path, count: int) -> list[dict[str, str]]:
    """Wait until there are so many."""
    deadline = time.monotonic() + WAIT_S
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < deadline, "no more lines"
        time.sleep(0.02)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_serves_and_ends_in_order(processes: Processes) -> None:
    router, url = processes.router()
    assert ask(url).startswith("ho-")
    router.send_signal(signal.SIGTERM)
    assert router.wait(WAIT_S) == 0


def test_it_protects_hand_overs_in_a_pool_over_tls(processes: Processes, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.server("127.0.0.1")
    with PoolThread(tmp_path, token="secret", tls=server_context(pair.cert, pair.key)) as pool:
        token = tmp_path / "token"
        token.write_text("secret")
        given = ("--pool-token-file", str(token), "--ticket-timeout", "10", "--log-level", "debug")
        _, url = processes.router("--pool", f"{pool.tcp}?ca={authority.ca}", *given)
        ask(url)
        told = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
        assert "kvrelay_router_pool_up 1.0" in told
        assert 'reason="no_ticket"' not in told


def test_sighup_opens_the_access_log_again_and_the_router_goes_on(processes: Processes, tmp_path: Path) -> None:
    """1. logrotate renames the file. 2. It sends SIGHUP. 3. What comes then is in a new file."""
    log = tmp_path / "access.log"
    router, url = processes.router("--access-log", str(log))
    first = ask(url)
    lines_of(log, 1)
    old = log.rename(tmp_path / "access.log.1")
    router.send_signal(signal.SIGHUP)
    lines_of(log, 0)
    second = ask(url)
    assert [line["handover"] for line in lines_of(log, 1)] == [second]
    assert [line["handover"] for line in lines_of(old, 1)] == [first]


def test_workers_write_one_access_log_and_open_it_again_together(processes: Processes, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    router, url = processes.router("--workers", "2", "--access-log", str(log))
    first = {ask(url) for _ in range(6)}
    assert {line["handover"] for line in lines_of(log, 6)} == first
    old = log.rename(tmp_path / "access.log.1")
    router.send_signal(signal.SIGHUP)
    lines_of(log, 0)
    deadline = time.monotonic() + WAIT_S
    second: set[str] = set()
    while not log.read_text():  # until then one of them may not have heard
        assert time.monotonic() < deadline
        second.add(ask(url))
        time.sleep(0.05)
    written = {line["handover"] for file in (old, log) for line in lines_of(file, 0)}
    assert first <= written <= first | second


def test_the_access_log_may_be_standard_output(processes: Processes) -> None:
    router, url = processes.router("--access-log", "-")
    handover = ask(url)
    assert router.stdout is not None
    assert json.loads(router.stdout.readline())["handover"] == handover


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--access-log", "/no/such/folder/log"], "--access-log /no/such/folder/log cannot be written"),
        (["--otlp-endpoint", "collector"], "--otlp-endpoint 'collector' is not a URL"),
        (["--drop-header", "content-type"], "--drop-header content-type: engines cannot read a request without it"),
    ],
)
def test_settings_that_cannot_be_end_it_at_once(args: list[str], said: str) -> None:
    command = [sys.executable, "-m", "kvrelay", "router", "serve", "--prefill", "http://h:1", "--decode", "http://h:2"]
    ended = subprocess.run(
        [*command, "--port", "0", *args], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ended.returncode == 2
    assert said in ended.stderr
