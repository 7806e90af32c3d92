"""``kvrelay pool``: run a pool, look into one, manage it, measure it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cli import pool_admin, pool_ask, pool_bench
from kvrelay.cli.flags import help_of, metavar_of
from kvrelay.client.token import TOKEN_VARIABLE
from kvrelay.errors import ConfigError
from kvrelay.pool.settings import DEFAULT_LISTEN, flag_of, leaves
from kvrelay.pool.tiers.config import FLAG_FORM

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.pool.config import PoolConfig

SETTINGS = """\
Every setting can come from a flag, an environment variable (KVRELAY_POOL_SIZE, KVRELAY_POOL_TLS_CERT, ...), a TOML file
or its default, in this order; `kvrelay pool config` prints which it was. Tenants need the file."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the ``pool`` verb."""
    pool = verbs.add_parser("pool", help="the KV memory pool")
    actions = pool.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, told, run in (
        ("serve", "run a pool in the foreground", _serve),
        ("config", "print the settings `kvrelay pool serve` would use, and their origins", _config),
        ("check", "look for what would keep a pool from starting or make it slow", _check),
    ):
        parser = actions.add_parser(
            name,
            help=told,
            description=f"{told[0].upper()}{told[1:]}.\n{SETTINGS}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _add_settings(parser)
        if run is _check:
            parser.add_argument("--objects", metavar="N", type=int, help="how many objects the pool is to hold")
        parser.set_defaults(run=run)

    stat = _asking(actions, "stat", "show a pool's gauges and counters", pool_ask.stat)
    stat.add_argument("--json", action="store_true", help="as one JSON object")
    listing = _asking(actions, "ls", "list a pool's objects", pool_ask.list_objects)
    listing.add_argument("--prefix", metavar="HEX", default="", help="only keys that begin with these bytes")
    listing.add_argument("--limit", metavar="N", type=int, default=1_000, help="at most so many, 0: all (%(default)s)")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    for name, told, run in (
        ("pin", "keep objects from eviction and expiry until they are unpinned", pool_ask.pin),
        ("unpin", "undo pin", pool_ask.unpin),
    ):
        keep = _asking(actions, name, told, run)
        keep.add_argument("--object", metavar="HEX", action="append", help="one object; may be given more than once")
        keep.add_argument("--prefix", metavar="HEX", help="all whose keys begin with these bytes")
    purge = _asking(actions, "purge", "forget every object that nobody has leased or pinned", pool_ask.purge)
    purge.add_argument("--yes", action="store_true", help="do not ask")
    bench = _asking(actions, "bench", "measure a running pool; what was stored is deleted again", pool_bench.run)
    pool_bench.add_options(bench)

    drain = actions.add_parser("drain", help="have a pool take no new objects, over its admin API")
    pool_admin.add_options(drain)
    drain.set_defaults(run=pool_admin.drain)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` one flag a setting. Only flags that are given appear in its result."""
    parser.add_argument("--config", metavar="FILE.toml", type=Path, help="read settings from a file")
    for path, field in leaves().items():
        flag = flag_of(path)
        if flag is None:
            continue
        options: dict[str, Any] = {"dest": path, "default": argparse.SUPPRESS, "help": help_of(path, field)}
        if path == "tiers":
            options["help"] = f"a lower tier: {FLAG_FORM}; repeat for more, fastest first"
            parser.add_argument(flag, metavar="TIER", action="append", **options)
        elif field.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        else:
            parser.add_argument(flag, metavar=metavar_of(field), **options)


def _asking(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    told: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """A verb that connects to a running pool."""
    parser = actions.add_parser(name, help=told, description=f"{told[0].upper()}{told[1:]}.")
    parser.add_argument(
        "address", nargs="?", default=f"tcp:{DEFAULT_LISTEN}",
        help="unix:PATH, tcp:HOST:PORT or tls:HOST:PORT (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--token-file", metavar="FILE", help=f"the pool's token (or {TOKEN_VARIABLE})")
    parser.add_argument("--ca", metavar="FILE", help="authorities of the pool's certificate (with tls:)")
    parser.add_argument("--cert", metavar="FILE", help="this client's certificate, where the pool asks for one")
    parser.add_argument("--key", metavar="FILE", help="its private key")
    parser.set_defaults(run=run)
    return parser


def read_config(args: argparse.Namespace) -> PoolConfig:
    """The configuration of parsed arguments. Raises `ConfigError` with every problem."""
    from kvrelay.pool.config import load

    return load({path: value for path, value in vars(args).items() if path in leaves()}, os.environ, args.config)


def _serve(args: argparse.Namespace) -> int:
    from kvrelay.cli.pool_serve import serve

    return serve(read_config(args))


def _config(args: argparse.Namespace) -> int:
    from kvrelay.pool.config import show

    print(show(read_config(args)))
    return 0


def _check(args: argparse.Namespace) -> int:
    from kvrelay.cli.pool_serve import check

    if args.objects is not None and args.objects < 0:
        raise ConfigError(f"--objects {args.objects} is negative: give how many objects the pool is to hold")
    return check(read_config(args), args.objects)
