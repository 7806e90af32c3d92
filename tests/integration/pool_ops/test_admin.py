"""The admin API of a real pool process, as `curl` would see it."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.testing.talker import Talker
from kvrelay.wire import messages as m
from kvrelay.wire.messages import Counted, CountPrefix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.integration.pool_ops.conftest import Command, Serve, Served


@pytest.fixture
def pool(serve: Serve, tmp_path: Path) -> Served:
    (tmp_path / "admin-token").write_text("sesame")
    return serve("--admin-listen", "127.0.0.1:0", "--admin-token-file", str(tmp_path / "admin-token"))


@pytest.fixture
def api(pool: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pool.admin, headers={"Authorization": "Bearer sesame"}, timeout=10) as client:
        yield client


def test_probes_need_no_token_and_everything_else_does(pool: Served) -> None:
    for path in ("/health", "/ready", "/openapi.json"):
        assert httpx.get(pool.admin + path).status_code == 200
    for path in ("/stat", "/metrics", "/objects", "/tenants", "/engines", "/tiers"):
        assert httpx.get(pool.admin + path).status_code == 401
        assert httpx.get(pool.admin + path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert "sesame" not in pool.log


def test_a_pool_logs_nothing_of_the_server_below_its_admin_api(pool: Served) -> None:
    assert httpx.get(pool.admin + "/health").status_code == 200
    assert "uvicorn" not in pool.log


def test_objects_are_seen_deleted_and_purged(pool: Served, api: httpx.Client) -> None:
    with pool.connect() as client:
        client.put_many([(b"key-%d" % number, memoryview(bytes(1000))) for number in range(5_000)])
        prefix = client.match_prefix([b"key-7"], lease_s=60)
        seen: set[str] = set()
        cursor = 0
        while True:
            page = api.get("/objects", params={"limit": 512, "cursor": cursor}).json()
            seen |= {found["key"] for found in page["objects"]}
            cursor = page["cursor"]
            if not cursor:
                break
        assert seen == {(b"key-%d" % number).hex() for number in range(5_000)}
        assert api.delete(f"/objects/{b'key-1'.hex()}").json() == {"count": 1}
        assert api.delete(f"/objects/{b'key-1'.hex()}").status_code == 404
        assert client.exists([b"key-1", b"key-2"]) == [False, True]
        assert api.post("/purge", json={"tenant": "default"}).json() == {"count": 4_998, "kept": 1}
        assert client.exists([b"key-2", b"key-7"]) == [False, True]
        client.release(prefix)


def test_a_drain_is_begun_seen_and_taken_back(pool: Served, api: httpx.Client) -> None:
    from kvrelay.errors import DrainingError

    with pool.connect() as client:
        client.put(b"k", b"v")
        prefix = client.match_prefix([b"k"], lease_s=60)
        assert api.post("/drain").json() == {"draining": True, "leases": 1, "unsealed": 0, "tickets": 0, "sending": 0}
        assert (api.get("/health").status_code, api.get("/ready").status_code) == (200, 503)
        with pytest.raises(DrainingError):
            client.put(b"new", b"v")
        client.release(prefix)
        assert api.get("/drain").json()["leases"] == 0
        assert api.delete("/drain").json()["draining"] is False
        client.put(b"new", b"v")
        assert api.get("/ready").status_code == 200


def test_an_answer_that_nobody_takes_is_still_held(pool: Served, api: httpx.Client) -> None:
    size = 32 << 20
    with pool.connect() as client, Talker(pool.tcp) as slow:
        client.put(b"large", bytes(size))
        slow.say(m.Get(2, [b"large"], size.to_bytes(8, "little")))
        while not client.stat()["sending"]:
            pass
        held = api.post("/drain").json()
        assert (held["sending"], held["leases"]) == (1, 0)
        assert len(slow.hear()[1]) == size
        while client.stat()["sending"]:
            pass
        assert api.get("/drain").json()["sending"] == 0


def test_quotas_change_while_it_runs(pool: Served, api: httpx.Client) -> None:
    assert api.put("/tenants/default/quota", json={"quota_bytes": 64 << 10}).status_code == 200
    with pool.connect() as client:
        for number in range(8):
            client.put(b"%d" % number, bytes(16 << 10))
        assert sum(client.exists([b"%d" % number for number in range(8)])) == 4
        (tenant,) = api.get("/tenants").json()["tenants"]
    assert tenant == {
        "name": "default", "objects": 4, "used_bytes": 64 << 10, "connections": 1,
        "quota_bytes": 64 << 10, "max_objects": None, "max_connections": None, "shm": True,
    }  # fmt: skip


def test_engines_are_listed(pool: Served, api: httpx.Client) -> None:
    with pool.connect() as client:
        client.register("P0", "prefill", "ns", {"model": "m"})
        assert api.get("/engines").json() == {
            "engines": [{"engine": "P0", "role": "prefill", "namespace": "ns", "facts": {"model": "m"}}]
        }


def scrape(api: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name.removeprefix("kvrelay_pool_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_a_scrape_tells_what_happened(pool: Served, api: httpx.Client) -> None:
    with pool.connect(pool.tcp) as client:
        client.put_many([(b"%d" % number, memoryview(bytes(8192))) for number in range(10)])
        into = [memoryview(bytearray(8192))]
        assert client.get_many([b"3"], into) == 1
        client.start(CountPrefix(0, [b"absent"]), Counted).result(5.0)
        found = scrape(api)
        assert found["objects", ()] == 10
        received = found["bytes_total", (("direction", "received"), ("transport", "tcp"))]
        assert 81_920 <= received <= 82_000  # checksums may follow the objects
        assert found["bytes_total", (("direction", "sent"), ("transport", "tcp"))] == 8_192
        assert found["hits_total", (("tier", "dram"),)] == 1
        assert found["misses_total", ()] == 1
        assert found["connections", ()] == 1
        assert found["tenant_used_bytes", (("tenant", "default"),)] == 81_920
        assert found["process_resident_memory_bytes", ()] > 64 << 20
        operations = {dict(labels)["operation"] for name, labels in found if name == "request_seconds_count"}
        assert "hello" in operations
        assert len(operations) >= 3
        assert all(value > 0 for (name, _), value in found.items() if name == "request_seconds_sum")


def test_the_command_line_drains_over_the_api(pool: Served, kvrelay: Command, tmp_path: Path) -> None:
    token = str(tmp_path / "admin-token")
    done = kvrelay("pool", "drain", pool.admin, "--admin-token-file", token, "--wait", "5")
    assert (done.returncode, done.stdout) == (0, "draining: nothing held\n")
    with pool.connect() as client:
        assert client.stat()["draining"] == 1
        done = kvrelay("pool", "drain", pool.admin, "--admin-token-file", token, "--resume")
        assert (done.returncode, done.stdout) == (0, "taking new objects: nothing held\n")
        client.put(b"k", b"v")
        lease = client.match_prefix([b"k"], lease_s=60)
        done = kvrelay("pool", "drain", pool.admin, "--admin-token-file", token, "--wait", "0.3")
        assert done.returncode == 1
        assert "after 0.3 s the pool still holds 1 leases" in done.stderr
        client.release(lease)
    refused = kvrelay("pool", "drain", pool.admin)
    assert refused.returncode == 1
    assert "no bearer token was presented" in refused.stderr
    assert kvrelay("pool", "drain", "tcp:127.0.0.1:1").returncode == 2
    assert kvrelay("pool", "drain", "http://127.0.0.1:1").returncode == 1


def request_of(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: pool\r\nAuthorization: Bearer sesame\r\n\r\n".encode()


def test_admin_clients_that_never_read_or_never_finish_asking_do_not_stall_data(pool: Served) -> None:
    """Forty of them ask for large pages again and again and read nothing; ten stop amid a request."""
    with pool.connect(pool.tcp) as client:
        client.put_many([(b"%032d" % number, memoryview(bytes(64))) for number in range(8_000)])
        data = bytes(64 << 10)
        address = ("127.0.0.1", httpx.URL(pool.admin).port or 0)
        slow = [socket.create_connection(address) for _ in range(50)]
        for sock in slow[:40]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(request_of("/objects?limit=512") * 4)
        for sock in slow[40:]:
            sock.sendall(request_of("/stat")[:30])
        for _ in range(400):
            client.put(b"k", data)
            assert client.get(b"k") == data
            client.delete([b"k"])
        for sock in slow:
            sock.close()


def test_openapi_describes_what_is_documented(pool: Served) -> None:
    described: dict[str, Any] = json.loads(httpx.get(f"{pool.admin}/openapi.json").text)
    assert described["openapi"].startswith("3.")
    assert {"/health", "/objects/{key}", "/drain", "/tenants/{name}/quota"} <= described["paths"].keys()
