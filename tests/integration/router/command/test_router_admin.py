"""The router's admin API and configuration file, with real processes and the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvrelay.testing.router_processes import WAIT_S, children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrelay.testing.router_processes import Processes


class Stack:
    """A router by a configuration file in front of three fake engines, of which it is told two."""

    def __init__(self, processes: Processes, folder: Path, *more: str) -> None:
        self.engines = processes.engines(3)
        self.file, token = folder / "router.toml", folder / "token"
        token.write_text("sesame\n")
        self.configure([self.engines[0]], [self.engines[1]])
        flags = [
            "--config",
            str(self.file),
            "--port",
            "0",
            "--admin-listen",
            "127.0.0.1:0",
            "--admin-token-file",
            str(token),
            *more,
        ]
        self.router, line = processes.start("kvrelay", "router", "serve", *flags)
        found = re.search(r"ready: (http://\S+) .*, admin (http://\S+)", line)
        assert found is not None, self.router.communicate(timeout=WAIT_S)
        self.url, self.admin = found[1], found[2]
        self._token = str(token)
        self.client = httpx.Client(base_url=self.admin, headers={"Authorization": "Bearer sesame"}, timeout=WAIT_S)

    def configure(self, prefill: list[str], decode: list[str], more: str = "") -> None:
        self.file.write_text(f"prefill = {json.dumps(prefill)}\ndecode = {json.dumps(decode)}\n{more}\n")

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvrelay", "router", *args]
        command += ["--admin", self.admin, "--admin-token-file", self._token]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    def ask(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=WAIT_S)

    def names(self) -> dict[str, str]:
        return {view["name"]: view["role"] for view in self.client.get("/engines").json()["engines"]}

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not reached():
            assert time.monotonic() < deadline, self.names()
            time.sleep(0.02)


@pytest.fixture
def stack(processes: Processes, tmp_path: Path) -> Iterator[Stack]:
    made = Stack(processes, tmp_path)
    yield made
    made.client.close()


def test_engines_are_listed_added_drained_moved_and_removed_by_the_command_line(stack: Stack) -> None:
    added = stack.run("engines", "add", "decode", stack.engines[2], "--name", "spare")
    assert added.returncode == 0, added.stderr
    assert added.stdout.split()[:4] == ["spare", "decode", stack.engines[2], "serving"]
    drained = stack.run("engines", "drain", "D0", "--wait", "30")
    assert drained.stdout.split()[3] == "draining"
    assert {stack.ask().headers["x-kvrelay-decode"] for _ in range(3)} == {"spare"}
    refused = stack.run("engines", "set-role", "spare", "prefill")
    assert refused.returncode == 1
    assert "spare is the last decode engine that takes requests" in refused.stderr
    assert "serving" in stack.run("engines", "drain", "D0", "--resume").stdout
    assert stack.run("engines", "set-role", "spare", "prefill").stdout.split()[1] == "prefill"
    assert {stack.ask().headers["x-kvrelay-prefill"] for _ in range(2)} == {"P0", "spare"}
    gone = stack.run("engines", "rm", "P0", "--timeout", "5", "--wait", "30")
    assert gone.stdout == "P0 has left\n"
    listed = json.loads(stack.run("engines", "ls", "--json").stdout)
    assert {view["name"]: view["role"] for view in listed} == {"D0": "decode", "spare": "prefill"}
    deaf = stack.run("engines", "set-kv-events", "D0", "tcp://h:1,tcp://h:2")
    assert "kv_events have no effect without --policy kv-aware" in deaf.stderr
    assert (
        "kv_events have no effect"
        in stack.run("engines", "add", "decode", "http://h:1", "--kv-events", "tcp://h:1").stderr
    )
    assert stack.run("engines", "set-kv-events", "D0").returncode == 0
    missing = stack.run("engines", "rm", "P0")
    assert "no engine 'P0': there are D0, spare" in missing.stderr
    assert 'engine="P0"' not in httpx.get(f"{stack.url}/metrics").text


def test_nobody_without_the_token_gets_in_but_probes_do(stack: Stack) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}):
        for method, path in (("GET", "/engines"), ("POST", "/reload"), ("DELETE", "/engines/D0"), ("GET", "/metrics")):
            answer = httpx.request(method, stack.admin + path, headers=headers, timeout=WAIT_S)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "unauthorized"
    assert httpx.get(f"{stack.admin}/health").json() == {"status": "ok"}
    assert httpx.get(f"{stack.admin}/ready").json() == {"status": "ok"}
    refused = subprocess.run(
        [sys.executable, "-m", "kvrelay", "router", "engines", "ls", "--admin", stack.admin],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert (refused.returncode, "no bearer token" in refused.stderr) == (1, True)


def test_what_is_wrong_is_told_and_described(stack: Stack) -> None:
    def said(method: str, path: str, body: object) -> tuple[int, str]:
        answer = stack.client.request(method, path, json=body)
        error: dict[str, str] = answer.json()["error"]
        return answer.status_code, error["code"]

    assert said("POST", "/engines", {"role": "decode", "url": "ftp://x"}) == (400, "bad_request")
    assert said("PUT", "/engines/D0/kv-events", {"kv_events": ["tcp://*:1"]}) == (400, "bad_request")
    assert said("POST", "/engines", {"role": "both", "url": stack.engines[2]}) == (422, "bad_request")
    assert said("POST", "/engines", {"role": "decode", "url": stack.engines[1]}) == (409, "conflict")
    assert said("POST", "/engines/X/drain", None) == (404, "not_found")
    assert said("POST", "/engines/D0/drain", None) == (409, "conflict")
    assert said("DELETE", "/engines/D0?timeout_s=-1", None) == (422, "bad_request")
    paths: dict[str, Any] = stack.client.get("/openapi.json").json()["paths"]
    assert set(paths["/engines/{name}/drain"]) == {"post", "delete"}


def test_a_new_configuration_file_is_gone_over_to_by_sighup_and_by_reload(stack: Stack) -> None:
    stack.configure([stack.engines[0]], [stack.engines[2]], "decode_timeout = 33")
    reloaded = stack.run("reload")
    assert reloaded.stdout.splitlines() == [
        "added: D1", "leaving: D0", "settings: decode, decode_timeout",
    ]  # fmt: skip
    assert stack.run("reload").stdout == "nothing has changed\n"
    stack.until(lambda: stack.names() == {"P0": "prefill", "D1": "decode"})
    assert stack.ask().headers["x-kvrelay-decode"] == "D1"
    stack.configure([stack.engines[2]], [stack.engines[0], stack.engines[1]])
    stack.router.send_signal(signal.SIGHUP)
    stack.until(lambda: stack.names() == {"D1": "prefill", "P0": "decode", "D2": "decode"})
    assert stack.ask().headers["x-kvrelay-prefill"] == "D1"


def test_a_bad_configuration_file_is_refused_with_all_its_problems_and_nothing_changes(stack: Stack) -> None:
    before = stack.client.get("/engines").json()
    stack.configure([stack.engines[0]], [stack.engines[2]], 'host = "::1"\nretry_share = 3\nnonsense = 1')
    refused = stack.run("reload")
    assert refused.returncode == 2
    for problem in ("--retry-share 3 is out of range", "nonsense (from"):
        assert problem in refused.stderr
    stack.configure([stack.engines[0]], [stack.engines[2]], 'host = "::1"\nconnect_timeout = 1')
    refused = stack.run("reload")
    for problem in ("host cannot change", "connect_timeout cannot change"):
        assert problem in refused.stderr
    stack.router.send_signal(signal.SIGHUP)
    stack.configure([stack.engines[0]], [])
    assert "no --decode is given" in stack.run("reload").stderr
    assert stack.client.get("/engines").json() == before
    assert stack.ask().status_code == 200
    stack.router.send_signal(signal.SIGTERM)
    _, errors = stack.router.communicate(timeout=WAIT_S)
    assert stack.router.returncode == 0
    assert "the new configuration is refused, and nothing changes: " in errors


def test_where_no_file_was_given_there_is_nothing_to_reload(processes: Processes) -> None:
    process, line = processes.serve("--admin-listen", "127.0.0.1:0")
    url = line.split()[-1]
    process.send_signal(signal.SIGHUP)
    answer = httpx.post(f"{url}/reload", timeout=WAIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "config")
    assert "started without --config" in answer.json()["error"]["message"]


def test_every_worker_goes_over_to_a_new_configuration_and_one_that_is_started_again_begins_with_it(
    processes: Processes, tmp_path: Path
) -> None:
    """1. Two workers. 2. The file changes, SIGHUP. 3. Both have the new engine. 4. One is killed: so has its heir."""
    file = tmp_path / "router.toml"
    file.write_text('prefill = ["http://127.0.0.1:9"]\ndecode = ["http://127.0.0.1:10"]\n')
    command = ["router", "serve", "--config", str(file), "--port", "0", "--workers", "2"]
    process, line = processes.start("kvrelay", *command)
    port = httpx.URL(processes.url_in(line, process)).port

    def urls() -> set[str]:
        views = httpx.get(f"http://127.0.0.1:{port}/health", timeout=WAIT_S).json()["engines"]
        return {view["url"] for view in views}

    def until_all_say(expected: set[str]) -> None:
        deadline = time.monotonic() + WAIT_S
        said = 0
        while said < 12:  # in a row, on connections of their own: both workers are among them
            said = said + 1 if urls() == expected else 0
            assert time.monotonic() < deadline

    until_all_say({"http://127.0.0.1:9", "http://127.0.0.1:10"})
    file.write_text('prefill = ["http://127.0.0.1:9"]\ndecode = ["http://127.0.0.1:11"]\n')
    process.send_signal(signal.SIGHUP)
    until_all_say({"http://127.0.0.1:9", "http://127.0.0.1:11"})
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    wait_for_another_child(process.pid, children)
    until_all_say({"http://127.0.0.1:9", "http://127.0.0.1:11"})


def wait_for_another_child(parent: int, before: list[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while set(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()) <= set(before):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_with_several_workers_every_one_of_them_goes_over_and_so_does_who_takes_a_killed_ones_place(
    processes: Processes, tmp_path: Path
) -> None:
    stack = Stack(processes, tmp_path, "--workers", "3")

    def everywhere() -> set[tuple[str, ...]]:
        """The engines of whoever answers, each time over another connection: of three workers some forty ask all."""
        return {
            tuple(view["name"] for view in httpx.get(f"{stack.url}/health", timeout=WAIT_S).json()["engines"])
            for _ in range(40)
        }

    def replaced(victim: int) -> bool:
        return victim not in (workers := children(stack.router)) and len(workers) == 3

    def change(*args: str) -> None:
        changed = stack.run(*args)
        assert changed.returncode == 0 or "not yet by all workers" in changed.stderr, changed.stderr  # where it is busy

    with stack.client:
        change("engines", "add", "decode", stack.engines[2])
        stack.until(lambda: everywhere() == {("P0", "D0", "D1")})
        before = children(stack.router)
        newcomers: list[int] = []
        for victim in sorted(before)[:2]:  # the first worker is one of them
            os.kill(victim, signal.SIGKILL)
            stack.until(partial(replaced, victim))
            stack.until(lambda: everywhere() == {("P0", "D0", "D1")})
            newcomers += children(stack.router) - before - set(newcomers)
        change("engines", "rm", "D0", "--timeout", "5", "--wait", "30")
        stack.until(lambda: everywhere() == {("P0", "D1")})
        for _ in range(12):
            assert stack.ask().headers["x-kvrelay-decode"] == "D1"
        ok = 'kvrelay_router_requests_total{endpoint="/v1/completions",outcome="ok"} 12.0'
        stack.until(lambda: ok in stack.client.get("/metrics").text.splitlines())
        stack.configure([stack.engines[0]], [stack.engines[1], stack.engines[2]])
        for newcomer in newcomers:  # whoever comes in their place hears of it when it serves
            os.kill(newcomer, signal.SIGKILL)
        stack.router.send_signal(signal.SIGHUP)
        stack.until(lambda: everywhere() == {("P0", "D1", "D2")})
        stack.configure([stack.engines[0]], [stack.engines[1]])
        change("reload")
        stack.until(lambda: everywhere() == {("P0", "D2")})
        stack.router.send_signal(signal.SIGTERM)
        assert stack.router.wait(WAIT_S) == 0


def test_what_was_changed_outlives_the_end_of_all_workers(processes: Processes, tmp_path: Path) -> None:
    stack = Stack(processes, tmp_path, "--workers", "2")
    with stack.client:
        for change in (("add", "decode", stack.engines[2]), ("drain", "D0")):
            changed = stack.run("engines", *change)
            assert changed.returncode == 0 or "not yet by all workers" in changed.stderr, changed.stderr
        before = children(stack.router)
        for victim in before:
            os.kill(victim, signal.SIGKILL)
        stack.until(lambda: len(children(stack.router) - before) == 2)
        views = stack.client.get("/engines").json()["engines"]
        assert {view["name"]: view["state"] for view in views} == {"P0": "serving", "D0": "draining", "D1": "serving"}
        for _ in range(6):
            assert stack.ask().headers["x-kvrelay-decode"] == "D1"
