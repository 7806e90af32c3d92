"""The index of what engines hold, and all subscriptions that fill it."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from kvrelay.router.core.kv.index import KvIndex
from kvrelay.router.core.policy.kv_aware import KvAware
from kvrelay.router.kv.subscriber import Subscriber, load_zmq

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import zmq.asyncio

    from kvrelay.router.core.kv.settings import Publisher
    from kvrelay.router.core.policy.base import Policy
    from kvrelay.router.kv.metrics import KvMetrics


class KvHub:
    """The index, and all subscriptions that fill it."""

    def __init__(self, index: KvIndex, metrics: KvMetrics) -> None:
        """Raises `ConfigError` where pyzmq is missing."""
        load_zmq()
        self.index = index
        self._metrics = metrics
        self._context: zmq.asyncio.Context | None = None
        self._subscribers: dict[Publisher, Subscriber] = {}
        self._turn = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    def start(self, publishers: Collection[Publisher]) -> None:
        """Begin to listen to these, in the running event loop."""
        self._context = load_zmq().asyncio.Context()
        self.listen_to(publishers)

    def listen_to(self, publishers: Collection[Publisher]) -> None:
        """These are the publishers now: forget what others said, listen to those that are new."""
        if self._context is None:
            return
        for publisher, subscriber in list(self._subscribers.items()):
            if publisher not in publishers:
                del self._subscribers[publisher]
                self._ending |= subscriber.stop()
        for publisher in publishers:
            if publisher not in self._subscribers:
                self._subscribers[publisher] = Subscriber(
                    publisher, self.index, self._metrics, self._context, self._turn
                )
                self._subscribers[publisher].start()

    async def close(self) -> None:
        """Listen no more."""
        self.listen_to(())
        if self._ending:
            await asyncio.wait(self._ending)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None


def make_hub(policies: Iterable[Policy], metrics: KvMetrics) -> KvHub | None:
    """A hub whose index ``policies`` use; None where none does.

    Raises:
        ConfigError: pyzmq is missing.
    """
    users = [policy for policy in policies if isinstance(policy, KvAware)]
    if not users:
        return None
    hub = KvHub(KvIndex(seed=secrets.randbits(64)), metrics)
    for policy in users:
        policy.index = hub.index
    return hub
