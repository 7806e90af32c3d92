"""What is told of requests, and where to: as given, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import ConfigError
from kvrelay.hosts import is_host, split_url
from kvrelay.router.core.observing.forwarding import HeaderSettings, problems_of

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACES = "/v1/traces"
"""Where OTLP over HTTP takes spans, below an endpoint's own path."""


class Observing(Struct, frozen=True, kw_only=True):
    """By default metrics alone."""

    access_log: str | None = None
    """A file, or ``-`` for standard output."""
    otlp_endpoint: str | None = None
    """An OpenTelemetry collector's URL, for OTLP over HTTP."""
    trace_ratio: float = 1.0
    """Share of the requests that are traced, of those that belong to no trace yet."""
    headers: HeaderSettings = HeaderSettings()

    @property
    def traces_url(self) -> str | None:
        """Where spans are sent."""
        return None if self.otlp_endpoint is None else traces_url(self.otlp_endpoint)


def traces_url(endpoint: str) -> str:
    """Where a collector takes spans. ``endpoint``: its own URL, or that one already."""
    plain = endpoint.rstrip("/")
    return plain if plain.endswith(TRACES) else plain + TRACES


def is_collector(endpoint: str) -> bool:
    """Whether a text is a collector's URL."""
    try:
        parts = split_url(endpoint)
    except ConfigError:
        return False
    return parts.scheme in {"http", "https"} and is_host(parts.hostname or "") and not parts.query and parts.port != 0


def observing_problems(settings: Observing) -> Iterator[str]:
    """What is wrong with the settings."""
    if settings.access_log == "":
        yield "--access-log is empty: give a file, or - for standard output"
    if settings.otlp_endpoint is not None and not is_collector(settings.otlp_endpoint):
        yield f"--otlp-endpoint {settings.otlp_endpoint!r} is not a URL: write http://HOST:4318"
    if not 0 <= settings.trace_ratio <= 1:
        yield f"--trace-ratio {settings.trace_ratio:g} is out of range: give 0 to 1"
    yield from problems_of(settings.headers)
