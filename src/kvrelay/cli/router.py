"""``kvrelay router``."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from kvrelay.cli import (
    router_engines,
    router_entrance,
    router_file,
    router_key,
    router_kv,
    router_observing,
    router_resilience,
    router_routing,
)
from kvrelay.cli.status import exit_status
from kvrelay.profiles.registry import PROFILES
from kvrelay.router.config import RouterSettings
from kvrelay.types import Dispatch, FirstToken, OnLostKv, Tokenising

if TYPE_CHECKING:
    import argparse
    from typing import Any

    Verbs = argparse._SubParsersAction[Any]

_DEFAULTS = RouterSettings(prefill=(), decode=())


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``router`` and its verbs."""
    router = subparsers.add_parser("router", help="the OpenAI-compatible prefill/decode router")
    made_by = router_file.FlagParser
    verbs: Verbs = router.add_subparsers(dest="router_verb", required=True, metavar="VERB", parser_class=made_by)
    router_engines.add_parsers(verbs)
    serve = verbs.add_parser(
        "serve", help="route requests to running vLLM servers", description="Route requests to running vLLM servers."
    )
    _add_settings(serve)
    serve.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="(%(default)s)"
    )
    serve.set_defaults(run=run)
    config = verbs.add_parser(
        "config",
        help="print the settings `kvrelay router serve` would use, and their origins",
        description="Print the settings `kvrelay router serve` would use with these flags, and where each comes from.",
    )
    _add_settings(config)
    config.set_defaults(run=show)
    router_key.add_parser(verbs)


def _add_settings(serve: argparse.ArgumentParser) -> None:
    """Give a parser one flag a setting."""
    serve.add_argument(
        "--prefill", action="append", default=[], metavar="URL", help="a prefill engine; repeat for more"
    )
    serve.add_argument("--decode", action="append", default=[], metavar="URL", help="a decode engine; repeat for more")
    serve.add_argument("--host", default=_DEFAULTS.host, help="address to listen on (%(default)s)")
    serve.add_argument(
        "--port", type=int, default=_DEFAULTS.port, help="port to listen on, 0 for a free one (%(default)s)"
    )
    serve.add_argument(
        "--connector", default=_DEFAULTS.connector,
        help=f"the engines' KV connector: {', '.join(PROFILES)} (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--pool",
        metavar="ADDRESS",
        help="the kvrelay pool, unix:PATH, tcp:HOST:PORT or tls:HOST:PORT?ca=FILE, for tickets and proofs; "
        "those of several prefill engines, joined by commas",
    )
    serve.add_argument("--pool-token-file", metavar="FILE", help="file with the pool's token (or KVRELAY_POOL_TOKEN)")
    serve.add_argument(
        "--connect-timeout", type=float, default=_DEFAULTS.connect_timeout_s, metavar="S",
        help="for a connection to an engine (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--prefill-timeout", type=float, metavar="S",
        help="for one prefill leg, before another engine does it (three quarters of --handover-timeout)",
    )  # fmt: skip
    serve.add_argument(
        "--handover-timeout", type=float, default=_DEFAULTS.handover_timeout_s, metavar="S",
        help="how long KV is kept for a decode engine to take (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--decode-timeout", type=float, default=_DEFAULTS.decode_timeout_s, metavar="S",
        help="longest silence of a decode engine; for answers that are not streamed, their whole time (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--drain-timeout", type=float, default=_DEFAULTS.drain_timeout_s, metavar="S",
        help="for requests in flight when the router is stopped (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--ticket-timeout", type=float, default=_DEFAULTS.ticket_timeout_s, metavar="S",
        help="for the pool to protect a hand-over; after that requests go on without, for a moment (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--on-lost-kv", default=_DEFAULTS.on_lost_kv, metavar="POLICY",
        help=f"when the decode side cannot have the KV: {', '.join(OnLostKv)} (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--max-reprefills", type=int, default=_DEFAULTS.max_reprefills, metavar="N",
        help="how often one request's prompt may be prefilled again (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--dispatch", default=_DEFAULTS.dispatch, metavar="WAY",
        help=f"when a decode leg is sent: {', '.join(Dispatch)} (%(default)s)",
    )  # fmt: skip
    router_routing.add_arguments(serve)
    router_kv.add_arguments(serve)
    serve.add_argument(
        "--first-token", default=_DEFAULTS.first_token, metavar="ROLE",
        help=f"whose first token a stream begins with, where it can: {', '.join(FirstToken)} (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--tokenise", default=_DEFAULTS.tokenise, metavar="TIMES",
        help=f"whether decode engines are given the prefill engines' token ids: {', '.join(Tokenising)} (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--max-body-mib",
        type=int,
        default=_DEFAULTS.max_body_mib,
        metavar="N",
        help="largest request body (%(default)s)",
    )
    router_entrance.add_arguments(serve)
    router_observing.add_arguments(serve)
    router_resilience.add_arguments(serve)
    router_file.add_argument(serve)
    serve.add_argument(
        "--workers", type=int, default=_DEFAULTS.workers, metavar="N",
        help="processes behind the one port, for more than one core (%(default)s)",
    )  # fmt: skip


def settings_of(args: argparse.Namespace) -> RouterSettings:
    """What the flags say."""
    return RouterSettings(
        prefill=args.prefill,
        decode=args.decode,
        host=args.host,
        port=args.port,
        connector=args.connector,
        pool=args.pool,
        pool_token_file=args.pool_token_file,
        connect_timeout_s=args.connect_timeout,
        prefill_timeout_s=args.prefill_timeout,
        handover_timeout_s=args.handover_timeout,
        decode_timeout_s=args.decode_timeout,
        drain_timeout_s=args.drain_timeout,
        ticket_timeout_s=args.ticket_timeout,
        on_lost_kv=args.on_lost_kv,
        max_reprefills=args.max_reprefills,
        dispatch=args.dispatch,
        routing=router_routing.settings_of(args),
        kv=router_kv.settings_of(args),
        first_token=args.first_token,
        tokenise=args.tokenise,
        max_body_mib=args.max_body_mib,
        workers=args.workers,
        observing=router_observing.settings_of(args),
        resilience=router_resilience.settings_of(args),
        admin=router_resilience.admin_of(args),
        entrance=router_entrance.settings_of(args),
        engine_tls=router_entrance.engine_tls_of(args),
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop. Exit status: 0 after SIGTERM, 130 after Ctrl-C."""
    read_config = partial(router_file.load, args, settings_of)
    config = read_config()
    from kvrelay.router.process import LOG_FORMAT, RouterProcess

    logging.basicConfig(level=args.log_level.upper(), format=LOG_FORMAT)
    again = None if args.config is None else read_config
    return RouterProcess(config, again, announce=partial(print, flush=True), exit_status=exit_status).run()


def show(args: argparse.Namespace) -> int:
    """Print the settings as TOML, for a configuration file."""
    print(router_file.show(args, settings_of))
    return 0
