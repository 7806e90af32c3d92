"""KV-aware routing: events of fake publishers over real sockets, and where prompts go by them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from kvrelay.errors import BadRequestError, ConfigError, ConflictError
from kvrelay.router.core.fleet import Role, parse_address
from kvrelay.router.core.kv.index import Source
from kvrelay.router.core.kv.settings import KvSettings, parse_endpoints
from kvrelay.router.core.routing import RoutingSettings
from kvrelay.router.kv import token_ids

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.router.service import RouterService
    from kvrelay.testing.fake_engine import Exchange, FakeEngine

    from .conftest import StartEngine, StartRouter

pytest.importorskip("zmq")
from kvrelay.testing.fake_publisher import FakePublisher, removed, stored

PROMPT = list(range(64))
P1 = Source("P1")
Start = Callable[..., Awaitable["Fleet"]]


class Fleet:
    """Two prefill engines and a decode engine, of which P1 publishes; and a router that listens."""

    def __init__(self, service: RouterService, publisher: FakePublisher, engines: list[FakeEngine]) -> None:
        self.service = service
        self.publisher = publisher
        self.engines = engines

    async def ask(self, **fields: Any) -> httpx.Response:
        url = f"http://127.0.0.1:{self.service.port}/v1/completions"
        async with httpx.AsyncClient() as client:
            answer = await client.post(url, json={"model": "m", "max_tokens": 1, "prompt": [*PROMPT, 7], **fields})
        assert answer.status_code == 200
        return answer

    async def prefills(self, **fields: Any) -> set[str]:
        """Who prefills a prompt, of several times it is asked."""
        return {(await self.ask(**fields)).headers["x-kvrelay-prefill"] for _ in range(4)}

    async def record(self, answer: httpx.Response) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.service.port}/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}"
        async with httpx.AsyncClient() as client:
            found: dict[str, Any] = (await client.get(url)).json()
        return found

    def metric(self, name: str, *labels: str) -> float:
        labelled: Any = getattr(self.service._metrics.kv, name).labels(*(labels or ("P1", "0")))
        value: float = labelled.value
        return value

    async def holds(self, blocks: int) -> None:
        """Wait until P1 is known to hold so many blocks."""
        await self.until(lambda: self.index.num_blocks(P1) == blocks)

    @property
    def index(self) -> Any:
        assert self.service.kv is not None
        return self.service.kv.index

    @staticmethod
    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not true():  # noqa: ASYNC110 - what changes is counted, not told
                await asyncio.sleep(0.01)


async def tokenizing(exchange: Exchange) -> None:
    """As an engine whose tokens are characters."""
    request = exchange.request
    if request.target != "/tokenize":
        await exchange.engine.answer_well(exchange)
        return
    asked = request.json
    text = asked["prompt"] if "prompt" in asked else "".join(message["content"] for message in asked["messages"])
    exchange.answer(200, msgspec.json.encode({"count": len(text), "tokens": [ord(letter) for letter in text]}))


@pytest.fixture
async def fleet(engine: StartEngine, router: StartRouter) -> AsyncIterator[Start]:
    publishers: list[FakePublisher] = []

    async def start(
        publisher: FakePublisher | None = None, *, replays: bool = True, default: Any = None, **kv: Any
    ) -> Fleet:
        publishers.append(publisher or await FakePublisher.start())
        engines = [await engine(default=default) for _ in range(3)]
        address = f"P1={publishers[-1].endpoint}" + (f",{publishers[-1].replay}" if replays else "")
        settings = {"kv": KvSettings(events=(address,), **kv), "routing": RoutingSettings(prefill_policy="kv-aware")}
        service = await router(engines[:2], engines[2:], **settings)
        await publishers[-1].subscribed()
        return Fleet(service, publishers[-1], engines)

    yield start
    for publisher in publishers:
        await publisher.stop()


async def test_a_prompt_goes_where_its_kv_is(fleet: Start) -> None:
    started = await fleet()
    await started.publisher.publish(stored(PROMPT, block_size=16))
    await started.holds(4)
    assert await started.prefills() == {"P1"}
    assert started.metric("events") == 1
    assert started.metric("blocks") == 4
    assert started.metric("up") == 1
    assert (await started.record(await started.ask()))["token_ids"] == "request"


async def test_what_gives_way_is_known_no_longer(fleet: Start) -> None:
    started = await fleet()
    event = stored(PROMPT, block_size=16)
    await started.publisher.publish(event)
    await started.publisher.publish(removed(event["block_hashes"][1:]))
    await started.holds(1)
    await started.publisher.publish({"type": "AllBlocksCleared"})
    await started.holds(0)


async def test_a_router_that_comes_late_learns_what_is_there(fleet: Start) -> None:
    publisher = await FakePublisher.start()
    publisher.lose(stored(PROMPT, block_size=16))
    started = await fleet(publisher)
    await started.holds(4)
    assert publisher.asked[0] == 0


async def test_what_was_missed_is_asked_for(fleet: Start) -> None:
    started = await fleet()
    first = stored(PROMPT[:16], block_size=16)
    await started.publisher.publish(first)
    await started.holds(1)
    started.publisher.lose(stored(PROMPT[16:32], block_size=16, parent=first["block_hashes"][0]))
    await started.publisher.publish(stored([5] * 16, block_size=16))
    await started.holds(3)
    assert started.metric("gaps") == 1
    assert started.publisher.asked[-1] == 0


async def test_what_was_missed_and_cannot_be_had_makes_all_forgotten(fleet: Start) -> None:
    started = await fleet(await FakePublisher.start(kept=1))
    await started.publisher.publish(stored(PROMPT, block_size=16))
    await started.holds(4)
    started.publisher.lose(removed([b"?"]))
    await started.publisher.publish(stored([5] * 16, block_size=16))
    await started.holds(1)
    assert started.metric("forgotten", "P1", "0", "gap") == 1


async def test_without_replay_a_gap_makes_all_forgotten(fleet: Start) -> None:
    started = await fleet(replays=False)
    await started.publisher.publish(stored(PROMPT, block_size=16))
    await started.holds(4)
    started.publisher.lose(removed([b"?"]))
    await started.publisher.publish(stored([5] * 16, block_size=16))
    await started.holds(1)


async def test_an_engine_that_restarts_is_known_anew(fleet: Start) -> None:
    started = await fleet()
    await started.publisher.publish(stored(PROMPT, block_size=16))
    await started.holds(4)
    await started.publisher.restart()
    started.publisher.lose(stored([5] * 16, block_size=16))
    await started.holds(1)
    await started.until(lambda: started.metric("up") == 1)
    assert started.metric("forgotten", "P1", "0", "restart") == 1


async def test_an_engine_that_leaves_is_forgotten_with_its_series(fleet: Start) -> None:
    started = await fleet()
    await started.publisher.publish(stored(PROMPT, block_size=16))
    await started.holds(4)
    started.service.fleet.remove("P1", 5.0)
    await started.until(lambda: not started.index.sources)
    assert await started.prefills() == {"P0"}
    async with httpx.AsyncClient() as client:
        shown = (await client.get(f"http://127.0.0.1:{started.service.port}/metrics")).text
    assert "kvrelay_router_kv_blocks{" not in shown


async def test_an_engine_that_joins_is_listened_to_and_one_that_publishes_elsewhere_known_anew(fleet: Start) -> None:
    started, other = await fleet(), await FakePublisher.start()
    keeper = started.service.fleet
    await other.publish(stored(PROMPT, block_size=16))
    await started.publisher.publish(stored(PROMPT[:16], block_size=16))
    await started.holds(1)
    try:
        keeper.remove("P0", 0.0)
        await started.until(lambda: len(keeper.engines) == 2)
        url = parse_address(started.engines[0].url)
        keeper.add(Role.PREFILL, url, kv_events=parse_endpoints([f"{other.endpoint},{other.replay}"]))
        await started.until(lambda: started.index.num_blocks(Source("P2")) == 4)
        assert await started.prefills() == {"P2"}
        assert started.index.num_blocks(P1) == 1
        with pytest.raises(ConflictError, match="P2 publishes at"):
            keeper.set_kv_events("P1", parse_endpoints([other.endpoint]))
        keeper.set_kv_events("P2", ())
        await started.until(lambda: started.index.sources == (P1,))
        keeper.set_kv_events("P1", parse_endpoints([f"{other.endpoint},{other.replay}"]))
        await started.holds(4)
        keeper.set_role("P2", Role.DECODE)
        assert started.index.num_blocks(P1) == 4
    finally:
        await other.stop()


async def test_a_new_configuration_says_who_publishes_where_and_what_stays_is_not_forgotten(fleet: Start) -> None:
    """1. P1 publishes. 2. A configuration names another publisher, of P0: both are known. 3. One without P0, and with
    P0's publisher for a new decode engine: P0's knowledge is gone at once, P1's was never.
    """
    started, other = await fleet(), await FakePublisher.start()
    service = started.service
    first, second, third = (parse_address(engine.url) for engine in started.engines)
    here = parse_endpoints([f"{started.publisher.endpoint},{started.publisher.replay}"])
    there = parse_endpoints([f"{other.endpoint},{other.replay}"])
    await other.publish(stored(PROMPT, block_size=16))
    await started.publisher.publish(stored(PROMPT[:16], block_size=16))
    await started.holds(1)
    forgotten = started.metric("forgotten", "P1", "0", "restart")
    try:
        config = replace(service.config, kv_events={second: here, first: there})
        assert service.apply(config).settings == ["kv_events"]
        await started.until(lambda: started.index.num_blocks(Source("P0")) == 4)
        new = parse_address(f"http://127.0.0.1:{started.engines[0].port}/other")
        config = replace(config, prefills=(second,), decodes=(third, new), kv_events={second: here, new: there})
        service.apply(config)
        assert Source("P0") not in started.index.sources
        await started.until(lambda: started.index.num_blocks(Source("D1")) == 4)
        assert started.index.num_blocks(P1) == 1
        assert started.metric("forgotten", "P1", "0", "restart") == forgotten
        service.fleet.add(Role.PREFILL, parse_address("http://127.0.0.1:1"), kv_events=parse_endpoints(["tcp://h:1"]))
        with pytest.raises(ConfigError, match="which was added, publishes at tcp://h:1 already"):
            service.apply(replace(config, kv_events={second: parse_endpoints(["tcp://h:1"])}))
    finally:
        await other.stop()


async def test_where_no_policy_asks_nobody_listens(engine: StartEngine, router: StartRouter) -> None:
    service = await router([await engine()], [await engine()])
    with pytest.raises(BadRequestError, match="have no effect without --policy kv-aware"):
        service.fleet.set_kv_events("P0", parse_endpoints(["tcp://h:1"]))


async def test_what_cannot_be_read_makes_all_forgotten(fleet: Start) -> None:
    started = await fleet()
    await started.publisher.publish(stored(PROMPT, block_size=16))
    await started.holds(4)
    await started.publisher.garble(b"\xc1 not MessagePack")
    await started.holds(0)
    assert started.metric("forgotten", "P1", "0", "unreadable") == 1
    await started.publisher.publish(stored([5] * 16, block_size=16))
    await started.holds(1)


async def test_text_is_tokenised_by_an_engine_once(fleet: Start) -> None:
    started = await fleet(default=tokenizing, tokenize_timeout_s=10.0)
    text = "What is the capital of France? " * 4
    await started.publisher.publish(stored([ord(letter) for letter in text], block_size=4))
    await started.holds(len(text) // 4)
    first = await started.ask(prompt=text)
    again = await started.ask(prompt=text)
    assert {answer.headers["x-kvrelay-prefill"] for answer in (first, again)} == {"P1"}
    assert [(await started.record(answer))["token_ids"] for answer in (first, again)] == ["engine", "memory"]
    asked = [request for fake in started.engines for request in fake.requests if request.target == "/tokenize"]
    assert [request.json for request in asked] == [{"model": "m", "prompt": text}]


async def test_an_engine_that_does_not_answer_in_time_costs_a_choice_by_text(
    fleet: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_ids, "FIRST_PAUSE_S", 1_000.0)
    monkeypatch.setattr(token_ids, "LONGEST_PAUSE_S", 1_000.0)

    async def slow(exchange: Exchange) -> None:
        if exchange.request.target == "/tokenize":
            await exchange.gone.wait()
        else:
            await exchange.engine.answer_well(exchange)

    started = await fleet(default=slow, tokenize_timeout_s=0.01)
    sources = [(await started.record(await started.ask(prompt=f"{number} text")))["token_ids"] for number in range(5)]
    assert sources == ["failed"] * 3 + ["circuit_open"] * 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt": ["one", "two"]}, "unsupported"),
        ({"prompt": "text", "truncate_prompt_tokens": 3}, "unsupported"),
        ({"prompt": "text"}, "off"),
    ],
)
async def test_what_has_no_token_ids_goes_by_text(fleet: Start, fields: dict[str, Any], why: str) -> None:
    started = await fleet(token_ids="off")
    assert (await started.record(await started.ask(**fields)))["token_ids"] == why
    assert not [request for fake in started.engines for request in fake.requests if request.target == "/tokenize"]


async def test_completions_are_tokenised_here_where_a_tokenizer_is_given(fleet: Start, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "to", "be", "or", "not"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    started = await fleet(tokenizer=str(tmp_path), token_ids="off")
    await started.publisher.publish(stored([1, 2, 3, 4] * 4, block_size=4))
    await started.holds(4)
    text = "to be or not " * 4 + "to be"
    first, again = await started.ask(prompt=text), await started.ask(prompt=text)
    assert {answer.headers["x-kvrelay-prefill"] for answer in (first, again)} == {"P1"}
    assert [(await started.record(answer))["token_ids"] for answer in (first, again)] == ["tokenizer", "memory"]


class Stuck:
    """A tokenizer that does not come to an end before it is told."""

    def __init__(self) -> None:
        self.told = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:  # noqa: ARG002 - as the package's
        self.told.wait(30)
        raise RuntimeError("told")


class Broken:
    """A tokenizer that fails."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:  # noqa: ARG002 - as the package's
        raise Exception("no merge for this")  # noqa: TRY002 - as the package does


