"""Which paths are served, and by whom."""

from __future__ import annotations

import pytest

from kvrelay.router.core.paths import Route, pattern_of, route


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/completions", Route.DISAGGREGATE),
        ("POST", "/v1/chat/completions", Route.DISAGGREGATE),
        ("OPTIONS", "/v1/chat/completions", Route.PASS),
        ("GET", "/v1/completions", Route.WRONG_METHOD),
        ("POST", "/v1/responses", Route.DISAGGREGATE),
        ("POST", "/v1/messages", Route.DISAGGREGATE),
        ("POST", "/v1/messages/count_tokens", Route.PASS),
        ("POST", "/v1/embeddings", Route.PASS),
        ("POST", "/tokenize", Route.PASS),
        ("GET", "/version", Route.ANY),
        ("GET", "/v1/models", Route.MODELS),
        ("HEAD", "/v1/models", Route.WRONG_METHOD),
        ("GET", "/v1/responses/resp_1", Route.STORED),
        ("POST", "/v1/responses/resp_1/cancel", Route.STORED),
        ("GET", "/health", Route.HEALTH),
        ("HEAD", "/health", Route.HEALTH),
        ("GET", "/metrics", Route.METRICS),
        ("GET", "/kvrelay/handovers/ho-1", Route.HANDOVER),
        ("POST", "/metrics", Route.WRONG_METHOD),
    ],
)
def test_what_is_served(method: str, path: str, expected: Route) -> None:
    assert route(method, path) is expected


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/wake_up", "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weights",
     "/start_profile", "/v1/load_lora_adapter", "/scale_elastic_ep", "/server_info", "/abort_requests", "/invocations",
     "/inference/v1/generate", "/", "", "*", "/docs"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_administration_is_out_of_reach(method: str, path: str) -> None:
    assert route(method, path) is Route.UNKNOWN


@pytest.mark.parametrize(
    "path",
    ["/v1/./completions", "//v1/completions", "/v1/%63ompletions", "/v1/completions/", "/v1/responses/../../sleep",
     "/v1/responses/a%2fb", "/V1/completions"],
)  # fmt: skip
def test_other_spellings_are_unknown(path: str) -> None:
    assert route("POST", path) in {Route.UNKNOWN, Route.WRONG_METHOD}


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/v1/responses", "/v1/responses"),
        ("/v1/responses/render", "/v1/responses/render"),
        ("/v1/responses/resp_1", "/v1/responses/{id}"),
        ("/v1/responses/resp_1/cancel", "/v1/responses/{id}/cancel"),
    ],
)
def test_what_traces_are_grouped_by(path: str, pattern: str) -> None:
    assert pattern_of(path) == pattern
