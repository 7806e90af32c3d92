"""The access log: a line of JSON for each request, whatever became of it."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvrelay.errors import ConfigError
from kvrelay.router import access_log
from kvrelay.router.access_log import AccessLog
from kvrelay.router.core.admission.keys import ID_BYTES, SALT_BYTES, SECRET_BYTES, hash_secret, make_secret
from kvrelay.router.core.observing.settings import Observing
from kvrelay.router.entrance.settings import EntranceSettings
from kvrelay.testing import fake_answers
from kvrelay.testing.fake_engine import fail, hang, stream
from kvrelay.testing.fake_tickets import FakePool, a_proof
from kvrelay.testing.raw_http import RawClient, get, post

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvrelay.router.service import RouterService

PATH = "/v1/completions"
ASK = {"prompt": "secret words", "max_tokens": 2, "model": "m"}
WAIT_S = 30.0


def read(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line, type=dict) for line in path.read_bytes().splitlines()]


async def until(reached: Callable[[], object]) -> None:
    """What a thread brings about cannot set an event of ours."""
    async with asyncio.timeout(WAIT_S):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def renamed(path: Path) -> Path:
    return path.rename(path.with_suffix(".1"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, what was handed over is written."""
    monkeypatch.setattr(access_log, "CLOSE_TIMEOUT_S", 60.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


@pytest.fixture
def observing(path: Path) -> Observing:
    return Observing(access_log=str(path))


async def test_who_asks_for_a_hand_over_that_nobody_knows_has_made_an_error(
    engine: Any, router: Any, observing: Observing, path: Path
) -> None:
    service: RouterService = await router([await engine()], [await engine()], observing=observing)
    assert (await get(service.port, "/kvrelay/handovers/none")).status == 404
    await service.stop()
    (line,) = read(path)
    assert (line["status"], line["outcome"]) == (404, "client_error")


async def test_a_line_tells_who_did_what_and_nothing_of_what_was_said(
    engine: Any, router: Any, observing: Observing, path: Path
) -> None:
    service: RouterService = await router([await engine()], [await engine()], observing=observing)
    secret = "authorization: Bearer hunter2\r\nx-request-id: mine\r\n"
    answer = await post(service.port, PATH, {**ASK, "stream": True}, headers=secret)
    await service.stop()
    (line,) = read(path)
    wanted = {
        "request_id": "mine", "handover": answer.headers["x-kvrelay-handover"], "client": "127.0.0.1", "method": "POST",
        "path": PATH, "model": "m", "status": 200, "outcome": "ok", "prefill": "P0", "decode": "D0",
        "answer_bytes": len(answer.body), "prefill_legs": 1, "decode_legs": 1,
    }  # fmt: skip
    assert {name: line[name] for name in wanted} == wanted
    assert len(line["at_ms"]) == 7
    for said in ("secret", "hunter2", fake_answers.text_of(0)):
        assert said not in repr(line)


@pytest.mark.parametrize("ask", [{**ASK, "stream": True, "stream_options": {"include_usage": True}}, ASK])
async def test_tokens_are_told_where_the_answer_tells_them(
    engine: Any, router: Any, observing: Observing, path: Path, ask: dict[str, Any]
) -> None:
    service: RouterService = await router([await engine()], [await engine()], observing=observing)
    await post(service.port, PATH, ask)
    await service.stop()
    (line,) = read(path)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (7, 2)


async def test_every_way_to_end_has_its_line_and_probes_have_none(
    engine: Any, router: Any, observing: Observing, path: Path
) -> None:
    prefill, decode = await engine(), await engine()
    service: RouterService = await router([prefill], [decode], observing=observing)
    port = service.port
    await post(port, PATH, b"no json")
    await post(port, "/nowhere", {})
    await post(port, "/v1/embeddings", {"input": "a", "model": "e"})
    await get(port, "/v1/models")
    await get(port, "/health")
    await get(port, "/metrics")
    async with await RawClient.open(port) as client:
        client.send(b"nonsense\r\n\r\n")
        refused = await client.answer()
    decode.script(fail(500))
    await post(port, PATH, ASK)
    decode.script(stream([b"data: 1\n\n"], ending="drop"))
    await post(port, PATH, {**ASK, "stream": True})
    decode.script(hang())
    async with await RawClient.open(port) as client:
        client.post(PATH, ASK)
        await until(lambda: len(decode.requests) == 4)
    await decode.left_by(1)
    await service.stop()
    assert read(path)[4]["request_id"] == refused.headers["x-request-id"]
    told = [(line["path"], line["status"], line["outcome"]) for line in read(path)]
    assert told == [
        (PATH, 400, "client_error"), ("/nowhere", 404, "client_error"), ("/v1/embeddings", 200, "ok"),
        ("/v1/models", 200, "ok"), ("", 400, "client_error"), (PATH, 500, "error"), (PATH, 200, "error"),
        (PATH, 0, "cancelled"),
    ]  # fmt: skip


async def test_the_line_waits_for_a_proof_that_is_on_its_way(
    engine: Any, router: Any, observing: Observing, path: Path
) -> None:
    """1. The answer has ended. 2. The proof comes. 3. Then there is a line, with both."""
    pool = FakePool()
    decode = await engine()
    service: RouterService = await router([await engine()], [decode], pool=pool.connect, observing=observing)
    await post(service.port, PATH, ASK)
    pool.post(a_proof(decode.requests[0].json["kv_transfer_params"]["kvrelay"]))
    await until(lambda: path.stat().st_size)
    (line,) = read(path)
    assert line["recomputed_tokens"] == 1
    assert line["outcome"] == "ok"


async def test_a_renamed_file_is_left_alone_once_the_log_is_opened_again(
    engine: Any, router: Any, observing: Observing, path: Path
) -> None:
    service: RouterService = await router([await engine()], [await engine()], observing=observing)
    await post(service.port, PATH, ASK)
    await until(lambda: path.stat().st_size)
    old = renamed(path)
    await post(service.port, PATH, ASK)
    service.reopen_logs()
    await post(service.port, PATH, ASK)
    await service.stop()
    assert (len(read(old)), len(read(path))) == (2, 1)


async def test_a_file_that_cannot_be_written_stops_the_start(engine: Any, router: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--access-log .*/none/x cannot be written: No such file"):
        await router([await engine()], [await engine()], observing=Observing(access_log=f"{tmp_path}/none/x"))


async def test_a_reader_that_does_not_read_costs_lines_and_no_time(tmp_path: Path) -> None:
    """1. Nobody reads the pipe. 2. Lines come without end. 3. All return at once; what does not fit is counted."""
    fifo = tmp_path / "pipe"
    dropped: list[int] = []
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    log = await AccessLog.open(str(fifo), dropped.append, max_bytes=100_000)
    line = b"x" * 999 + b"\n"
    for _ in range(300):
        log.write(line)
        await asyncio.sleep(0)
    kept = 300 - sum(dropped)
    assert 100 <= kept < 300
    os.set_blocking(reader, True)
    got = await asyncio.to_thread(drain, reader, kept * len(line))
    assert got == kept * line
    await log.close()
    os.close(reader)


def drain(reader: int, size: int) -> bytes:
    got = b""
    while len(got) < size:
        got += os.read(reader, 65536)
    return got


def grows(sizes: list[int], count: int) -> bool:
    return len(sizes) > count


async def test_lines_that_cannot_be_written_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    dropped: list[int] = []
    log = await AccessLog.open("/dev/full", dropped.append)
    for _ in range(2):
        log.write(b"1\n")
        log.write(b"2\n")
        await until(partial(grows, dropped, len(dropped)))
    await log.close()
    assert sum(dropped) == 4
    assert [record.getMessage() for record in caplog.records if "lines are dropped" in record.getMessage()] == [
        "--access-log /dev/full: lines are dropped: [Errno 28] No space left on device"
    ]


async def test_many_lines_are_handed_over_before_the_timer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "FLUSH_S", 3600.0)
    log = await AccessLog.open(str(path), lambda _: None)
    log.write(b"x" * access_log.FLUSH_BYTES + b"\n")
    await until(lambda: path.stat().st_size > access_log.FLUSH_BYTES)
    await log.close()


async def test_a_line_names_the_key_and_a_request_without_one_is_told_of_too(
    engine: Any, router: Any, observing: Observing, path: Path, tmp_path: Path
) -> None:
    secret = make_secret(b"i" * ID_BYTES, b"s" * SECRET_BYTES)
    keys = tmp_path / "keys.json"
    write(keys, {"keys": [{"name": "team-a", "hash": hash_secret(secret, b"s" * SALT_BYTES)}]})
    entrance = EntranceSettings(keys_file=str(keys))
    service: RouterService = await router([await engine()], [await engine()], observing=observing, entrance=entrance)
    await post(service.port, PATH, ASK, headers=f"authorization: Bearer {secret}\r\n")
    await post(service.port, PATH, ASK)
    await service.stop()
    known, unknown = read(path)
    assert (known["key"], known["status"]) == ("team-a", 200)
    assert (unknown.get("key"), unknown["status"], unknown["outcome"]) == (None, 401, "client_error")
    assert secret not in repr(known)


def write(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.encode(value))
