"""``kvrelay router engines`` and ``kvrelay router reload``: over a running router's admin API."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvrelay.cli.admin_api import ask
from kvrelay.client.token import read_token
from kvrelay.errors import DeadlineError, NotFoundError
from kvrelay.router.core.admin import TOKEN_VARIABLE

if TYPE_CHECKING:
    import argparse

LOOK_S = 0.2
DEFAULT_URL = "http://127.0.0.1:8001"


def add_parsers(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add ``engines`` and its actions, and ``reload``."""
    engines = verbs.add_parser("engines", help="look at a running router's engines and change who they are")
    actions = engines.add_subparsers(dest="engines_action", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="print them, one a line")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)
    add = actions.add_parser("add", help="let an engine join")
    add.add_argument("role", choices=("prefill", "decode"))
    add.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8100")
    add.add_argument("--name", default="", help="what it is called (the next of its role)")
    add.add_argument(
        "--kv-events", metavar="ENDPOINT[,REPLAY]", action="append",
        help="where it publishes what its KV cache holds; repeat for more ranks (what the configuration says of it)",
    )  # fmt: skip
    add.set_defaults(run=_add)
    drain = actions.add_parser("drain", help="send an engine no new requests")
    drain.add_argument("name", metavar="NAME")
    drain.add_argument("--resume", action="store_true", help="send it requests again")
    drain.add_argument(
        "--wait", metavar="S", type=float, default=0.0, help="wait so many seconds until nobody needs it (%(default)g)"
    )
    drain.set_defaults(run=_drain)
    remove = actions.add_parser("rm", help="let an engine go once nobody needs it")
    remove.add_argument("name", metavar="NAME")
    remove.add_argument(
        "--timeout", metavar="S", type=float, help="what is not over then is cut off (the router's --drain-timeout)"
    )
    remove.add_argument(
        "--wait", metavar="S", type=float, default=0.0, help="wait so many seconds until it is gone (%(default)g)"
    )
    remove.set_defaults(run=_remove)
    role = actions.add_parser("set-role", help="ask an engine for the other thing from now on")
    role.add_argument("name", metavar="NAME")
    role.add_argument("role", choices=("prefill", "decode"))
    role.set_defaults(run=_set_role)
    events = actions.add_parser("set-kv-events", help="listen to an engine's KV cache events there, and nowhere else")
    events.add_argument("name", metavar="NAME")
    events.add_argument(
        "kv_events",
        metavar="ENDPOINT[,REPLAY]",
        nargs="*",
        help="of each data-parallel rank in turn; none to listen no more",
    )
    events.set_defaults(run=_set_kv_events)
    reload = verbs.add_parser("reload", help="have a running router read its configuration file again")
    reload.set_defaults(run=_reload)
    for parser in (listing, add, drain, remove, role, events, reload):
        parser.add_argument("--admin", metavar="URL", default=DEFAULT_URL, help="the router's admin API (%(default)s)")
        parser.add_argument("--admin-token-file", metavar="FILE", help=f"file with its token (or {TOKEN_VARIABLE})")


def _list(args: argparse.Namespace) -> int:
    engines = _ask(args, "GET", "/engines")["engines"]
    if args.json:
        print(json.dumps(engines))
    else:
        for engine in engines:
            print(_line(engine))
    return 0


def _add(args: argparse.Namespace) -> int:
    new = {"role": args.role, "url": args.url, "name": args.name, "kv_events": args.kv_events}
    print(_line(_ask(args, "POST", "/engines", new)))
    return 0


def _drain(args: argparse.Namespace) -> int:
    engine = _ask(args, "DELETE" if args.resume else "POST", f"{_path(args)}/drain")
    if args.wait and not args.resume:
        engine = _wait(args, lambda now: not now["in_flight"] and not now["handovers"])
    print(_line(engine) if engine else f"{args.name} has left")
    return 0


def _remove(args: argparse.Namespace) -> int:
    query = "" if args.timeout is None else f"?timeout_s={args.timeout:g}"
    engine = _ask(args, "DELETE", f"{_path(args)}{query}")
    if args.wait:
        _wait(args, lambda _: False)
        print(f"{args.name} has left")
    else:
        print(_line(engine))
    return 0


def _set_role(args: argparse.Namespace) -> int:
    print(_line(_ask(args, "PUT", f"{_path(args)}/role", {"role": args.role})))
    return 0


def _set_kv_events(args: argparse.Namespace) -> int:
    print(_line(_ask(args, "PUT", f"{_path(args)}/kv-events", {"kv_events": args.kv_events})))
    return 0


def _reload(args: argparse.Namespace) -> int:
    changes = {what: names for what, names in _ask(args, "POST", "/reload").items() if names}
    for what, names in changes.items():
        print(f"{what}: {', '.join(names)}")
    if not changes:
        print("nothing has changed")
    return 0


def _path(args: argparse.Namespace) -> str:
    return f"/engines/{quote(os.fsencode(args.name), safe='')}"


def _line(engine: dict[str, Any]) -> str:
    busy = f"{engine['in_flight']} requests, {engine['handovers']} hand-overs"
    rest = " down" if engine["down"] else " resting" if engine["resting"] else ""
    return f"{engine['name']:8} {engine['role']:8} {engine['url']:32} {engine['state']:9} {busy}{rest}"


def _wait(args: argparse.Namespace, done: Any) -> dict[str, Any]:
    """Look until ``done`` says so; nothing once the engine is gone."""
    deadline = time.monotonic() + args.wait
    while True:
        try:
            engine = _ask(args, "GET", _path(args))
        except NotFoundError:
            return {}
        if done(engine):
            return engine
        if time.monotonic() > deadline:
            raise DeadlineError(f"after {args.wait:g} s: {_line(engine)}")
        print(f"waiting: {_line(engine)}", file=sys.stderr)
        time.sleep(LOOK_S)


def _ask(args: argparse.Namespace, method: str, path: str, body: object = None) -> dict[str, Any]:
    token = read_token(args.admin_token_file, TOKEN_VARIABLE)
    return ask(args.admin, token, method, path, body)
