"""Flags of ``kvrelay router serve`` that say where requests go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.policy.registry import POLICIES
from kvrelay.router.core.routing import RoutingSettings

if TYPE_CHECKING:
    import argparse

_DEFAULTS = RoutingSettings()


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """Add them."""
    serve.add_argument(
        "--policy", default=_DEFAULTS.policy, metavar="NAME[:OPTION=VALUE,...]",
        help=f"who is asked: {', '.join(POLICIES)} (%(default)s)",
    )  # fmt: skip
    serve.add_argument("--prefill-policy", metavar="POLICY", help="for prefill engines (as --policy)")
    serve.add_argument("--decode-policy", metavar="POLICY", help="for decode engines (as --policy)")
    serve.add_argument(
        "--session-header", default=_DEFAULTS.session_header, metavar="NAME",
        help="header that names a request's session (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--disaggregate-above", default=_DEFAULTS.disaggregate_above, metavar="TOKENS",
        help="shorter prompts go to a decode engine alone: a number, or auto to learn it (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--colocated-fallback", action="store_true", help="let a prefill engine answer when no decode engine can"
    )


def settings_of(args: argparse.Namespace) -> RoutingSettings:
    """What was given."""
    return RoutingSettings(
        policy=args.policy,
        prefill_policy=args.prefill_policy,
        decode_policy=args.decode_policy,
        session_header=args.session_header,
        disaggregate_above=args.disaggregate_above,
        colocated_fallback=args.colocated_fallback,
    )
