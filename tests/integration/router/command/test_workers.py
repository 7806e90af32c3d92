"""``kvrelay router serve --workers``: several processes behind one port."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvrelay.testing.router_processes import WAIT_S, ask, children

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.testing.router_processes import Processes

OK = 'kvrelay_router_requests_total{endpoint="/v1/completions",outcome="ok"}'


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        text: str = answer.read().decode()
        return text


def counted(url: str) -> float:
    """Requests that went well, as any worker tells."""
    line = next((line for line in get(f"{url}/metrics").splitlines() if line.startswith(OK)), "0")
    return float(line.split()[-1])


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def test_workers_answer_for_each_other_and_end_together(processes: Processes) -> None:
    router, url = processes.router("--workers", "2")
    workers = children(router)
    assert len(workers) == 2
    handovers = [ask(url) for _ in range(24)]
    wait_for(lambda: counted(url) == 24)  # the last may be counted a moment after it was answered
    for handover in handovers[:4]:  # whoever is asked, at each of four connections
        assert {json.loads(get(f"{url}/kvrelay/handovers/{handover}"))["handover"] for _ in range(4)} == {handover}
    assert {counted(url) for _ in range(6)} == {24}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{url}/kvrelay/handovers/ho-of-nobody")
    router.send_signal(signal.SIGTERM)
    assert router.wait(WAIT_S) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_killed_worker_is_replaced_and_what_it_counted_is_kept(processes: Processes) -> None:
    router, url = processes.router("--workers", "2")
    before = children(router)
    for _ in range(12):
        ask(url)
    wait_for(lambda: counted(url) == 12)
    assert {counted(url) for _ in range(40)} == {12}  # by chance once in 10^12 all of these were one worker's
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: len(children(router)) == 2 and killed not in children(router))
    for _ in range(12):
        ask(url)
    wait_for(lambda: counted(url) == 24)
    assert {counted(url) for _ in range(6)} == {24}
    router.send_signal(signal.SIGTERM)
    assert router.wait(WAIT_S) == 0


def test_workers_do_not_outlive_the_process_that_started_them(processes: Processes) -> None:
    def left_behind() -> set[Path]:
        return set(Path(tempfile.gettempdir()).glob("kvrelay-router-*"))

    before = left_behind()
    router, url = processes.router("--workers", "2")
    ask(url)
    workers = children(router)
    router.kill()
    router.wait(WAIT_S)
    wait_for(lambda: not any(_runs(pid) for pid in workers))
    assert left_behind() <= before


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_port_that_is_taken_is_refused(processes: Processes) -> None:
    _, url = processes.router("--workers", "2")
    port = url.rpartition(":")[2]
    other, line = processes.serve("--port", port, "--workers", "2")
    assert line == ""
    _, said = other.communicate(timeout=WAIT_S)
    assert other.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in said


def test_what_a_worker_cannot_begin_for_is_said_and_none_serves(processes: Processes) -> None:
    router, line = processes.serve("--workers", "2", "--access-log", "/no/such/folder/log")
    assert line == ""
    _, said = router.communicate(timeout=WAIT_S)
    assert router.returncode == 2
    assert "--access-log /no/such/folder/log cannot be written" in said
