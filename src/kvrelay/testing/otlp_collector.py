"""An OpenTelemetry collector for tests: takes spans over OTLP/HTTP on a free port and keeps them."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Runs in threads of its own, from construction to `close`."""

    def __init__(self) -> None:
        """Listens at once."""
        self.paths: list[str] = []
        """Of every request."""
        self.spans: list[Any] = []
        """Protobuf spans, in order of arrival."""
        self.resources: list[dict[str, str]] = []
        self.services: dict[bytes, str] = {}
        """Span id to the name of the service it came from."""
        self.status = 200
        """Of answers."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector._take(self.path, body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """For ``--otlp-endpoint``."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def named(self, name: str) -> Any:
        """The one span of that name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            self.resources.append(about)
            for scope in resource.scope_spans:
                self.services |= dict.fromkeys((span.span_id for span in scope.spans), about["service.name"])
                self.spans += scope.spans


def attributes(span: Any) -> dict[str, Any]:
    """A span's, as plain values."""
    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    return {
        key: [item.string_value for item in value.values] if hasattr(value, "values") else value
        for key, value in values.items()
    }
