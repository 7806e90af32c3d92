"""Flags of ``kvrelay router serve`` for what the router does about failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.admin import TOKEN_VARIABLE, AdminSettings
from kvrelay.router.core.resilience import Resilience

if TYPE_CHECKING:
    import argparse

_DEFAULTS = Resilience()


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """Add them."""
    serve.add_argument(
        "--request-timeout", type=float, default=_DEFAULTS.request_timeout_s, metavar="S",
        help="for a request as a whole, 0 for any time (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--first-byte-timeout", type=float, default=_DEFAULTS.first_byte_timeout_s, metavar="S",
        help="from a decode leg's sending to a stream's first byte, 0 for --decode-timeout (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--probe-interval", type=float, default=_DEFAULTS.probe_interval_s, metavar="S",
        help="between two looks at an engine's /health, 0 for none (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--retry-share", type=float, default=_DEFAULTS.retry_share, metavar="F",
        help="retries on another engine as a fraction of requests, 0 for none (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--drain-notice", type=float, default=_DEFAULTS.drain_notice_s, metavar="S",
        help="how long to serve on when stopped, with a /health that says so (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--admin-listen",
        metavar="HOST:PORT",
        help="where the admin HTTP API listens (no admin API); keep it on loopback",
    )
    serve.add_argument(
        "--admin-token-file", metavar="FILE", help=f"file with the bearer token it asks for (or {TOKEN_VARIABLE})"
    )


def settings_of(args: argparse.Namespace) -> Resilience:
    """What was given."""
    return Resilience(
        request_timeout_s=args.request_timeout,
        first_byte_timeout_s=args.first_byte_timeout,
        probe_interval_s=args.probe_interval,
        retry_share=args.retry_share,
        drain_notice_s=args.drain_notice,
    )


def admin_of(args: argparse.Namespace) -> AdminSettings:
    """What was given."""
    return AdminSettings(listen=args.admin_listen, token_file=args.admin_token_file)
