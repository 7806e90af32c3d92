"""Traces: continued from the client, carried to both engines, sent to a collector over OTLP/HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.router import tracing
from kvrelay.router.config import RouterSettings, check_settings
from kvrelay.router.core.lifecycle import TIMESTAMPS
from kvrelay.router.core.observing.settings import Observing
from kvrelay.testing.fake_engine import fail
from kvrelay.testing.fake_tickets import FakePool, a_proof
from kvrelay.testing.otlp_collector import Collector, attributes
from kvrelay.testing.raw_http import get, post

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.router.service import RouterService

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"traceparent: 00-{TRACE}-{SPAN}-01\r\ntracestate: vendor=1\r\n"
PATH = "/v1/completions"
ASK = {"prompt": "a", "max_tokens": 2, "model": "m"}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the exporter is built on


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, what was made arrives."""
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 60.0)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


async def test_one_trace_from_the_client_to_both_engines(engine: Any, router: Any, collector: Collector) -> None:
    prefill, decode = await engine(), await engine()
    service: RouterService = await router([prefill], [decode], observing=Observing(otlp_endpoint=collector.url))
    answer = await post(service.port, PATH, ASK, headers=SAMPLED + "x-request-id: mine\r\n")
    await service.stop()

    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "kvrelay-router"
    names = ["POST /v1/completions", "queue", "prefill P0", "decode D0", "migration"]
    assert sorted(span.name for span in collector.spans) == sorted(names)
    request, queue, p_leg, d_leg, migration = [collector.named(name) for name in names]
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert request.parent_span_id.hex() == SPAN
    assert {span.parent_span_id for span in (queue, p_leg, d_leg)} == {request.span_id}
    assert migration.parent_span_id == d_leg.span_id

    carried = [(fake, span) for fake, span in ((prefill, p_leg), (decode, d_leg))]
    for fake, span in carried:
        (sent,) = fake.requests
        assert sent.headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
        assert sent.headers["tracestate"] == "vendor=1"

    said = attributes(request)
    assert said["kvrelay.handover"] == answer.headers["x-kvrelay-handover"]
    assert (said["kvrelay.prefill"], said["kvrelay.decode"], said["kvrelay.outcome"]) == ("P0", "D0", "ok")
    assert (said["kvrelay.request_id"], said["gen_ai.request.model"]) == ("mine", "m")
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (7, 2)
    assert [event.name for event in request.events] == list(TIMESTAMPS)
    moments = [event.time_unix_nano for event in request.events]
    assert moments == sorted(moments)
    assert request.start_time_unix_nano <= moments[0] <= moments[-1] <= request.end_time_unix_nano
    assert attributes(p_leg)["http.response.status_code"] == 200


