"""The index of what engines hold, and all subscriptions that fill it."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from kvrelay.router.core.kv.index import KvIndex
from kvrelay.router.core.kv.settings import parse_publishers
from kvrelay.router.core.policy.kv_aware import KvAware
from kvrelay.router.kv.subscriber import Subscriber, load_zmq

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import zmq.asyncio

    from kvrelay.router.core.kv.settings import KvSettings, Publisher
    from kvrelay.router.core.policy.base import Policy
    from kvrelay.router.kv.metrics import KvMetrics


class KvHub:
    """The index, and all subscriptions that fill it."""

    def __init__(self, publishers: tuple[Publisher, ...], index: KvIndex, metrics: KvMetrics) -> None:
        """Raises `ConfigError` where pyzmq is missing."""
        load_zmq()
        self.index = index
        self._publishers = publishers
        self._metrics = metrics
        self._context: zmq.asyncio.Context | None = None
        self._subscribers: dict[Publisher, Subscriber] = {}
        self._turn = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    def start(self, engines: Collection[str]) -> None:
        """Begin to listen to those of these engines that publish, in the running event loop."""
        self._context = load_zmq().asyncio.Context()
        self.listen_to(engines)

    def listen_to(self, engines: Collection[str]) -> None:
        """These are the engines now: forget those that are gone, listen to those that came back."""
        if self._context is None:
            return
        for publisher, subscriber in list(self._subscribers.items()):
            if publisher.engine not in engines:
                del self._subscribers[publisher]
                self._ending |= subscriber.stop()
        for publisher in self._publishers:
            if publisher.engine in engines and publisher not in self._subscribers:
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


def make_hub(settings: KvSettings, policies: Iterable[Policy], metrics: KvMetrics) -> KvHub | None:
    """A hub whose index ``policies`` use; None where nobody publishes.

    Raises:
        ConfigError: pyzmq is missing.
    """
    publishers = parse_publishers(settings.events)
    if not publishers:
        return None
    hub = KvHub(publishers, KvIndex(seed=secrets.randbits(64)), metrics)
    for policy in policies:
        if isinstance(policy, KvAware):
            policy.index = hub.index
    return hub
