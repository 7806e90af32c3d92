"""``kvrelay pool stat|ls|pin|unpin|purge``: over the data protocol, as the tenant of the token."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvrelay.client.blocking import PoolClient
from kvrelay.client.token import read_token
from kvrelay.errors import ConfigError
from kvrelay.sizes import format_size
from kvrelay.transport.tls import TlsConfig
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvrelay.wire.bulk import ObjectInfo

PAGE = 4_096
PURGE_S = 600.0
"""A pool of millions of objects takes a while to forget them."""


def connect(args: argparse.Namespace, name: str, *, map_arena: bool = False) -> PoolClient:
    """The connection that a verb's arguments ask for."""
    tls = TlsConfig(ca=args.ca, cert=args.cert, key=args.key) if args.ca or args.cert or args.key else None
    return PoolClient.connect(
        args.address, name=f"kvrelay pool {name}", token=read_token(args.token_file), map_arena=map_arena, tls=tls
    )


def stat(args: argparse.Namespace) -> int:
    """Print gauges and counters."""
    with connect(args, "stat") as client:
        values = client.stat()
    if args.json:
        print(json.dumps(values))
    else:
        for name, value in values.items():
            shown = f"{value}  ({format_size(value)})" if name.endswith("_bytes") else str(value)
            print(f"{name:20} {shown}")
    return 0


def list_objects(args: argparse.Namespace) -> int:
    """Print objects, one a line."""
    prefix = _bytes_of("--prefix", args.prefix)
    if args.limit < 0:
        raise ConfigError(f"--limit {args.limit} is negative: give 0 for all")
    with connect(args, "ls") as client:
        for found in _objects(client, prefix, args.limit):
            print(_json_line(found) if args.json else _line(found))
    return 0


def _objects(client: PoolClient, prefix: bytes, limit: int) -> Iterator[ObjectInfo]:
    cursor, left = 0, limit or sys.maxsize
    while left:
        reply = client.start(m.ListObjects(0, cursor, min(PAGE, left), prefix), m.Listing).result(30.0)
        assert isinstance(reply, m.Listing)
        yield from reply.objects
        left -= len(reply.objects)
        cursor = reply.cursor
        if not cursor:
            return


def _line(found: ObjectInfo) -> str:
    lasts = f"{found.ttl_s:.0f} s" if found.ttl_s else "-"
    pins = f"{found.pins} pins" if found.pins else ""
    where = f"{found.state:8} {found.tier:8} {lasts:>8}"
    return f"{found.key.hex():64} {format_size(found.size):>10}  {where}  {pins}".rstrip()


def _json_line(found: ObjectInfo) -> str:
    values = {name: getattr(found, name) for name in found.__struct_fields__}
    return json.dumps(values | {"key": found.key.hex()})


def purge(args: argparse.Namespace) -> int:
    """Forget everything of this tenant that is not held."""
    with connect(args, "purge") as client:
        count = client.stat()["objects"]
        if not args.yes and not _confirmed(f"forget up to {count} objects of the pool at {args.address}?"):
            print("nothing was done", file=sys.stderr)
            return 1
        reply = client.start(m.Purge(0), m.Purged).result(PURGE_S)
        assert isinstance(reply, m.Purged)
    print(f"{reply.count} objects forgotten, {reply.kept} kept: pinned, leased or being written")
    return 0


def pin(args: argparse.Namespace) -> int:
    """Keep objects until they are unpinned."""
    return _keep(args, m.Pin, "pinned")


def unpin(args: argparse.Namespace) -> int:
    """Undo `pin`."""
    return _keep(args, m.Unpin, "unpinned")


def _keep(args: argparse.Namespace, request: type[m.Pin | m.Unpin], done: str) -> int:
    """Exit status: 1 when a key that was named is not there."""
    keys = list(dict.fromkeys(_bytes_of("--object", text) for text in args.object or ()))
    prefix = None if args.prefix is None else _bytes_of("--prefix", args.prefix)
    if bool(keys) == (prefix is not None):
        raise ConfigError("name the objects by --object HEX, once or more often, or by --prefix HEX")
    count = 0
    with connect(args, done) as client:
        found = keys if prefix is None else [o.key for o in _objects(client, prefix, 0) if o.state == "sealed"]
        for start in range(0, len(found), PAGE):
            reply = client.start(request(0, found[start : start + PAGE]), m.Affected).result(30.0)
            assert isinstance(reply, m.Affected)
            count += reply.count
    print(f"{count} objects {done}")
    if count < len(keys):
        print(
            f"{len(keys) - count} of {len(keys)} keys are not in the pool's memory, or being written", file=sys.stderr
        )
        return 1
    return 0


def _bytes_of(flag: str, text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is not hexadecimal: give two digits a byte") from None


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} say --yes to do it without being asked")
    return input(f"{question} [y/N] ").strip().lower() in {"y", "yes"}
