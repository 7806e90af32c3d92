"""The admin API's answers, with and without a token, right and wrong; and that they are what its description says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest
from fastapi.routing import APIRoute

from kvrelay.admin.bridge import Bridge
from kvrelay.pool.admin.app import make_app
from kvrelay.pool.latency import Latencies
from kvrelay.pool.metrics import PoolMetrics
from kvrelay.pool.traffic import Traffic

if TYPE_CHECKING:
    import asyncio

    from kvrelay.testing.fake_control import FakeControl

OPEN = ["/health", "/ready"]
CALLS = [
    ("GET", "/health", "/health"),
    ("GET", "/ready", "/ready"),
    ("GET", "/stat", "/stat"),
    ("GET", "/metrics", "/metrics"),
    ("GET", "/objects?limit=2", "/objects"),
    ("DELETE", "/objects/00ff", "/objects/{key}"),
    ("POST", "/purge", "/purge"),
    ("POST", "/drain", "/drain"),
    ("GET", "/drain", "/drain"),
    ("DELETE", "/drain", "/drain"),
    ("GET", "/tenants", "/tenants"),
    ("GET", "/tenants/b/quota", "/tenants/{name}/quota"),
    ("PUT", "/tenants/b/quota", "/tenants/{name}/quota"),
    ("GET", "/engines", "/engines"),
    ("GET", "/tiers", "/tiers"),
]  # fmt: skip
BODIES = {"/purge": {"tenant": "b"}, "/tenants/b/quota": {"quota_bytes": 4096}}


async def send(api: httpx.AsyncClient, method: str, url: str) -> httpx.Response:
    return await api.request(method, url, json=BODIES.get(url) if method in {"POST", "PUT"} else None)


def check_body(description: dict[str, Any], path: str, method: str, answer: httpx.Response) -> None:
    """Fail unless the body is what the description says of this answer."""
    content = description["paths"][path][method.lower()]["responses"][str(answer.status_code)]["content"]
    if "application/json" not in content:
        assert answer.headers["content-type"].split(";")[0] in {kind.split(";")[0] for kind in content}
        return
    schema = content["application/json"]["schema"] | {"components": description["components"]}
    jsonschema.validate(answer.json(), schema)


async def test_every_call_answers_what_the_description_says(api: httpx.AsyncClient, control: FakeControl) -> None:
    control.tenants_by_name["default"].objects = {b"\x00\xff": 10, b"k1": 20, b"k2": 30}
    description = (await api.get("/openapi.json")).json()
    called = set()
    for method, url, path in CALLS:
        answer = await send(api, method, url)
        assert answer.status_code == 200, answer.text
        check_body(description, path, method, answer)
        called.add((path, method.lower()))
    told = {(path, method) for path, methods in description["paths"].items() for method in methods}
    assert called == told


@pytest.mark.parametrize(("method", "url", "path"), CALLS)
async def test_without_the_token_only_probes_are_answered(
    api: httpx.AsyncClient, control: FakeControl, method: str, url: str, path: str
) -> None:
    description = (await api.get("/openapi.json")).json()
    for authorization in (None, "Bearer wrong", "Basic YWRtaW46dG9rZW4=", "Bearer", "admin token"):
        api.headers.pop("Authorization", None)
        headers = {"Authorization": authorization} if authorization else None
        answer = await api.request(method, url, json=BODIES.get(url), headers=headers)
        assert answer.status_code == (200 if path in OPEN else 401)
        if path not in OPEN:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "unauthorized"
            assert "admin token" not in answer.json()["error"]["message"].replace("the admin token", "")
            check_body(description, path, method, answer)
    assert not control.draining


async def test_without_a_configured_token_everybody_is_answered(
    control: FakeControl, pool_loop: asyncio.AbstractEventLoop
) -> None:
    app = make_app(control, Bridge(pool_loop), PoolMetrics(control, Latencies(), Traffic()).snapshot, None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pool") as client:
        assert (await client.get("/stat")).status_code == 200


@pytest.mark.parametrize(
    ("method", "url", "body", "status", "code"),
    [
        ("GET", "/objects?tenant=nobody", None, 404, "not_found"),
        ("GET", "/objects?limit=0", None, 422, "bad_request"),
        ("GET", "/objects?limit=513", None, 422, "bad_request"),
        ("GET", "/objects?prefix=xyz", None, 422, "bad_request"),
        ("GET", "/objects?cursor=-1", None, 422, "bad_request"),
        ("DELETE", "/objects/0", None, 422, "bad_request"),
        ("DELETE", f"/objects/{'00' * 65}", None, 422, "bad_request"),
        ("DELETE", "/objects/abcd", None, 404, "not_found"),
        ("POST", "/purge", None, 422, "bad_request"),
        ("POST", "/purge", {"tenant": "nobody"}, 404, "not_found"),
        ("POST", "/purge", {"tenant": "b", "force": True}, 422, "bad_request"),
        ("PUT", "/tenants/b/quota", {"quota_bytes": 0}, 422, "bad_request"),
        ("PUT", "/tenants/b/quota", {"max_objects": 0}, 422, "bad_request"),
        ("PUT", "/tenants/b/quota", {"max_connections": -1}, 422, "bad_request"),
        ("PUT", "/tenants/b/quota", {}, 422, "bad_request"),
        ("PUT", "/tenants/nobody/quota", {"quota_bytes": 1}, 404, "not_found"),
        ("GET", "/tenants/nobody/quota", None, 404, "not_found"),
        ("GET", "/nothing", None, 404, "not_found"),
        ("POST", "/stat", None, 405, "bad_request"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_with_a_code_and_a_reason(
    api: httpx.AsyncClient, method: str, url: str, body: Any, status: int, code: str
) -> None:
    answer = await api.request(method, url, json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["message"]


async def test_objects_come_in_pages_until_the_cursor_is_zero(api: httpx.AsyncClient, control: FakeControl) -> None:
    control.tenants_by_name["b"].objects = {b"key-%d" % number: number + 1 for number in range(5)}
    found, cursor = [], 0
    for _ in range(3):
        page = (await api.get("/objects", params={"tenant": "b", "limit": 2, "cursor": cursor})).json()
        found += [(bytes.fromhex(o["key"]), o["size_bytes"]) for o in page["objects"]]
        cursor = page["cursor"]
    assert cursor == 0
    assert found == [(b"key-%d" % number, number + 1) for number in range(5)]
    prefixed = await api.get("/objects", params={"tenant": "b", "prefix": b"key-3".hex()})
    assert [o["key"] for o in prefixed.json()["objects"]] == [b"key-3".hex()]


async def test_a_purge_takes_many_short_turns_and_spares_what_is_held(
    api: httpx.AsyncClient, control: FakeControl
) -> None:
    control.tenants_by_name["b"].objects = {b"%d" % number: 1 for number in range(7)}
    control.tenants_by_name["b"].held = {b"3"}
    answer = await api.post("/purge", json={"tenant": "b"})
    assert answer.json() == {"count": 6, "kept": 1}
    assert list(control.tenants_by_name["b"].objects) == [b"3"]


async def test_a_draining_pool_is_alive_and_not_ready(api: httpx.AsyncClient, control: FakeControl) -> None:
    control.values |= {"leases": 4, "sending": 3}
    answer = await api.post("/drain")
    assert answer.json() == {"draining": True, "leases": 4, "unsealed": 0, "tickets": 0, "sending": 3}
    assert (await api.get("/health")).status_code == 200
    not_ready = await api.get("/ready")
    assert (not_ready.status_code, not_ready.json()["error"]["code"]) == (503, "unavailable")
    assert (await api.delete("/drain")).json()["draining"] is False
    assert (await api.get("/ready")).status_code == 200


async def test_a_quota_is_set_read_and_lifted(api: httpx.AsyncClient) -> None:
    there: dict[str, int | None] = {"quota_bytes": None, "max_objects": None, "max_connections": None}
    changes: list[dict[str, int | None]] = [
        {"quota_bytes": 4096},
        {"max_objects": 7},
        {"max_connections": 2, "max_objects": None},
        {"quota_bytes": None, "max_connections": None},
    ]
    for change in changes:
        there |= change
        answer = await api.put("/tenants/default/quota", json=change)
        assert (answer.status_code, answer.json()) == (200, there), "what is not named stays"
        assert (await api.get("/tenants/default/quota")).json() == there


def test_every_route_has_a_summary_and_a_typed_answer(
    control: FakeControl, pool_loop: asyncio.AbstractEventLoop
) -> None:
    app = make_app(control, Bridge(pool_loop), PoolMetrics(control, Latencies(), Traffic()).snapshot, None)
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    assert len(routes) == len(CALLS)
    for route in routes:
        assert route.description, route.path
        assert route.response_model is not None or route.path == "/metrics"
