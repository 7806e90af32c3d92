"""What the router does with a method and a path.

Only what is listed reaches an engine. vLLM serves its administration (sleep, pause, weights, caches, profiling, remote
calls) on the same port as its API, and a router's clients are not its administrators.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from kvrelay.router.core.legs import Endpoint


class Route(Enum):
    """Who answers."""

    __hash__ = object.__hash__  # enum's own is written in Python, and every request looks its route up

    DISAGGREGATE = auto()
    PASS = auto()
    """One decode engine, unchanged."""
    ANY = auto()
    """Any engine that lives."""
    STORED = auto()
    """State of the one decode engine that holds it."""
    MODELS = auto()
    """The models of all engines."""
    HEALTH = auto()
    METRICS = auto()
    HANDOVER = auto()
    WRONG_METHOD = auto()
    UNKNOWN = auto()


HANDOVERS = "/kvrelay/handovers/"

_POST = frozenset({
    "/v1/messages/count_tokens", "/v1/chat/completions/batch",
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score",
    "/rerank", "/v1/rerank", "/v2/rerank",
    "/generative_scoring", "/v1/systemone", "/cohere/v2/chat",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/tokenize", "/detokenize",
    "/v1/chat/completions/derender", "/v1/completions/derender",
    "/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render", "/v1/responses/render",
})  # fmt: skip
_GET = frozenset({"/version"})
_MODELS = "/v1/models"
_OWN = {"/health": Route.HEALTH, "/metrics": Route.METRICS}
_DISAGGREGATED = frozenset(endpoint.value for endpoint in Endpoint)
_STORED = re.compile(r"/v1/responses/(?P<name>[A-Za-z0-9_-]{1,256})(?P<cancel>/cancel)?")


def route(method: str, path: str) -> Route:
    """Decide by exact match: ``path`` is as sent, without its query; what is spelt otherwise is unknown."""
    if path in _DISAGGREGATED:
        return _allow(method, "POST", Route.DISAGGREGATE)
    if path in _POST:
        return _allow(method, "POST", Route.PASS)
    if path in _GET:
        return _allow(method, "GET", Route.ANY)
    if path == _MODELS:
        return Route.MODELS if method == "GET" else Route.WRONG_METHOD
    if path in _OWN:
        return _OWN[path] if method in {"GET", "HEAD"} else Route.WRONG_METHOD
    if path.startswith(HANDOVERS):
        return Route.HANDOVER if method == "GET" else Route.WRONG_METHOD
    if (stored := _STORED.fullmatch(path)) is not None:
        return Route.STORED if method == ("POST" if stored["cancel"] else "GET") else Route.WRONG_METHOD
    return Route.UNKNOWN


def stored_name(path: str) -> str:
    """The name of the stored response that a path of `Route.STORED` is about."""
    found = _STORED.fullmatch(path)
    assert found is not None
    return found["name"]


def pattern_of(path: str) -> str:
    """A path that is served, with ``{id}`` for what is another in every request: what traces are grouped by."""
    found = _STORED.fullmatch(path)
    if found is None or route("POST", path) is Route.PASS:
        return path
    return f"/v1/responses/{{id}}{found['cancel'] or ''}"


def _allow(method: str, allowed: str, known: Route) -> Route:
    if method == allowed:
        return known
    return Route.PASS if method == "OPTIONS" else Route.WRONG_METHOD
