"""One request at a time to an admin API of a pool or a router."""

from __future__ import annotations

import http.client
import json
from typing import Any

from kvrelay.errors import ConfigError, PoolUnavailableError, from_code
from kvrelay.hosts import is_host, split_url

TIMEOUT_S = 15.0


def ask(url: str, token: str | None, method: str, path: str, body: object = None) -> dict[str, Any]:
    """What the API at ``url`` answers. ``body``: sent as JSON.

    Raises:
        ConfigError: the URL cannot be an admin API's.
        PoolUnavailableError: nobody answers, or not as an admin API does.
        KvRelayError: what the API refuses with.
    """
    try:
        parts = split_url(url)
        host, port = parts.hostname, parts.port
    except ConfigError:
        host = port = None
    if host is None or not is_host(host) or parts.scheme != "http" or parts.path.strip("/"):
        raise ConfigError(
            f"{url!r} is not the address of an admin API: give http://HOST:PORT, as it was printed at the start"
        )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    connection = http.client.HTTPConnection(host, port or 80, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        answer = connection.getresponse()
        said: dict[str, Any] = json.loads(answer.read())
        problem = said["error"] if answer.status >= 400 else None
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise PoolUnavailableError(f"no admin API answers at {url}: {error}; start it with --admin-listen") from error
    finally:
        connection.close()
    if problem is None:
        return said
    if problem["code"] == ConfigError.code:
        raise ConfigError(*problem["message"].splitlines())
    raise from_code(problem["code"], problem["message"])