async def test_a_tokenizer_that_takes_too_long_or_fails_costs_a_choice_by_text_in_time(
    fleet: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck()
    try:
        for tokenizer in (stuck, Broken()):
            monkeypatch.setattr(token_ids, "load_tokenizer", lambda _, given=tokenizer: given)
            started = await fleet(tokenizer="any", tokenize_timeout_s=0.05)
            answers = await asyncio.gather(*(started.ask(prompt=f"text {number}") for number in range(8)))
            assert [(await started.record(answer))["token_ids"] for answer in answers] == ["failed"] * 8
            assert started.metric("token_ids", "failed") == 8
    finally:
        stuck.told.set()


@pytest.mark.parametrize(("path", "problem"), [("", "there is no"), ("tokenizer.json", "--tokenizer")])
async def test_a_tokenizer_that_cannot_be_had_is_refused(fleet: Start, tmp_path: Path, path: str, problem: str) -> None:
    pytest.importorskip("tokenizers")
    if path:
        (tmp_path / path).write_text("{}")
    with pytest.raises(ConfigError, match=problem):
        await fleet(tokenizer=str(tmp_path / path))


async def test_a_router_without_pyzmq_says_what_to_install(fleet: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = await FakePublisher.start()
    try:
        monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
        with pytest.raises(ConfigError, match=r"install kvrelay\[kv-events\]"):
            await fleet(publisher)
    finally:
        monkeypatch.undo()
