"""``kvrelay pool drain``: over a pool's admin API."""

from __future__ import annotations

import http.client
import json
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvrelay.client.token import read_token
from kvrelay.errors import ConfigError, DeadlineError, PoolUnavailableError, UnauthorizedError

if TYPE_CHECKING:
    import argparse

TIMEOUT_S = 10.0
LOOK_S = 0.2


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
    return ", ".join(f"{state[name]} {name}" for name in ("leases", "unsealed", "tickets") if state[name])


def _ask(url: str, method: str, token: str | None) -> dict[str, int]:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "http" or host is None or parts.path.strip("/"):
        raise ConfigError(f"{url!r} is no admin API: give http://HOST:PORT, as the pool printed it at its start")
    connection = http.client.HTTPConnection(host, port or 80, timeout=TIMEOUT_S)
    try:
        connection.request(method, "/drain", headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        body = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PoolUnavailableError(f"no admin API answers at {url}: {error}") from error
    finally:
        connection.close()
    if answer.status == UnauthorizedError.http_status:
        raise UnauthorizedError(f"{body['error']['message']} (--admin-token-file)")
    if answer.status != 200:
        raise PoolUnavailableError(f"{url} answered {answer.status}: {body}")
    state: dict[str, int] = body
    return state
