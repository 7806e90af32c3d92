"""The asyncio client of the soak: many operations in flight on one connection, some of them cancelled."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.errors import DeadlineError, KvRelayError, PoolUnavailableError
from soak import content
from soak.client import ANSWER_S, EXPECTED

if TYPE_CHECKING:
    from kvrelay.client.core.operations import Prefix
    from soak.journal import Journal

TASKS = 6
CANCEL_S = 0.002


class ConcurrentClient:
    """The ``number``-th client: ``TASKS`` tasks share its connection."""

    def __init__(self, number: int, address: str, seed: int, journal: Journal) -> None:
        self._number = number
        self._address = address
        self._rng = random.Random(seed)
        self._journal = journal
        self._stopping = False
        self._ours = False

    async def run(self) -> None:
        """Work until `stop`."""
        while not self._stopping:
            self._ours = False
            client = await AsyncPoolClient.connect(self._address, name=f"soak {self._number}", timeout_s=ANSWER_S)
            async with client:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(TASKS):
                        tasks.create_task(self._work(client))
                if client.closed and not self._ours:
                    self._journal.violation(f"client {self._number}: its connection ended")

    def stop(self) -> None:
        """Make `run` end soon. From any thread."""
        self._stopping = True

    async def _work(self, client: AsyncPoolClient) -> None:
        while not self._stopping and not client.closed:
            first = self._rng.randrange(content.WHOLE_KEYS)
            count = self._rng.randint(1, 8)
            keys = [content.whole_key((first + step) % content.WHOLE_KEYS) for step in range(count)]
            act = self._rng.choice([self._put, self._get, self._lease])
            name = f"concurrent {act.__name__.strip('_')}"
            try:
                if self._rng.random() < 0.1:
                    async with asyncio.timeout(self._rng.uniform(0, CANCEL_S)):
                        await act(client, keys)
                else:
                    await act(client, keys)
            except TimeoutError:
                self._ours = self._ours or client.closed  # cancelled amid a transfer, a connection cannot go on
                self._journal.count("concurrent: cancelled")
            except (*EXPECTED, DeadlineError) as error:
                # An answer that is late ends the connection, for all tasks.
                self._ours = self._ours or isinstance(error, DeadlineError)
                self._journal.count(f"{name}: {type(error).__name__}")
            except (KvRelayError, AssertionError) as error:
                if isinstance(error, PoolUnavailableError) and (self._ours or "cancelled half-way" in str(error)):
                    self._ours = True
                    return
                self._journal.violation(f"{name} of client {self._number}: {type(error).__name__}: {error}")
            else:
                self._journal.count(name)

    async def _put(self, client: AsyncPoolClient, keys: list[bytes]) -> None:
        await client.put_many([(key, memoryview(content.content_of(key))) for key in keys])

    async def _get(self, client: AsyncPoolClient, keys: list[bytes]) -> None:
        into = [memoryview(bytearray(content.spec_of(key).size)) for key in keys]
        found = await client.get_many(keys, into)
        for key, view in zip(keys[:found], into, strict=False):
            if view != content.content_of(key):
                raise AssertionError(f"wrong bytes of {key!r}")
            self._journal.count("bytes verified", view.nbytes)

    async def _lease(self, client: AsyncPoolClient, keys: list[bytes]) -> None:
        prefix: Prefix = await client.match_prefix(keys, lease_s=2.0)
        await client.release(prefix)
