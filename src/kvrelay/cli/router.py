"""``kvrelay router``."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
from functools import partial
from typing import TYPE_CHECKING

from kvrelay import openfiles
from kvrelay.cli import (
    kv,
    router_engines,
    router_entrance,
    router_file,
    router_key,
    router_observing,
    router_resilience,
    routing,
)
from kvrelay.cli.status import exit_status
from kvrelay.errors import ConfigError
from kvrelay.hosts import in_address
from kvrelay.profiles.registry import PROFILES
from kvrelay.router.admin.serving import bind, told_of
from kvrelay.router.config import RouterConfig, RouterSettings
from kvrelay.router.entrance.settings import exposed_without
from kvrelay.types import Dispatch, FirstToken, OnLostKv, Tokenising

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable
    from typing import Any

    from kvrelay.admin.server import AdminServer
    from kvrelay.router.pool_link import TicketClient
    from kvrelay.router.workers import Seat

    ReadConfig = Callable[[], RouterConfig]
    Verbs = argparse._SubParsersAction[Any]

logger = logging.getLogger("kvrelay.router")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of `mallopt`, as in glibc's malloc.h."""
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
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
        help="the kvrelay pool, unix:PATH, tcp:HOST:PORT or tls:HOST:PORT?ca=FILE, for tickets and proofs",
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
    routing.add_arguments(serve)
    kv.add_arguments(serve)
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
    router_resilience.add_options(serve)
    router_file.add_option(serve)
    serve.add_argument(
        "--workers", type=int, default=_DEFAULTS.workers, metavar="N",
        help="processes behind the one port, for more than one core (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="(%(default)s)"
    )
    serve.set_defaults(run=run)
    router_key.add_parser(verbs)


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
        routing=routing.settings_of(args),
        kv=kv.settings_of(args),
        first_token=args.first_token,
        tokenise=args.tokenise,
        max_body_mib=args.max_body_mib,
        workers=args.workers,
        observing=router_observing.settings_of(args),
        resilience=router_resilience.read(args),
        admin=router_resilience.read_admin(args),
        entrance=router_entrance.settings_of(args),
        engine_tls=router_entrance.read_engine_tls(args),
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop. Exit status: 0 after SIGTERM, 130 after Ctrl-C."""
    read_config = partial(router_file.load, args, settings_of)
    config = read_config()
    logging.basicConfig(level=args.log_level.upper(), format=_LOG_FORMAT)
    openfiles.raise_limit(logger)
    again = None if args.config is None else read_config
    server = None if config.admin is None else bind(config.admin)
    stopped_by = _run(config, again, None, server) if config.workers == 1 else _run_workers(config, again, server)
    return 128 + signal.SIGINT if stopped_by == signal.SIGINT else 0


def _run(config: RouterConfig, again: ReadConfig | None, seat: Seat | None, admin: AdminServer | None) -> int:
    """Serve in this process; ``again`` reads the configuration once more. The signal that stopped it."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, again, seat, admin))


def _run_workers(config: RouterConfig, again: ReadConfig | None, admin: AdminServer | None) -> int:
    """Serve in several processes, the first of them the admin API too. The signal that stopped them."""
    import kvrelay.router.service  # noqa: F401  loaded once, before there are several of us
    from kvrelay.router.listening import listening_problem
    from kvrelay.router.reloading import as_it_is_now
    from kvrelay.router.workers import Workers

    def work(seat: Seat) -> int:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(logging.Formatter(_LOG_FORMAT.replace(":", f" [worker {seat.number}]:", 1)))
        if admin is not None and seat.number:
            admin.stop()
        return exit_status(lambda: serve(seat))

    def serve(seat: Seat) -> int:
        _run(as_it_is_now(config, again), again, seat, None if seat.number else admin)
        return 0

    try:
        workers = Workers(config.workers, config.host, config.port, work)
    except OSError as error:
        raise ConfigError(listening_problem(config.host, config.port, error)) from None
    try:
        return workers.run(lambda: _announce(config, workers.port, told_of(admin)))
    finally:
        if admin is not None:
            admin.stop()


async def _serve(
    config: RouterConfig, read_config: ReadConfig | None, seat: Seat | None, server: AdminServer | None
) -> int:
    from kvrelay.router.admin.serving import Serving
    from kvrelay.router.service import RouterService

    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    _stop_on_signals(stopped)
    service = RouterService(config, _pool_connector(config, seat), seat=seat)
    admin = Serving(config.admin, service, read_config, server)
    await service.start()
    admin.start()
    _calm_collector()
    _keep_memory()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, admin.on_hangup)
    if seat is None:
        _announce(config, service.port, told_of(server))
    else:
        seat.ready()
    number = await stopped
    notice_s = config.resilience.drain_notice_s
    logger.info(
        "%s: %sno more requests are taken; those in flight have %g s",
        signal.Signals(number).name, f"in {notice_s:g} s " if notice_s else "", config.drain_timeout_s,
    )  # fmt: skip
    stopping = asyncio.create_task(service.stop())
    again: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    _stop_on_signals(again)
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    if stopping.done() and (cut := stopping.result()):
        logger.warning("%d requests were cut off", cut)
    stopping.cancel()
    await asyncio.to_thread(admin.stop)
    return number


def _announce(config: RouterConfig, port: int, more: str = "") -> None:
    """Say that requests are taken."""
    addresses = [(f"{letter}{index}", address) for letter, of_role in (("P", config.prefills), ("D", config.decodes))
                 for index, address in enumerate(of_role)]  # fmt: skip
    engines = ", ".join(f"{name} {address.url}" for name, address in addresses)
    scheme = "http" if config.entrance.tls is None else "https"
    print(f"kvrelay router ready: {scheme}://{in_address(config.host)}:{port} for {engines}{more}", flush=True)
    if problem := exposed_without(config.host, config.entrance):
        logger.warning("%s", problem)
    if PROFILES[config.connector].uses_pool and config.pool is None:
        logger.info("no --pool: requests are handed over without tickets, and nothing proves it")


def _calm_collector() -> None:
    """Let Python look for cycles of garbage less often, and not among what is there for good.

    A request leaves none; its objects are freed as it ends. Looking for them after every 700 took a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def _keep_memory() -> None:
    """Let the allocator keep what long bodies took for the next ones: glibc gives it back and asks for it each time.

    A tenth of the time of requests with prompts of 512 KiB. Other allocators are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def _stop_on_signals(told: asyncio.Future[int]) -> None:
    def tell(number: int) -> None:
        if not told.done():
            told.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, tell, number)


def _pool_connector(config: RouterConfig, seat: Seat | None) -> Callable[[], Awaitable[TicketClient]] | None:
    if config.pool is None:
        return None
    from kvrelay.client.aio import AsyncPoolClient

    address, token = config.pool, config.pool_token
    name = f"router {config.host}:{config.port}{'' if seat is None else f' worker {seat.number}'}"
    return lambda: AsyncPoolClient.connect(address, name=name, token=token, map_arena=False)
