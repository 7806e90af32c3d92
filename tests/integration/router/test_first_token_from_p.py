"""Streams that begin with P's token, and go on with D's: all a client sees is what one engine says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvrelay.router.core.conditional import Conditional, FixedThreshold
from kvrelay.router.core.routing import RoutingSettings
from kvrelay.testing.fake_engine import Behaviour, Exchange, FakeEngine, Recorded, fail, hang, raw, stream
from kvrelay.testing.fake_tokens import GENERATED, TokenEngine
from kvrelay.testing.raw_http import Answer, RawClient, get, post

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Ask = Callable[..., Awaitable[Answer]]

COMPLETION = {"model": "fake-model", "prompt": "hello", "stream": True, "temperature": 0, "max_tokens": 5}
CHAT = {"model": "fake-model", "messages": [{"role": "user", "content": "hello"}], "stream": True, "temperature": 0}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": {**CHAT, "max_tokens": 5}}
NUM_RENDERED = 3
"""Requests each engine is to show complete, about one model."""
BOTH = pytest.mark.parametrize("path", list(PATHS))


def broken() -> Behaviour:
    """Break off in the middle of an answer's head."""
    return raw(b"HTTP/1.1 2", close=True)


class Noting(FixedThreshold):
    """A threshold that keeps what was measured."""

    def __init__(self, above: int) -> None:
        super().__init__(above)
        self.times: list[float] = []

    def measured(self, rest: int, ttft_s: float, now: float, *, alone: bool) -> None:  # noqa: ARG002
        assert not alone
        self.times.append(ttft_s)


