"""Keys, limits, slots and CORS in front of fake engines."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest

from kvrelay.errors import ConfigError
from kvrelay.router.core.admission.keys import ID_BYTES, SALT_BYTES, SECRET_BYTES, hash_secret, make_secret
from kvrelay.router.core.observing.forwarding import HeaderSettings
from kvrelay.router.core.observing.settings import Observing
from kvrelay.router.entrance.settings import EntranceSettings
from kvrelay.testing.fake_engine import fail, stream
from kvrelay.testing.raw_http import Answer, RawClient, get, post

if TYPE_CHECKING:
    from pathlib import Path

ASK = {"prompt": "a", "max_tokens": 2}
WAIT_S = 20.0
COMPLETIONS = "/v1/completions"


def secret_of(number: int) -> str:
    return make_secret(bytes([number]) * ID_BYTES, bytes([number]) * SECRET_BYTES)


def bearer(number: int) -> str:
    return f"authorization: Bearer {secret_of(number)}\r\n"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def write_keys(file: Path, *keys: dict[str, Any]) -> None:
    """Keys number 1, 2, ..., called ``key1`` and so on."""
    entries = [
        {"name": f"key{number}", "hash": hash_secret(secret_of(number), b"s" * SALT_BYTES), **fields}
        for number, fields in enumerate(keys, 1)
    ]
    file.write_bytes(msgspec.json.encode({"keys": entries}))


def write_nonsense(file: Path) -> None:
    file.write_text("{")


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110 - the condition is another process's, so to speak: a page
            await asyncio.sleep(0.005)


async def figure(port: int, name: str) -> float:
    lines = (await get(port, "/metrics")).body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def waiting(port: int, count: int) -> None:
    async def reached() -> bool:
        return await figure(port, "kvrelay_router_waiting ") == count

    await until(reached)


# --- keys ---


async def test_without_a_key_nothing_of_the_engines_is_reached(engine: Any, router: Any, keys_file: Path) -> None:
    write_keys(keys_file, {})
    prefill, decode = await engine(), await engine()
    service = await router([prefill], [decode], entrance=EntranceSettings(keys_file=str(keys_file)))
    shown = [
        "",
        bearer(2),
        f"authorization: Basic {secret_of(1)}\r\n",
        "authorization: Bearer \r\n",
        "x-api-key: x\r\n",
    ]
    for headers in shown:
        answer = await post(service.port, COMPLETIONS, ASK, headers=headers)
        assert answer.status == 401
        assert answer.json["error"]["code"] in {"missing_api_key", "invalid_api_key"}
        assert answer.headers["www-authenticate"] == "bearer"
    for path in ("/v1/models", "/version", "/kvrelay/handovers/ho-1", "/v1/responses/resp_1"):
        assert (await get(service.port, path)).status == 401
    async with await RawClient.open(service.port) as client:
        client.send(b"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\norigin: http://a\r\n\r\n")
        assert (await client.answer()).status == 401
    for path in ("/health", "/metrics"):
        assert (await get(service.port, path)).status == 200
    assert prefill.requests == decode.requests == []
    assert (await post(service.port, COMPLETIONS, ASK, headers=bearer(1))).status == 200
    answer = await post(service.port, "/v1/messages/count_tokens", {}, headers=f"x-api-key: {secret_of(1)}\r\n")
    assert answer.status == 200


@pytest.mark.parametrize(
    "framing", ["content-length: 60000000", "transfer-encoding: chunked", "content-length: 2\r\nexpect: 100-continue"]
)
async def test_a_large_body_of_somebody_unknown_is_not_received(
    engine: Any, router: Any, keys_file: Path, framing: str
) -> None:
    write_keys(keys_file, {})
    decode = await engine()
    service = await router([await engine()], [decode], entrance=EntranceSettings(keys_file=str(keys_file)))
    async with await RawClient.open(service.port) as client:
        client.send(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n{bearer(2)}{framing}\r\n\r\n".encode())
        answer = await client.answer()
        assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
        assert await client.rest() == b""
    large = {"prompt": "a" * 100_000, "max_tokens": 1}
    assert (await post(service.port, COMPLETIONS, large, headers=bearer(1))).status == 200
    assert (await get(service.port, "/health")).status == 200
    assert len(decode.requests) == 1


async def test_official_clients_understand_what_they_are_told(engine: Any, router: Any, keys_file: Path) -> None:
    write_keys(keys_file, {"requests_per_minute": 1}, {"models": ["m"]})
    service = await router([await engine()], [await engine()], entrance=EntranceSettings(keys_file=str(keys_file)))
    url = f"http://127.0.0.1:{service.port}/v1"

    async def ask(number: int) -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key=secret_of(number), max_retries=0) as client:
            said = await client.completions.with_raw_response.create(model="fake", prompt="a", max_tokens=1)
            return said.headers

    assert (await ask(1))["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(openai.RateLimitError) as limited:
        await ask(1)
    assert limited.value.code == "rate_limit_exceeded"
    assert int(limited.value.response.headers["retry-after"]) >= 1
    with pytest.raises(openai.PermissionDeniedError):
        await ask(2)
    with pytest.raises(openai.AuthenticationError):
        await ask(3)


async def test_engines_get_their_own_key_and_never_the_clients(
    engine: Any, router: Any, keys_file: Path, tmp_path: Path
) -> None:
    write_keys(keys_file, {})
    (tmp_path / "engine-key").write_text("engines-own\n")
    for engine_key, expected in ((None, None), (str(tmp_path / "engine-key"), "Bearer engines-own")):
        prefill, decode = await engine(), await engine()
        entrance = EntranceSettings(keys_file=str(keys_file), engine_api_key_file=engine_key)
        service = await router([prefill], [decode], entrance=entrance)
        headers = bearer(1) + "x-api-key: other\r\n"
        assert (await post(service.port, COMPLETIONS, ASK, headers=headers)).status == 200
        for request in prefill.requests + decode.requests:
            assert request.headers.get("authorization") == expected
            assert "x-api-key" not in request.headers


async def test_the_engines_key_reaches_them_whatever_else_is_kept_from_them(
    engine: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_ENGINE_API_KEY", "engines-own")
    prefill, decode = await engine(), await engine()
    service = await router([prefill], [decode], observing=Observing(headers=HeaderSettings(forward=("x-mine",))))
    headers = "authorization: Bearer own\r\nx-mine: 1\r\nx-other: 2\r\n"
    assert (await post(service.port, COMPLETIONS, ASK, headers=headers)).status == 200
    for request in prefill.requests + decode.requests:
        assert request.headers["authorization"] == "Bearer engines-own"
        assert (request.headers["x-mine"], request.headers.get("x-other")) == ("1", None)


@pytest.mark.parametrize(("way", "expected"), [("auto", "Bearer own"), ("yes", "Bearer own"), ("no", None)])
async def test_without_keys_the_clients_authorization_is_passed_on_unless_told(
    engine: Any, router: Any, way: str, expected: str | None
) -> None:
    prefill, decode = await engine(), await engine()
    service = await router([prefill], [decode], entrance=EntranceSettings(forward_authorization=way))
    assert (await post(service.port, COMPLETIONS, ASK, headers="authorization: Bearer own\r\n")).status == 200
    assert decode.requests[0].headers.get("authorization") == expected


async def test_a_key_that_is_over_or_not_for_this_is_refused(engine: Any, router: Any, keys_file: Path) -> None:
    write_keys(keys_file, {"expires": "2020-01-01"}, {"models": ["small"]}, {"min_priority": 5})
    decode = await engine()
    service = await router([await engine()], [decode], entrance=EntranceSettings(keys_file=str(keys_file)))

    async def code(number: int, body: dict[str, Any], headers: str = "") -> tuple[int, str]:
        answer = await post(service.port, COMPLETIONS, {**ASK, **body}, headers=bearer(number) + headers)
        return answer.status, answer.json["error"]["code"] if answer.status != 200 else ""

    assert await code(1, {}) == (401, "invalid_api_key")
    assert await code(2, {"model": "large"}) == (403, "model_not_allowed")
    assert await code(2, {}) == (403, "model_not_allowed")
    assert await code(3, {"priority": 4}) == (403, "priority_not_allowed")
    assert await code(3, {}, "x-kvrelay-priority: 0\r\n") == (403, "priority_not_allowed")
    assert await code(3, {}, "x-kvrelay-priority: high\r\n") == (400, "bad_request")
    assert decode.requests == []
    assert (await code(2, {"model": "small"}))[1] == ""
    assert await code(3, {}) == await code(3, {}, "x-kvrelay-priority: 6\r\n") == (200, "")
    assert "x-kvrelay-priority" not in decode.requests[-1].headers


async def test_a_file_that_is_read_again_counts_for_requests_from_then_on(
    engine: Any, router: Any, keys_file: Path
) -> None:
    write_keys(keys_file, {})
    service = await router([await engine()], [await engine()], entrance=EntranceSettings(keys_file=str(keys_file)))
    write_keys(keys_file, {}, {})
    assert (await post(service.port, COMPLETIONS, ASK, headers=bearer(2))).status == 401
    await service.reload_entrance()
    assert (await post(service.port, COMPLETIONS, ASK, headers=bearer(2))).status == 200
    write_nonsense(keys_file)
    with pytest.raises(ConfigError):
        await service.reload_entrance()
    assert (await post(service.port, COMPLETIONS, ASK, headers=bearer(2))).status == 200


async def test_secrets_are_neither_logged_nor_measured(
    engine: Any, router: Any, keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    write_keys(keys_file, {"tokens_per_minute": 1000})
    service = await router([await engine()], [await engine()], entrance=EntranceSettings(keys_file=str(keys_file)))
    for number in (1, 2):
        await post(service.port, COMPLETIONS, ASK, headers=bearer(number))
    text = (await get(service.port, "/metrics")).body.decode()
    assert 'kvrelay_router_key_requests_total{key="key1",outcome="ok"} 1.0' in text
    assert 'kvrelay_router_refused_total{reason="invalid_api_key"} 1.0' in text
    for shown in (secret_of(1), secret_of(2), "sk-kvr"):
        assert shown not in text
        assert shown not in caplog.text


# --- rates ---


async def test_over_its_rate_a_key_is_told_as_by_openai(engine: Any, router: Any, keys_file: Path) -> None:
    write_keys(keys_file, {"requests_per_minute": 2}, {})
    decode = await engine()
    service = await router([await engine()], [decode], entrance=EntranceSettings(keys_file=str(keys_file)))
    answers = [await post(service.port, COMPLETIONS, ASK, headers=bearer(1)) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-limit-requests"] for answer in answers] == ["2"] * 3
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert answers[2].json["error"]["type"] == "requests"
    assert answers[2].json["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert (await post(service.port, COMPLETIONS, ASK, headers=bearer(2))).status == 200
    assert (await post(service.port, "/v1/messages", {**ASK, "messages": []}, headers=bearer(1))).json["error"][
        "type"
    ] == "rate_limit_error"


@pytest.mark.parametrize("streamed", [False, True])
async def test_tokens_are_counted_by_what_the_answer_says(
    engine: Any, router: Any, keys_file: Path, streamed: bool
) -> None:
    """1. A request may use up to the limit. 2. It uses less: the rest is there for the next."""
    write_keys(keys_file, {"tokens_per_minute": 1000})
    decode = await engine()
    service = await router([await engine()], [decode], entrance=EntranceSettings(keys_file=str(keys_file)))
    usage = b'{"prompt_tokens":590,"total_tokens":600,"completion_tokens":10}'
    if streamed:
        decode.script(stream([b'data: {"choices":[]}\n\n', b'data: {"usage":%b}\n\n' % usage, b"data: [DONE]\n\n"]))
    else:

        async def say(exchange: Any) -> None:
            exchange.answer(200, b'{"choices":[],"usage":%b}' % usage)

        decode.script(say)
    body = {"prompt": "a", "max_tokens": 999, "stream": streamed}
    first = await post(service.port, COMPLETIONS, body, headers=bearer(1))
    assert (first.status, first.headers["x-ratelimit-remaining-tokens"]) == (200, "0")

    async def counted() -> bool:
        return await figure(service.port, 'kvrelay_router_key_tokens_total{key="key1"') == 600

    await until(counted)
    refused = await post(service.port, COMPLETIONS, {**body, "max_tokens": 999}, headers=bearer(1))
    assert (refused.status, refused.json["error"]["type"]) == (429, "tokens")
    assert 400 <= int(refused.headers["x-ratelimit-remaining-tokens"]) <= 1000
    assert (await post(service.port, COMPLETIONS, {**body, "max_tokens": 300}, headers=bearer(1))).status == 200


async def test_a_key_has_only_so_many_requests_at_once(engine: Any, router: Any, keys_file: Path) -> None:
    write_keys(keys_file, {"max_concurrent": 1})
    decode, gate = await engine(), asyncio.Semaphore(0)
    service = await router([await engine()], [decode], entrance=EntranceSettings(keys_file=str(keys_file)))
    decode.script(stream([b"data: 1\n\n", b"data: [DONE]\n\n"], gate=gate))
    async with await RawClient.open(service.port) as client:
        client.post(COMPLETIONS, ASK, headers=bearer(1))
        gate.release()
        await client.head()
        answer = await post(service.port, COMPLETIONS, ASK, headers=bearer(1))
        assert (answer.status, answer.json["error"]["code"]) == (429, "concurrency_limit_exceeded")
        assert answer.headers["retry-after"] == "1"
        gate.release()
        while await client.chunk():
            pass

    async def again() -> bool:
        return (await post(service.port, COMPLETIONS, ASK, headers=bearer(1))).status == 200

    await until(again)


# --- slots ---


class Crowd:
    """Requests to a router whose decode engine answers when told."""

    def __init__(self, port: int, decode: Any, gate: asyncio.Semaphore) -> None:
        self.port = port
        self.decode = decode
        self.gate = gate
        self.tasks: list[asyncio.Task[Answer]] = []

    def ask(self, name: str, headers: str = "") -> asyncio.Task[Answer]:
        task = asyncio.create_task(post(self.port, COMPLETIONS, {"prompt": name, "max_tokens": 1}, headers=headers))
        self.tasks.append(task)
        return task

    async def served(self, count: int) -> list[str]:
        """Let that many be answered one by one; the order in which engines got all so far."""
        for _ in range(count):
            self.gate.release()
        await self.decode.asked(len(self.decode.requests) + count)
        return self.order

    @property
    def order(self) -> list[str]:
        return [request.json["prompt"] for request in self.decode.requests]

    async def end(self) -> list[int]:
        for _ in self.tasks:
            self.gate.release()
        return [(await task).status for task in self.tasks]


async def crowd(engine: Any, router: Any, **entrance: Any) -> Crowd:
    gate = asyncio.Semaphore(0)

    async def wait(exchange: Any) -> None:
        if exchange.request.method != "POST":
            await decode.answer_well(exchange)
            return
        await gate.acquire()
        exchange.answer(200, b"{}")

    decode = await engine(default=wait)
    service = await router([await engine()], [decode], entrance=EntranceSettings(**entrance))
    return Crowd(service.port, decode, gate)


async def test_over_the_bound_requests_wait_in_order_and_over_the_queue_they_are_refused(
    engine: Any, router: Any
) -> None:
    people = await crowd(engine, router, max_concurrent=1, max_queued=2)
    people.ask("first")
    await people.decode.asked(1)
    for at, name in enumerate(("second", "third"), 1):
        people.ask(name)
        await waiting(people.port, at)
    refused = await post(people.port, COMPLETIONS, ASK)
    assert (refused.status, refused.json["error"]["code"]) == (503, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert people.order == ["first"]
    assert await people.served(2) == ["first", "second", "third"]
    assert await people.end() == [200] * 3
    assert await figure(people.port, "kvrelay_router_admitted ") == 0


async def test_a_wait_has_an_end(engine: Any, router: Any) -> None:
    people = await crowd(engine, router, max_concurrent=1, max_queue_wait_s=0.1)
    people.ask("first")
    await people.decode.asked(1)
    refused = await post(people.port, COMPLETIONS, ASK)
    assert (refused.status, refused.json["error"]["code"]) == (503, "queue_timeout")
    assert await people.end() == [200]
    assert people.order == ["first"]


async def test_a_client_that_goes_away_frees_its_place(engine: Any, router: Any) -> None:
    people = await crowd(engine, router, max_concurrent=1, max_queued=1)
    people.ask("first")
    await people.decode.asked(1)
    async with await RawClient.open(people.port) as client:
        client.post(COMPLETIONS, {"prompt": "gone", "max_tokens": 1})
        await waiting(people.port, 1)
    await waiting(people.port, 0)
    people.ask("second")
    await waiting(people.port, 1)
    assert await people.served(1) == ["first", "second"]
    assert await people.end() == [200, 200]


async def test_a_client_that_goes_away_while_served_frees_its_slot(engine: Any, router: Any) -> None:
    people = await crowd(engine, router, max_concurrent=1)
    async with await RawClient.open(people.port) as client:
        client.post(COMPLETIONS, {"prompt": "gone", "max_tokens": 1})
        await people.decode.asked(1)
        people.ask("next")
        await waiting(people.port, 1)
    await people.decode.asked(2)
    assert await people.end() == [200]


async def test_one_key_that_floods_does_not_starve_another(engine: Any, router: Any, keys_file: Path) -> None:
    write_keys(keys_file, {}, {})
    people = await crowd(engine, router, max_concurrent=1, max_queued=6, keys_file=str(keys_file))
    people.ask("flood", bearer(1))
    await people.decode.asked(1)
    for at in range(1, 7):
        people.ask("flood", bearer(1))
        await waiting(people.port, at)
    modest = people.ask("modest", bearer(2))  # in a full queue: room is made for it

    async def turned_away() -> bool:
        return await figure(people.port, 'kvrelay_router_refused_total{reason="queue_full"}') == 1

    await until(turned_away)
    order = await people.served(2)
    assert "modest" in order[:3]
    statuses = await people.end()
    assert (await modest).status == 200
    assert sorted(statuses) == [200] * 7 + [503]


async def test_urgent_requests_go_first(engine: Any, router: Any) -> None:
    people = await crowd(engine, router, max_concurrent=1)
    people.ask("first")
    await people.decode.asked(1)
    for at, (name, priority) in enumerate((("late", 3), ("plain", 0), ("soon", -1)), 1):
        people.ask(name, f"x-kvrelay-priority: {priority}\r\n")
        await waiting(people.port, at)
    assert await people.served(3) == ["first", "soon", "plain", "late"]
    assert await people.end() == [200] * 4


async def test_each_decode_engine_has_only_so_many(engine: Any, router: Any) -> None:
    """1. Two engines of which each may have one. 2. Four requests: two are served, one by each, and two wait."""
    gate = asyncio.Semaphore(0)

    async def wait(exchange: Any) -> None:
        await gate.acquire()
        exchange.answer(200, b"{}")

    decodes = [await engine(default=wait), await engine(default=wait)]
    service = await router([await engine()], decodes, entrance=EntranceSettings(max_per_decode=1))
    tasks = [asyncio.create_task(post(service.port, COMPLETIONS, ASK)) for _ in range(4)]
    await waiting(service.port, 2)
    for decode in decodes:
        await decode.asked(1)
    assert [len(decode.requests) for decode in decodes] == [1, 1]
    for _ in tasks:
        gate.release()
    assert [(await task).status for task in tasks] == [200] * 4


async def test_what_is_no_work_for_engines_needs_no_slot(engine: Any, router: Any) -> None:
    people = await crowd(engine, router, max_concurrent=1, max_queued=0)
    people.ask("first")
    await people.decode.asked(1)
    for path in ("/health", "/v1/models", "/metrics", "/version"):
        assert (await get(people.port, path)).status == 200
    assert (await post(people.port, "/tokenize", {})).status == 503
    assert await people.end() == [200]


@pytest.mark.parametrize("seed", range(3))
async def test_in_a_crowd_that_comes_and_goes_no_bound_is_broken_and_nothing_is_left(
    engine: Any, router: Any, seed: int
) -> None:
    """Sixty clients, of which many leave at any moment; the engine takes as long as it is let."""
    rng, gate = random.Random(seed), asyncio.Semaphore(0)

    async def work(exchange: Any) -> None:
        look()
        await gate.acquire()
        exchange.answer(200, b"{}")

    decode = await engine(default=work)
    entrance = EntranceSettings(max_concurrent=3, max_queued=8, max_queue_wait_s=WAIT_S)
    service = await router([await engine()], [decode], entrance=entrance)
    queue = service._gate._slots._queue
    statuses: list[int] = []

    def look() -> None:
        queue.check_integrity()
        assert queue.inside <= 3

    async def come(stays: bool) -> None:
        async with await RawClient.open(service.port) as client:
            client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "priority": rng.randrange(-1, 2)})
            if stays:
                statuses.append((await client.answer()).status)
            else:
                await asyncio.sleep(rng.choice((0, 0.001, 0.01)))

    clients = []
    for _ in range(60):
        clients.append(asyncio.create_task(come(rng.random() < 0.5)))
        if rng.random() < 0.5:
            gate.release()
        await asyncio.sleep(rng.choice((0, 0, 0.002)))
        look()
    for _ in clients:
        gate.release()
    await asyncio.gather(*clients)
    assert set(statuses) <= {200, 503}
    assert 200 in statuses

    async def empty() -> bool:
        return not (
            await figure(service.port, "kvrelay_router_admitted ")
            or await figure(service.port, "kvrelay_router_waiting ")
        )

    await until(empty)


async def test_a_failed_request_gives_its_slot_back(engine: Any, router: Any) -> None:
    decode = await engine()
    service = await router([await engine()], [decode], entrance=EntranceSettings(max_concurrent=1, max_queued=0))

    async def free() -> bool:
        return await figure(service.port, "kvrelay_router_admitted ") == 0

    for status in (400, 500):
        decode.script(fail(status))
        assert (await post(service.port, COMPLETIONS, ASK)).status == status
        await until(free)
    assert (await post(service.port, COMPLETIONS, b"[]")).status == 400
    await until(free)
    assert (await post(service.port, COMPLETIONS, ASK)).status == 200


# --- CORS ---


async def ask_as_page(port: int, origin: str, *, method: str = "POST", more: str = "") -> Answer:
    async with await RawClient.open(port) as client:
        body = b'{"prompt":"a","max_tokens":1}' if method == "POST" else b""
        head = f"{method} {COMPLETIONS} HTTP/1.1\r\nhost: x\r\norigin: {origin}\r\ncontent-length: {len(body)}\r\n"
        client.send(head.encode() + more.encode() + b"content-type: application/json\r\n\r\n" + body)
        status, headers = await client.head()
        return Answer(status, headers, b"")


PREFLIGHT = "access-control-request-method: POST\r\naccess-control-request-headers: authorization, x-more\r\n"


async def test_pages_of_an_origin_may_use_the_router_and_others_not(engine: Any, router: Any, keys_file: Path) -> None:
    write_keys(keys_file, {})
    decode = await engine()

    async def as_vllm(exchange: Any) -> None:
        exchange.answer(
            200, b"{}", extra="access-control-allow-origin: *\r\n" if "origin" in exchange.request.headers else ""
        )

    decode.default = as_vllm
    entrance = EntranceSettings(keys_file=str(keys_file), cors_origins=["https://Good.example"])
    service = await router([await engine()], [decode], entrance=entrance)
    good, bad = "https://good.example", "https://bad.example"
    asked = await ask_as_page(service.port, good, method="OPTIONS", more=PREFLIGHT)
    assert asked.status == 204
    assert asked.headers["access-control-allow-origin"] == good
    assert asked.headers["access-control-allow-headers"] == "authorization, x-more"
    assert "post" in asked.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in asked.headers
    refused = await ask_as_page(service.port, bad, method="OPTIONS", more=PREFLIGHT)
    assert (refused.status, "access-control-allow-origin" in refused.headers) == (403, False)
    for number, status in ((1, 200), (2, 401)):
        answer = await ask_as_page(service.port, good, more=bearer(number))
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, good)
        assert "origin" in answer.headers["vary"]
        answer = await ask_as_page(service.port, bad, more=bearer(number))
        assert (answer.status, "access-control-allow-origin" in answer.headers) == (status, False)
    assert len(decode.requests) == 2
    metrics = (await get(service.port, "/metrics")).body.decode()
    for outcome, number in (("ok", 3), ("client_error", 3)):  # of each one preflight
        assert f'requests_total{{endpoint="{COMPLETIONS}",outcome="{outcome}"}} {number}.0' in metrics


async def test_every_origin_may_where_that_is_said(engine: Any, router: Any) -> None:
    service = await router([await engine()], [await engine()], entrance=EntranceSettings(cors_origins=["*"]))
    for method, more, status in (("OPTIONS", PREFLIGHT, 204), ("POST", "", 200)):
        answer = await ask_as_page(service.port, "https://any.example", method=method, more=more)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, "*")


async def test_without_the_setting_a_preflight_goes_to_an_engine(engine: Any, router: Any) -> None:
    service = await router([await engine()], [await engine()])
    answer = await ask_as_page(service.port, "https://any.example", method="OPTIONS", more=PREFLIGHT)
    assert answer.status == 404  # as the fake engine answers
