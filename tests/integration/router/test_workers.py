"""``kvrelay router serve --workers``: several processes behind one port."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 30
OK = 'kvrelay_router_requests_total{endpoint="/v1/completions",outcome="ok"}'


@pytest.fixture
def no_blocking() -> None:
    """These tests are blocking ones, without an event loop."""


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=WAIT_S)


def start(processes: list[subprocess.Popen[str]], *args: str) -> tuple[subprocess.Popen[str], str]:
    """A process and its first line, which it prints when it is ready."""
    process = subprocess.Popen([sys.executable, "-m", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes.append(process)
    assert process.stdout is not None
    return process, process.stdout.readline()


def start_workers(processes: list[subprocess.Popen[str]], *more: str) -> tuple[subprocess.Popen[str], str]:
    urls = [start(processes, "kvrelay.testing.fake_engine")[1].split()[-1] for _ in range(2)]
    router, line = start(
        processes, "kvrelay", "router", "serve", "--prefill", urls[0], "--decode", urls[1], "--port", "0",
        "--workers", "2", *more,
    )  # fmt: skip
    found = re.search(r"ready: (http://127\.0\.0\.1:\d+)", line)
    assert found is not None, router.communicate(timeout=WAIT_S)
    return router, found[1]


def ask(url: str) -> str:
    """The hand-over's id. Every request is a connection of its own."""
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        handover: str = answer.headers["x-kvrelay-handover"]
        return handover


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        text: str = answer.read().decode()
        return text


def counted(url: str) -> float:
    """Requests that went well, as any worker tells."""
    line = next((line for line in get(f"{url}/metrics").splitlines() if line.startswith(OK)), "0")
    return float(line.split()[-1])


def children(process: subprocess.Popen[str]) -> set[int]:
    told = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return {int(pid) for pid in told.split()}


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def test_workers_answer_for_each_other_and_end_together(processes: list[subprocess.Popen[str]]) -> None:
    router, url = start_workers(processes)
    workers = children(router)
    assert len(workers) == 2
    handovers = [ask(url) for _ in range(24)]
    for handover in handovers[:4]:  # whoever is asked, at each of four connections
        assert {json.loads(get(f"{url}/kvrelay/handovers/{handover}"))["handover"] for _ in range(4)} == {handover}
    assert {counted(url) for _ in range(6)} == {24}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{url}/kvrelay/handovers/ho-of-nobody")
    router.send_signal(signal.SIGTERM)
    assert router.wait(WAIT_S) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_killed_worker_is_replaced_and_what_it_counted_is_kept(processes: list[subprocess.Popen[str]]) -> None:
    router, url = start_workers(processes)
    before = children(router)
    for _ in range(12):
        ask(url)
    assert {counted(url) for _ in range(40)} == {12}  # by chance once in 10^12 all of these were one worker's
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: len(children(router)) == 2 and killed not in children(router))
    for _ in range(12):
        ask(url)
    assert {counted(url) for _ in range(6)} == {24}
    router.send_signal(signal.SIGTERM)
    assert router.wait(WAIT_S) == 0


def test_workers_do_not_outlive_the_process_that_started_them(processes: list[subprocess.Popen[str]]) -> None:
    router, _ = start_workers(processes)
    workers = children(router)
    router.kill()
    router.wait(WAIT_S)
    wait_for(lambda: not any(_runs(pid) for pid in workers))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_port_that_is_taken_is_refused(processes: list[subprocess.Popen[str]]) -> None:
    _, url = start_workers(processes)
    port = url.rpartition(":")[2]
    other, line = start(
        processes, "kvrelay", "router", "serve", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2",
        "--port", port, "--workers", "2",
    )  # fmt: skip
    assert line == ""
    _, said = other.communicate(timeout=WAIT_S)
    assert other.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in said


def test_what_a_worker_cannot_begin_for_is_said_and_none_serves(processes: list[subprocess.Popen[str]]) -> None:
    router, line = start(
        processes, "kvrelay", "router", "serve", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2",
        "--port", "0", "--workers", "2", "--access-log", "/no/such/folder/log",
    )  # fmt: skip
    assert line == ""
    _, said = router.communicate(timeout=WAIT_S)
    assert router.returncode == 2
    assert "--access-log /no/such/folder/log cannot be written" in said
