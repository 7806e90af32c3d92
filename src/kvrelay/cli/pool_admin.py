"""``kvrelay pool drain``: over a pool's admin API."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from kvrelay.cli.admin_api import ask
from kvrelay.client.token import read_token
from kvrelay.errors import DeadlineError, UnauthorizedError

if TYPE_CHECKING:
    import argparse

LOOK_S = 0.2
HELD = {"leases": "leases", "unsealed": "unsealed", "tickets": "tickets", "sending": "answers on their way"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``drain``."""
    parser.add_argument("url", metavar="URL", help="of the admin API, such as http://127.0.0.1:7421")
    parser.add_argument("--admin-token-file", metavar="FILE", help="file with its bearer token")
    parser.add_argument("--resume", action="store_true", help="take new objects again")
    parser.add_argument(
        "--wait", metavar="S", type=float, default=0.0, help="wait so many seconds until nothing is held (%(default)g)"
    )


def drain(args: argparse.Namespace) -> int:
    """Drain or resume; with ``--wait``, exit status 0 once nothing is held."""
    token = read_token(args.admin_token_file) if args.admin_token_file else None
    state = _ask(args.url, "DELETE" if args.resume else "POST", token)
    deadline = time.monotonic() + args.wait
    while args.wait and not args.resume and _held(state):
        if time.monotonic() > deadline:
            raise DeadlineError(f"after {args.wait:g} s the pool still holds {_held(state)}")
        print(f"waiting for {_held(state)}", file=sys.stderr)
        time.sleep(LOOK_S)
        state = _ask(args.url, "GET", token)
    print(f"{'draining' if state['draining'] else 'taking new objects'}: {_held(state) or 'nothing'} held")
    return 0


def _held(state: dict[str, int]) -> str:
    return ", ".join(f"{state[name]} {told}" for name, told in HELD.items() if state[name])


def _ask(url: str, method: str, token: str | None) -> dict[str, int]:
    try:
        return ask(url, token, method, "/drain")
    except UnauthorizedError as error:
        raise UnauthorizedError(f"{error} (--admin-token-file)") from None
