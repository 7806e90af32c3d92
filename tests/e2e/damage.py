"""KV that goes, or goes bad, between P's save and D's lookup."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvrelay.client.blocking import PoolClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.testing.stack import RunningStack


@contextmanager
def vandal(stack: RunningStack, count: int, *, damage: bool = False, size: int | None = None) -> Iterator[list[bytes]]:
    """Delete the first ``count`` objects that P saves as soon as each is sealed, once: written again, it is let be.

    D, stopped meanwhile, does not ask before that is done. ``damage``: flip a bit of each instead. ``size``: only
    objects of so many bytes. Yields the keys that were hit.
    """
    d0 = stack.process("D0")
    hit: list[bytes] = []
    stop = threading.Event()

    def work(pool: PoolClient) -> None:
        try:
            spoil(pool)
        finally:
            os.kill(d0, signal.SIGCONT)

    def spoil(pool: PoolClient) -> None:
        known = {info.key for info in pool.list_objects()}
        ready.set()
        while len(hit) < count and not stop.wait(0.002):
            for info in pool.list_objects():
                if info.key in known or info.state != "sealed" or len(hit) == count:
                    continue
                known.add(info.key)
                if size not in (None, info.size):
                    continue
                if damage:
                    flip(pool, info.key)
                else:
                    pool.delete([info.key])
                hit.append(info.key)

    ready = threading.Event()
    with PoolClient.connect(stack.pool_address, name="vandal") as pool:
        thread = threading.Thread(target=work, args=(pool,))
        os.kill(d0, signal.SIGSTOP)
        thread.start()
        assert ready.wait(10)
        try:
            yield hit
        finally:
            stop.set()
            thread.join(10)


def flip(pool: PoolClient, key: bytes) -> None:
    """Flip a bit of an object."""
    prefix = pool.match_prefix([key], lease_s=5.0)
    assert pool.arena is not None
    pool.arena[prefix.views[0].offset + 5] ^= 1
    pool.release(prefix)