async def test_the_proof_is_on_the_request_even_if_it_comes_after_the_answer(
    engine: Any, router: Any, collector: Collector
) -> None:
    """1. D answers. 2. The client has it all. 3. D's proof comes."""
    pool = FakePool()
    prefill, decode = await engine(), await engine()
    observing = Observing(otlp_endpoint=collector.url)
    service: RouterService = await router([prefill], [decode], pool=pool.connect, observing=observing)
    answer = await post(service.port, PATH, ASK)
    assert answer.status == 200
    pool.post(a_proof(decode.requests[0].json["kv_transfer_params"]["kvrelay"]))
    await get(service.port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")  # waits for the proof
    await service.stop()
    said = attributes(collector.named("POST /v1/completions"))
    assert said["kvrelay.proof.proofs"] == 1
    assert said["kvrelay.proof.recomputed_tokens"] == 1


async def test_a_lost_leg_and_its_retry_are_spans_of_their_own(engine: Any, router: Any, collector: Collector) -> None:
    bad, good, decode = await engine(), await engine(), await engine()
    bad.script(fail(500))
    service: RouterService = await router([bad, good], [decode], observing=Observing(otlp_endpoint=collector.url))
    await post(service.port, PATH, ASK)
    await service.stop()
    assert len(good.requests) == 1
    lost, retried = collector.named("prefill P0"), collector.named("prefill P1")
    assert attributes(lost)["http.response.status_code"] == 500
    assert lost.status.code == 2
    assert retried.status.code != 2
    assert bad.requests[0].headers["traceparent"] != good.requests[0].headers["traceparent"]
    assert attributes(collector.named("POST /v1/completions"))["kvrelay.detours"] == ["prefill_status_5xx"]


async def test_requests_that_are_passed_on_are_traced_and_probes_are_not(
    engine: Any, router: Any, collector: Collector
) -> None:
    decode = await engine()
    service: RouterService = await router([await engine()], [decode], observing=Observing(otlp_endpoint=collector.url))
    await post(service.port, "/v1/embeddings", {"input": "a", "model": "m"})
    await get(service.port, "/health")
    await get(service.port, "/metrics")
    await service.stop()
    assert {span.name for span in collector.spans} == {"POST /v1/embeddings", "queue", "decode D0"}
    assert decode.requests[0].headers["traceparent"].split("-")[2] == collector.named("decode D0").span_id.hex()


async def test_a_client_that_does_not_sample_gets_no_spans_and_engines_are_told(
    engine: Any, router: Any, collector: Collector
) -> None:
    prefill, decode = await engine(), await engine()
    service: RouterService = await router([prefill], [decode], observing=Observing(otlp_endpoint=collector.url))
    await post(service.port, PATH, ASK, headers=f"traceparent: 00-{TRACE}-{SPAN}-00\r\n")
    await service.stop()
    assert collector.spans == []
    for fake in (prefill, decode):
        assert fake.requests[0].headers["traceparent"].startswith(f"00-{TRACE}-")
        assert fake.requests[0].headers["traceparent"].endswith("-00")


async def test_with_a_ratio_of_0_only_clients_begin_traces(engine: Any, router: Any, collector: Collector) -> None:
    observing = Observing(otlp_endpoint=collector.url, trace_ratio=0.0)
    service: RouterService = await router([await engine()], [await engine()], observing=observing)
    await post(service.port, PATH, ASK)
    await post(service.port, PATH, ASK, headers=SAMPLED)
    await service.stop()
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}


async def test_a_collector_that_refuses_or_is_away_costs_no_request(
    engine: Any, router: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.status = 400
    prefill, decode = await engine(), await engine()
    service: RouterService = await router([prefill], [decode], observing=Observing(otlp_endpoint=collector.url))
    away: RouterService = await router([prefill], [decode], observing=Observing(otlp_endpoint="http://127.0.0.1:9"))
    for port in (service.port, away.port):
        assert (await post(port, PATH, ASK)).status == 200
    metrics = service._metrics
    await service.stop()
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.1)
    await away.stop()
    assert metrics.registry.get_sample_value("kvrelay_router_spans_total", {"result": "made"}) == 5
    assert metrics.registry.get_sample_value("kvrelay_router_spans_total", {"result": "failed"}) == 5


async def test_without_an_endpoint_a_clients_trace_passes_untouched(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    service: RouterService = await router([prefill], [decode])
    await post(service.port, PATH, ASK, headers=SAMPLED)
    await post(service.port, PATH, ASK)
    for fake in (prefill, decode):
        with_trace, without = fake.requests
        assert with_trace.headers["traceparent"] == f"00-{TRACE}-{SPAN}-01"
        assert with_trace.headers["tracestate"] == "vendor=1"
        assert "traceparent" not in without.headers


def test_an_endpoint_without_the_sdk_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.router.tracing._MODULES", ("kvrelay_has_no_such_module.sdk",))
    settings = RouterSettings(
        prefill=["http://a:1"], decode=["http://b:1"], observing=Observing(otlp_endpoint="http://c")
    )
    with pytest.raises(Exception, match=r"pip install 'kvrelay\[otel\]'"):
        check_settings(settings)
