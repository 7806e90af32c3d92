"""Flags of ``kvrelay router serve`` about what is told of requests, and what engines are told of clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.observing.forwarding import HeaderSettings
from kvrelay.router.core.observing.settings import Observing

if TYPE_CHECKING:
    import argparse

_DEFAULTS = Observing()


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """Add them."""
    serve.add_argument(
        "--access-log", metavar="FILE", help="one line of JSON for each request, to a file or - for standard output"
    )
    serve.add_argument(
        "--otlp-endpoint", metavar="URL", help="an OpenTelemetry collector for traces, such as http://127.0.0.1:4318"
    )
    serve.add_argument(
        "--trace-ratio", type=float, default=_DEFAULTS.trace_ratio, metavar="SHARE",
        help="share of the requests traced, of those whose client does not say (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--forward-header", action="append", default=[], metavar="NAME",
        help="only client headers of these names reach engines; NAME* for all that begin so; repeat for more",
    )  # fmt: skip
    serve.add_argument(
        "--request-id-header", action="append", default=[], metavar="NAME",
        help="a client header that names a request where there is no x-request-id; repeat for more",
    )  # fmt: skip
    serve.add_argument(
        "--drop-header", action="append", default=[], metavar="NAME",
        help="client headers of this name do not reach engines; repeat for more",
    )  # fmt: skip


def settings_of(args: argparse.Namespace) -> Observing:
    """What was given."""
    return Observing(
        access_log=args.access_log,
        otlp_endpoint=args.otlp_endpoint,
        trace_ratio=args.trace_ratio,
        headers=HeaderSettings(
            forward=tuple(args.forward_header),
            drop=tuple(args.drop_header),
            request_id=tuple(args.request_id_header),
        ),
    )
