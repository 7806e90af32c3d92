"""Which of a client's headers reach engines, what they are told by them, and what every answer says of its request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.router.core.observing.forwarding import HeaderSettings
from kvrelay.router.core.observing.settings import Observing
from kvrelay.testing.fake_engine import fail, hang
from kvrelay.testing.raw_http import get, post

if TYPE_CHECKING:
    from kvrelay.router.service import RouterService

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize")
ASK = {"prompt": "a", "messages": [], "input": "a", "max_tokens": 1}
SENT = "authorization: Bearer k\r\nx-tenant-id: t\r\nx-internal: i\r\nx-vllm-priority: 3\r\n"
PAGE = Path(__file__).parents[3] / "docs/router-observability.md"


def read_by_vllm() -> list[str]:
    """The headers of the page's table."""
    section = PAGE.read_text().partition("## What engines read")[2].partition("\n## ")[0]
    return [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]


async def asked(port: int, path: str, engines: list[Any], headers: str) -> list[dict[str, str]]:
    await post(port, path, ASK, headers=headers)
    return [engine.requests[-1].headers for engine in engines if engine.requests]


@pytest.mark.parametrize("path", PATHS)
async def test_what_vllm_reads_reaches_every_engine_asked(pair: Any, path: str) -> None:
    *engines, port = pair
    values = {name: f"v-{name}" for name in read_by_vllm() if name != "content-type"}
    assert {"authorization", "traceparent", "tracestate", "x-request-id", "x-data-parallel-rank"} <= values.keys()
    legs = await asked(port, path, engines, "".join(f"{name}: {value}\r\n" for name, value in values.items()))
    assert legs
    for leg in legs:
        assert {name: leg.get(name) for name in values} == values
        assert leg["content-type"] == "application/json"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("rules", "left"),
    [
        (HeaderSettings(drop=("Authorization", "x-internal")), {"x-tenant-id", "x-vllm-priority"}),
        (HeaderSettings(forward=("x-tenant-*",)), {"x-tenant-id"}),
        (HeaderSettings(forward=("*",), drop=("x-*",)), {"authorization"}),
    ],
)
async def test_rules_hold_on_every_way_to_an_engine(
    engine: Any, router: Any, path: str, rules: HeaderSettings, left: set[str]
) -> None:
    engines = [await engine(), await engine()]
    service: RouterService = await router(engines[:1], engines[1:], observing=Observing(headers=rules))
    legs = await asked(service.port, path, engines, SENT)
    assert legs
    for leg in legs:
        assert leg.keys() & {"authorization", "x-tenant-id", "x-internal", "x-vllm-priority"} == left
        assert leg["content-type"] == "application/json"
        assert leg["x-request-id"]


async def test_no_rule_lets_a_header_about_the_connection_through(engine: Any, router: Any) -> None:
    engines = [await engine(), await engine()]
    rules = Observing(headers=HeaderSettings(forward=("*", "te", "upgrade", "x-hop")))
    service: RouterService = await router(engines[:1], engines[1:], observing=rules)
    hop = "connection: x-hop\r\nx-hop: 1\r\nte: trailers\r\nproxy-authorization: b\r\nkeep-alive: timeout=5\r\n"
    for leg in await asked(service.port, "/v1/completions", engines, hop):
        assert not leg.keys() & {"connection", "x-hop", "te", "proxy-authorization", "keep-alive", "expect"}


@pytest.mark.parametrize("path", [*PATHS, "/nowhere", "/kvrelay/handovers/x"])
async def test_every_answer_names_its_request(pair: Any, path: str) -> None:
    _, _, port = pair
    assert (await post(port, path, ASK, headers="x-request-id: mine\r\n")).headers["x-request-id"] == "mine"
    assert (await post(port, path, b"no json")).headers["x-request-id"]


async def test_a_request_may_be_named_by_another_header(engine: Any, router: Any) -> None:
    engines = [await engine(), await engine()]
    naming = HeaderSettings(request_id=("X-Correlation-Id", "request-id"), drop=("request-id",))
    service: RouterService = await router(engines[:1], engines[1:], observing=Observing(headers=naming))
    for sent, name in (
        ("request-id: r\r\nx-correlation-id: c\r\n", "c"),
        ("request-id: r\r\n", "r"),
        ("x-correlation-id: c\r\nx-request-id: x\r\n", "x"),
    ):
        legs = await asked(service.port, "/v1/completions", engines, sent)
        assert [leg["x-request-id"] for leg in legs] == [name, name]
        assert not any("request-id" in leg for leg in legs)


async def test_own_pages_and_models_name_their_request_too(pair: Any) -> None:
    _, _, port = pair
    for path in ("/health", "/metrics", "/v1/models"):
        assert (await get(port, path)).headers["x-request-id"]


async def test_an_engine_and_its_client_know_a_passed_on_request_by_one_name(pair: Any) -> None:
    _, decode, port = pair
    answer = await post(port, "/v1/embeddings", ASK)
    assert decode.requests[0].headers["x-request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_errors_of_engines_say_who_answered_and_for_which_hand_over(pair: Any, status: int) -> None:
    _, decode, port = pair
    decode.script(fail(status))
    answer = await post(port, "/v1/completions", ASK)
    assert answer.status == status
    assert answer.headers["x-kvrelay-handover"] == answer.headers["x-request-id"]
    assert (answer.headers["x-kvrelay-prefill"], answer.headers["x-kvrelay-decode"]) == ("p0", "d0")


async def test_an_error_of_the_routers_own_names_the_hand_over(engine: Any, router: Any) -> None:
    decode = await engine(default=hang())
    service: RouterService = await router([await engine()], [decode], decode_timeout_s=0.1)
    answer = await post(service.port, "/v1/completions", ASK)
    assert answer.status == 504
    assert answer.headers["x-kvrelay-decode"] == "d0"
    assert answer.headers["x-kvrelay-handover"]


@pytest.mark.parametrize("status", [200, 400, 503])
async def test_passed_on_answers_say_which_engine_it_was(pair: Any, status: int) -> None:
    _, decode, port = pair
    if status != 200:
        decode.script(fail(status))
    answer = await post(port, "/v1/embeddings", ASK)
    assert (answer.status, answer.headers.get("x-kvrelay-decode")) == (status, "d0")
