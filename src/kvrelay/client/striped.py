"""Several connections to one pool, used as one: a big batch is split over them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.client.blocking import WAIT_S, PoolClient
from kvrelay.client.core.blocks import Blocks
from kvrelay.client.core.given import keys_of
from kvrelay.client.core.puts import Puts, raise_unless_stored
from kvrelay.client.core.stripes import joined_count, joined_puts, stripes
from kvrelay.client.tensors import all_bytes_of, objects_of, pages_of
from kvrelay.errors import BadRequestError, KvRelayError, NotFoundError, PoolUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from types import TracebackType

    from kvrelay.client.tensors import Memory
    from kvrelay.wire.bulk import Stored

R = TypeVar("R")
C = TypeVar("C", PoolClient, AsyncPoolClient)


class _Striped(Generic[C]):
    """Connections, of which those that have ended are left out."""

    def __init__(self, clients: Sequence[C]) -> None:
        self.clients: list[C] = list(clients)

    @property
    def live(self) -> list[C]:
        """Connections that have not ended.

        Raises:
            PoolUnavailableError: all have.
        """
        live = [client for client in self.clients if not client.closed]
        if not live:
            raise PoolUnavailableError(f"all {len(self.clients)} connections to the pool have ended")
        return live

    @property
    def one(self) -> C:
        """A connection, for everything that is not split: names, tickets, `stat`."""
        return self.live[0]

    def _told(self, client: C, error: KvRelayError) -> KvRelayError:
        number = self.clients.index(client) + 1
        return type(error)(f"connection {number} of {len(self.clients)}: {error}")


def _keys_for(keys: Sequence[bytes], blocks: Blocks) -> Sequence[bytes]:
    """The keys, one a block."""
    keys = keys_of(keys)
    if len(keys) != len(blocks):
        raise BadRequestError(f"{len(blocks)} blocks for {len(keys)} keys")
    return keys


def _all_there(keys: Sequence[bytes], count: int) -> None:
    if count < len(keys):
        raise NotFoundError(f"page {count} of {len(keys)}, key {keys[count].hex()}, is not in the pool")


class StripedPoolClient(_Striped[PoolClient]):
    """Blocking; any thread may use it. Each stripe of a batch runs on a thread of its own.

    When a connection ends, the call that used it fails and says which; later calls use the others.
    """

    def __init__(self, clients: Sequence[PoolClient]) -> None:
        super().__init__(clients)
        self._threads = ThreadPoolExecutor(len(self.clients), thread_name_prefix="kvrelay-stripe")

    @classmethod
    def connect(cls, address: str, *, connections: int, name: str, **how: Any) -> Self:
        """Connect so many times; other arguments and errors as for `PoolClient.connect`."""
        if connections < 1:
            raise BadRequestError(f"{connections} connections: at least one is needed")
        clients: list[PoolClient] = []
        try:
            for _ in range(connections):
                clients.append(PoolClient.connect(address, name=name, **how))  # noqa: PERF401 - closed on failure
        except BaseException:
            for client in clients:
                client.close()
            raise
        return cls(clients)

    def _each(self, blocks: Blocks, work: Callable[[PoolClient, int, int], R]) -> tuple[list[tuple[int, int]], list[R]]:
        live = self.live
        runs = stripes(blocks, len(live))
        if len(runs) == 1:
            return runs, [self._guarded(live[0], work, runs[0])]
        futures = [
            self._threads.submit(self._guarded, client, work, run)
            for client, run in zip(live[1:], runs[1:], strict=False)
        ]
        errors: list[BaseException] = []
        results: list[R] = []
        try:
            results.append(self._guarded(live[0], work, runs[0]))
        except KvRelayError as error:
            errors.append(error)
        finally:
            wait(futures)  # whatever ended this: until then the buffers are not the caller's again
        for future in futures:
            failed = future.exception()
            if failed is None:
                results.append(future.result())
            else:
                errors.append(failed)
        if errors:
            raise errors[0]
        return runs, results

    def _guarded(self, client: PoolClient, work: Callable[[PoolClient, int, int], R], run: tuple[int, int]) -> R:
        try:
            return work(client, *run)
        except KvRelayError as error:
            raise self._told(client, error) from error

    def put_blocks(self, keys: Sequence[bytes], blocks: Blocks, *, ttl_s: float = 0.0, partly: bool = False) -> Puts:
        """As `PoolClient.put_blocks`."""
        keys = _keys_for(keys, blocks)
        _, parts = self._each(
            blocks,
            lambda client, start, stop: client.put_blocks(
                keys[start:stop], blocks.cut(start, stop), ttl_s=ttl_s, partly=True
            ),
        )
        puts = joined_puts(parts)
        if not partly:
            raise_unless_stored(puts)
        return puts

    def get_blocks(self, keys: Sequence[bytes], blocks: Blocks, *, wait_s: float = WAIT_S) -> int:
        """As `PoolClient.get_blocks`."""
        keys = _keys_for(keys, blocks)
        runs, counts = self._each(
            blocks,
            lambda client, start, stop: client.get_blocks(keys[start:stop], blocks.cut(start, stop), wait_s=wait_s),
        )
        return joined_count(runs, counts)

    def put(self, key: bytes, data: Memory, *, ttl_s: float = 0.0) -> Stored:
        """As `PoolClient.put`."""
        return self.one.put(key, data, ttl_s=ttl_s)

    def get(self, key: bytes, *, wait_s: float = WAIT_S) -> bytes | None:
        """As `PoolClient.get`."""
        return self.one.get(key, wait_s=wait_s)

    def put_many(self, items: Iterable[tuple[bytes, Memory]], *, ttl_s: float = 0.0, partly: bool = False) -> Puts:
        """As `PoolClient.put_many`."""
        return self.put_blocks(*objects_of(items), ttl_s=ttl_s, partly=partly)

    def get_many(self, keys: Sequence[bytes], into: Sequence[Memory], *, wait_s: float = WAIT_S) -> int:
        """As `PoolClient.get_many`."""
        blocks = Blocks.of_buffers(all_bytes_of(into), writable=True)
        return self.get_blocks(keys, blocks, wait_s=wait_s)

    def write_cache(
        self, tensor: Memory, blocks: Sequence[tuple[bytes, int]], page_size: int, *, ttl_s: float = 0.0
    ) -> Puts:
        """As `PoolClient.write_cache`."""
        return self.put_blocks(*pages_of(tensor, blocks, page_size), ttl_s=ttl_s)

    def read_cache(
        self, tensor: Memory, blocks: Sequence[tuple[bytes, int]], page_size: int, *, wait_s: float = WAIT_S
    ) -> None:
        """As `PoolClient.read_cache`."""
        keys, pages = pages_of(tensor, blocks, page_size, writable=True)
        _all_there(keys, self.get_blocks(keys, pages, wait_s=wait_s))

    def close(self) -> None:
        """End all connections. May be called twice."""
        for client in self.clients:
            client.close()
        self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStripedPoolClient(_Striped[AsyncPoolClient]):
    """For one event loop, any number of tasks. Methods, results and errors are those of `StripedPoolClient`."""

    @classmethod
    async def connect(cls, address: str, *, connections: int, name: str, **how: Any) -> Self:
        """Connect so many times; other arguments and errors as for `AsyncPoolClient.connect`."""
        if connections < 1:
            raise BadRequestError(f"{connections} connections: at least one is needed")
        clients: list[AsyncPoolClient] = []
        try:
            for _ in range(connections):
                clients.append(await AsyncPoolClient.connect(address, name=name, **how))  # noqa: PERF401
        except BaseException:
            for client in clients:
                await client.close()
            raise
        return cls(clients)

    async def _each(
        self, blocks: Blocks, work: Callable[[AsyncPoolClient, int, int], Coroutine[Any, Any, R]]
    ) -> tuple[list[tuple[int, int]], list[R]]:
        live = self.live
        runs = stripes(blocks, len(live))
        tasks = [
            asyncio.ensure_future(self._guarded(client, work, run)) for client, run in zip(live, runs, strict=False)
        ]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        failed = [task for task in tasks if task.exception() is not None]  # all are asked: asyncio reports the others
        return runs, [task.result() for task in failed or tasks]

    async def _guarded(
        self,
        client: AsyncPoolClient,
        work: Callable[[AsyncPoolClient, int, int], Coroutine[Any, Any, R]],
        run: tuple[int, int],
    ) -> R:
        try:
            return await work(client, *run)
        except KvRelayError as error:
            raise self._told(client, error) from error

    async def put_blocks(
        self, keys: Sequence[bytes], blocks: Blocks, *, ttl_s: float = 0.0, partly: bool = False
    ) -> Puts:
        """As `AsyncPoolClient.put_blocks`."""
        keys = _keys_for(keys, blocks)
        _, parts = await self._each(
            blocks,
            lambda client, start, stop: client.put_blocks(
                keys[start:stop], blocks.cut(start, stop), ttl_s=ttl_s, partly=True
            ),
        )
        puts = joined_puts(parts)
        if not partly:
            raise_unless_stored(puts)
        return puts

    async def get_blocks(self, keys: Sequence[bytes], blocks: Blocks, *, wait_s: float = WAIT_S) -> int:
        """As `AsyncPoolClient.get_blocks`."""
        keys = _keys_for(keys, blocks)
        runs, counts = await self._each(
            blocks,
            lambda client, start, stop: client.get_blocks(keys[start:stop], blocks.cut(start, stop), wait_s=wait_s),
        )
        return joined_count(runs, counts)

    async def put(self, key: bytes, data: Memory, *, ttl_s: float = 0.0) -> Stored:
        """As `AsyncPoolClient.put`."""
        return await self.one.put(key, data, ttl_s=ttl_s)

    async def get(self, key: bytes, *, wait_s: float = WAIT_S) -> bytes | None:
        """As `AsyncPoolClient.get`."""
        return await self.one.get(key, wait_s=wait_s)

    async def put_many(
        self, items: Iterable[tuple[bytes, Memory]], *, ttl_s: float = 0.0, partly: bool = False
    ) -> Puts:
        """As `AsyncPoolClient.put_many`."""
        return await self.put_blocks(*objects_of(items), ttl_s=ttl_s, partly=partly)

    async def get_many(self, keys: Sequence[bytes], into: Sequence[Memory], *, wait_s: float = WAIT_S) -> int:
        """As `AsyncPoolClient.get_many`."""
        blocks = Blocks.of_buffers(all_bytes_of(into), writable=True)
        return await self.get_blocks(keys, blocks, wait_s=wait_s)

    async def write_cache(
        self, tensor: Memory, blocks: Sequence[tuple[bytes, int]], page_size: int, *, ttl_s: float = 0.0
    ) -> Puts:
        """As `AsyncPoolClient.write_cache`."""
        return await self.put_blocks(*pages_of(tensor, blocks, page_size), ttl_s=ttl_s)

    async def read_cache(
        self, tensor: Memory, blocks: Sequence[tuple[bytes, int]], page_size: int, *, wait_s: float = WAIT_S
    ) -> None:
        """As `AsyncPoolClient.read_cache`."""
        keys, pages = pages_of(tensor, blocks, page_size, writable=True)
        _all_there(keys, await self.get_blocks(keys, pages, wait_s=wait_s))

    async def close(self) -> None:
        """End all connections. May be called twice."""
        for client in self.clients:
            await client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