class World:
    """Some P, some D, a router in front of them, and one engine that is right."""

    def __init__(self, prefills: list[TokenEngine], decodes: list[TokenEngine]) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.fakes: list[FakeEngine] = []
        self.port = 0
        self.service: Any = None
        self.right = TokenEngine(created=3)
        self.right_fake: FakeEngine | None = None

    @property
    def engines(self) -> list[TokenEngine]:
        return [*self.prefills, *self.decodes, self.right]

    async def warm(self) -> None:
        """Ask until the router knows what the engines add."""
        for _ in range(500):
            record = await self.record(await post(self.port, "/v1/completions", COMPLETION))
            told = all(one.rendered == NUM_RENDERED for one in (*self.prefills, *self.decodes))
            if told and record["first_token"] != "unknown_model":
                return
        raise AssertionError("the router asks engines nothing")

    async def record(self, answer: Answer) -> dict[str, Any]:
        return (await get(self.port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json

    async def same(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the router and the one engine; the same is said. What became of it."""
        assert self.right_fake is not None
        ours, theirs = await post(self.port, path, body), await post(self.right_fake.port, path, body)
        assert ours.status == theirs.status == 200
        assert joined(ours) == joined(theirs)
        assert ours.headers["content-type"] == theirs.headers["content-type"]
        return await self.record(ours)


def events(answer: Answer) -> list[dict[str, Any]]:
    """All but the last, which must be the end."""
    *said, done, rest = answer.body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [msgspec.json.decode(each.removeprefix(b"data: ")) for each in said]


def joined(answer: Answer) -> dict[str, Any]:
    """What a client makes of a stream; ids and times of one answer are one."""
    said = events(answer)
    assert len({(each["id"], each["created"]) for each in said}) == 1
    anonymous = [{**each, "id": "", "created": 0} for each in said]
    return {"events": anonymous}


def legs(fake: FakeEngine) -> list[Recorded]:
    return [request for request in fake.requests if not request.target.endswith("/render")]


@pytest.fixture
async def world(engine: Any, router: Any) -> Callable[..., Awaitable[World]]:
    """Start one, of engines that answer at different times."""

    async def start(prefills: int = 1, decodes: int = 1, **settings: Any) -> World:
        made = World(
            [TokenEngine(created=1) for _ in range(prefills)], [TokenEngine(created=2) for _ in range(decodes)]
        )
        fakes = [await engine(default=one.behave) for one in made.engines]
        made.right_fake = fakes.pop()
        made.fakes = fakes
        service = await router(fakes[:prefills], fakes[prefills:], **{"first_token": "prefill", **settings})
        made.port, made.service = service.port, service
        return made

    return start


@BOTH
@pytest.mark.parametrize("usage", [None, {"include_usage": True}, {"include_usage": False}])
async def test_the_stream_is_one_engines(world: Any, path: str, usage: object) -> None:
    there: World = await world()
    await there.warm()
    more = {} if usage is None else {"stream_options": usage}
    for tokens in (2, 3, 17):
        record = await there.same(path, {**PATHS[path], **more, "max_tokens": tokens})
        assert record["first_token"] == "prefill"
        assert (record["prefill"], record["decode"], record["state"]) == ("P0", "D0", "done")
    p_leg, d_leg = legs(there.fakes[0])[-1].json, legs(there.fakes[1])[-1].json
    assert (p_leg["max_tokens"], p_leg["stream"], p_leg["temperature"]) == (1, True, 0)
    assert d_leg["max_tokens"] == 16
    params = d_leg["kv_transfer_params"]
    assert params["kvrelay"]["generated"] == 1
    ids = [*map(ord, "hello"), GENERATED]
    assert (d_leg["prompt"] if path == "/v1/completions" else params["prompt_token_ids"]) == ids


@BOTH
async def test_ends_of_every_kind_are_one_engines(world: Any, path: str) -> None:
    there: World = await world()
    await there.warm()
    for last in range(1, 5):
        for one in there.engines:
            one.stops_after = last
        record = await there.same(path, {**PATHS[path], "stream_options": {"include_usage": True}})
        assert record["first_token"] == ("ended" if last == 1 else "prefill")


async def test_a_chat_that_names_no_number_is_ended_by_the_context(world: Any) -> None:
    there: World = await world()
    for one in there.engines:
        one.max_model_len = 12
    await there.warm()
    for length, came in ((5, "prefill"), (10, "prefill"), (11, "length")):
        messages = [{"role": "user", "content": "x" * length}]
        record = await there.same("/v1/chat/completions", {**CHAT, "messages": messages})
        assert record["first_token"] == came


@BOTH
async def test_an_engines_own_limit_holds(world: Any, path: str) -> None:
    there: World = await world()
    for one in there.engines:
        one.max_output = 3
    await there.warm()
    assert (await there.same(path, PATHS[path]))["first_token"] == "prefill"
    assert (await there.same("/v1/chat/completions", CHAT))["first_token"] == "prefill"


@BOTH
async def test_the_client_has_the_token_before_d_has_said_anything(world: Any, path: str) -> None:
    """1. P answers. 2. The client reads the first token. 3. Only then does D answer."""
    there: World = await world()
    await there.warm()
    there.fakes[1].script(hang())
    async with await RawClient.open(there.port) as client:
        client.post(path, PATHS[path])
        status, headers = await client.head()
        assert (status, headers["x-kvrelay-decode"]) == (200, "d0")
        assert b" t0" in await client.chunk()
    await there.fakes[1].left_by(1)


async def test_what_makes_a_difference_leaves_the_token_to_d(world: Any) -> None:
    there: World = await world()
    await there.warm()
    path = "/v1/completions"
    there.prefills[0].texts = there.decodes[0].texts = there.right.texts = {0: "\ufffd"}
    assert (await there.same(path, COMPLETION))["first_token"] == "partial_text"
    there.prefills[0].texts = there.decodes[0].texts = there.right.texts = {}
    assert (await there.same(path, {**COMPLETION, "seed": 1}))["first_token"] == "sampling"
    assert (await there.same(path, {**COMPLETION, "unheard_of": 1}))["first_token"] == "field"
    assert (await there.same(path, {**COMPLETION, "max_tokens": 1}))["first_token"] == "max_tokens"
    there.prefills[0].usage_always = True
    assert (await there.same(path, COMPLETION))["first_token"] == "answer"
    answer = await post(there.port, path, {**COMPLETION, "stream": False})
    assert (await there.record(answer))["first_token"] is None
    scraped = (await get(there.port, "/metrics")).body.decode()
    for outcome in ("partial_text", "sampling", "field", "max_tokens", "answer"):
        assert f'kvrelay_router_first_tokens_total{{outcome="{outcome}"}} 1.0' in scraped


@pytest.mark.parametrize(
    ("name", "value", "path", "came"),
    [
        ("penalty", 0.5, "/v1/completions", "model"),
        ("parses_tools", True, "/v1/chat/completions", "model"),
        ("parses_tools", True, "/v1/completions", "prefill"),
    ],
)
async def test_what_engines_add_counts(world: Any, name: str, value: object, path: str, came: str) -> None:
    there: World = await world()
    for one in there.engines:
        setattr(one, name, value)
    await there.warm()
    assert (await there.same(path, PATHS[path]))["first_token"] == came


async def test_engines_that_add_different_things_do_not_continue_each_other(world: Any) -> None:
    there: World = await world()
    there.prefills[0].parses_tools = True
    for _ in range(20):
        await post(there.port, "/v1/completions", COMPLETION)
    assert (await there.same("/v1/completions", COMPLETION))["first_token"] == "unknown_model"


async def test_adapters_and_other_models_are_left_to_d(world: Any) -> None:
    there: World = await world()
    await there.warm()
    for _ in range(20):
        record = await there.same("/v1/completions", {**COMPLETION, "model": "an-adapter"})
        assert record["first_token"] == "unknown_model"


async def test_a_request_may_say_itself(world: Any) -> None:
    there: World = await world(first_token="decode")
    asked = "x-kvrelay-first-token: prefill\r\n"
    for _ in range(200):
        answer = await post(there.port, "/v1/completions", COMPLETION, headers=asked)
        if (await there.record(answer))["first_token"] == "prefill":
            break
    else:
        raise AssertionError("never from P")
    assert "x-kvrelay-first-token" not in legs(there.fakes[0])[-1].headers
    answer = await post(there.port, "/v1/completions", COMPLETION)
    assert (await there.record(answer))["first_token"] is None
    refused = await post(there.port, "/v1/completions", COMPLETION, headers="x-kvrelay-first-token: both\r\n")
    assert refused.status == 400
    assert b"legal: prefill, decode" in refused.body


async def test_another_d_goes_on_when_one_fails_before_it_said_anything(world: Any) -> None:
    there: World = await world(decodes=2)
    await there.warm()
    for behaviour, reason in ((broken(), "decode_connection_lost"), (fail(503), "decode_status_5xx")):
        there.fakes[1].script(behaviour)
        records = [await there.same("/v1/completions", COMPLETION) for _ in range(2)]
        assert [record["first_token"] for record in records] == ["prefill", "prefill"]
        detours = [one for record in records for one in record["detours"]]
        assert detours == [{"reason": reason, "worker": "D0"}]


async def test_when_no_d_goes_on_the_stream_ends_with_an_error(world: Any) -> None:
    there: World = await world(decodes=2)
    await there.warm()
    for fake in there.fakes[1:]:
        fake.script(fail(500))
    answer = await post(there.port, "/v1/completions", COMPLETION)
    first, error, end = answer.body.split(b"\n\n")
    assert b" t0" in first
    assert msgspec.json.decode(error.removeprefix(b"data: "))["error"]["code"] == "decode_failed"
    assert end == b""


async def test_a_d_that_refuses_to_go_on_ends_the_stream_with_an_error(world: Any) -> None:
    there: World = await world()
    await there.warm()
    there.fakes[1].script(fail(400, "no"))
    answer = await post(there.port, "/v1/completions", COMPLETION)
    assert answer.status == 200
    first, error, end = answer.body.split(b"\n\n")
    assert b" t0" in first
    assert msgspec.json.decode(error.removeprefix(b"data: "))["error"]["code"] == "decode_failed"
    assert end == b""
    assert (await there.record(answer))["state"] == "failed"


async def test_a_d_that_breaks_off_ends_the_stream_with_an_error(world: Any) -> None:
    there: World = await world()
    await there.warm()
    chunk = b'data: {"id":"c","object":"text_completion","created":2,"model":"m","choices":[]}\n\n'
    there.fakes[1].script(stream([chunk, b"data: {"], ending="drop"))
    answer = await post(there.port, "/v1/completions", COMPLETION)
    first, second, error, _ = answer.body.split(b"\n\n")
    assert b" t0" in first
    assert b'"created":1,' in second
    assert b"connection_lost" in error


async def test_another_p_gives_the_token_when_one_fails_and_none_is_no_harm(world: Any) -> None:
    there: World = await world(prefills=2)
    await there.warm()
    there.fakes[0].script(broken())
    there.fakes[1].script(broken())
    assert (await there.same("/v1/completions", COMPLETION))["first_token"] == "no_answer"
    for _ in range(2):
        assert (await there.same("/v1/completions", COMPLETION))["first_token"] == "prefill"
    there.fakes[0].script(fail(400))
    there.fakes[1].script(fail(400))
    for _ in range(2):
        assert (await there.same("/v1/completions", COMPLETION))["first_token"] == "no_answer"


async def test_many_at_once_are_each_their_own(world: Any) -> None:
    there: World = await world(prefills=2, decodes=2)
    await there.warm()
    bodies = [{**COMPLETION, "prompt": "x" * length, "max_tokens": 2 + length % 7} for length in range(1, 40)]
    records = await asyncio.gather(*(there.same("/v1/completions", body) for body in bodies))
    assert {record["first_token"] for record in records} == {"prefill"}


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
async def test_prompts_are_tokenised_once(world: Any, path: str, streamed: bool) -> None:
    there: World = await world(first_token="decode", tokenise="once")
    body = {**PATHS[path], "stream": streamed, "temperature": 0.7, "n": 1}
    ids = [*map(ord, "hello")]
    for _ in range(200):
        answer = await post(there.port, path, body)
        leg = legs(there.fakes[1])[-1].json
        assert (await there.record(answer))["first_token"] is None
        if (leg["prompt"] if path == "/v1/completions" else leg["kv_transfer_params"].get("prompt_token_ids")) == ids:
            break
    else:
        raise AssertionError("never by P alone")
    assert leg["max_tokens"] == 5
    assert leg["kv_transfer_params"]["kvrelay"].keys() == {"handover", "leg", "prefill", "worker", "policy", "attempt"}
    assert legs(there.fakes[0])[-1].json["return_token_ids"] is True
    assert "kvrelay_router_prompts_reused_total 1.0" in (await get(there.port, "/metrics")).body.decode()
    await post(there.port, path, {**body, "unheard_of": 1})
    assert "return_token_ids" not in legs(there.fakes[0])[-1].json


async def test_what_counts_for_the_threshold_is_when_the_client_got_its_first_token(world: Any) -> None:
    """1. The client has P's token. 2. D answers later. 3. The time to 1. is what this way is worth."""
    there: World = await world(routing=RoutingSettings(disaggregate_above="1"))
    await there.warm()
    there.service._disaggregator.routing.conditional = Conditional(noting := Noting(1))
    gate = asyncio.Event()

    async def late(exchange: Exchange) -> None:
        await gate.wait()
        await there.decodes[0].behave(exchange)

    there.fakes[1].script(late)
    async with await RawClient.open(there.port) as client:
        client.post("/v1/completions", COMPLETION)
        _, headers = await client.head()
        assert await client.chunk()
        gate.set()
        while await client.chunk():
            pass
    record = (await get(there.port, f"/kvrelay/handovers/{headers['x-kvrelay-handover']}")).json
    assert record["first_token"] == "prefill"
    stamps = record["timestamps"]
    (ttft_s,) = noting.times
    assert 0 < ttft_s < stamps["decode_begin"] - stamps["issued"]
