"""The end of a soak: everything a client could hold must be free again, and the server as small as it was."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.wire import messages as m
from soak import content

if TYPE_CHECKING:
    from kvrelay.client.blocking import PoolClient

ZERO = ("leases", "tickets", "unsealed", "waiting", "lingering_bytes", "leased_objects", "corrupt")
SETTLE_S = 75.0
"""The pool closes a connection that stops amid a message after a minute: by then nothing may be left."""
ASK_EVERY_S = 0.25


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is its own: neither files nor shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no RssAnon of process {pid}")


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - only counted


def leaks(client: PoolClient, clients: int) -> list[str]:
    """What is left in the pool of a soak of ``clients``, once only ``client`` is connected. Waits for it to settle."""
    pinned = [content.pinned_key(one, pin) for one in range(clients) for pin in range(content.PINS_OF_A_CLIENT)]
    client.start(m.Unpin(0, pinned), m.Affected).result(SETTLE_S)
    end = time.monotonic() + SETTLE_S
    while True:
        stat = client.stat()
        left = [f"{name} = {stat[name]}" for name in ZERO if stat[name]]
        if stat["connections"] != 1:
            left.append(f"connections = {stat['connections']}")
        if not left or time.monotonic() > end:
            break
        time.sleep(ASK_EVERY_S)
    client.start(m.Purge(0), m.Purged).result(SETTLE_S)
    stat = client.stat()
    if stat["objects"]:
        left.append(f"objects after a purge = {stat['objects']}")
    if stat["free_bytes"] != stat["arena_bytes"]:
        left.append(f"free_bytes = {stat['free_bytes']} of {stat['arena_bytes']} after a purge")
    if stat["largest_free_bytes"] != stat["arena_bytes"]:
        left.append(f"largest_free_bytes = {stat['largest_free_bytes']} of {stat['arena_bytes']} after a purge")
    return left
