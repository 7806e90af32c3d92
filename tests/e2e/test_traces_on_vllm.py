"""One trace over client, router and real engines: vLLM's own spans hang below the router's legs."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest

from kvrelay.testing.otlp_collector import Collector, attributes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.testing.stack import RunningStack

pytestmark = [pytest.mark.vllm, pytest.mark.matrix, pytest.mark.timeout(900)]
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WAIT_S = 60


def test_the_engines_spans_hang_below_the_routers(start_stack: Callable[..., RunningStack]) -> None:
    with Collector() as collector:
        stack = start_stack("--otlp-endpoint", collector.url)
        body = json.dumps({"model": stack.model_name, "prompt": "one two three " * 50, "max_tokens": 4}).encode()
        headers = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{SPAN}-01"}
        asked = urllib.request.Request(f"{stack.base_url}/v1/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
            handover = answer.headers["x-kvrelay-handover"]
        deadline = time.monotonic() + WAIT_S
        while not {"kvrelay-router", "vllm-P0", "vllm-D0"} <= parents(collector).keys():
            assert time.monotonic() < deadline, parents(collector)
            time.sleep(0.2)

        request = collector.named("POST /v1/completions")
        assert request.parent_span_id.hex() == SPAN
        said = attributes(request)
        assert said["kvrelay.handover"] == handover
        assert said["kvrelay.proof.handed_over_tokens"] > 0
        by_service = parents(collector)
        assert collector.named("prefill P0").span_id in by_service["vllm-P0"]
        assert collector.named("decode D0").span_id in by_service["vllm-D0"]


def parents(collector: Collector) -> dict[str, set[bytes]]:
    """Of the trace's spans, by the service they came from."""
    found: dict[str, set[bytes]] = {}
    for span in list(collector.spans):
        if span.trace_id.hex() == TRACE:
            found.setdefault(collector.services[span.span_id], set()).add(span.parent_span_id)
    return found
