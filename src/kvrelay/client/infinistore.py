"""InfiniStore's Python client over a kvrelay pool: change the import, and the address.

``from kvrelay.client import infinistore`` stands in for ``import infinistore``. Names, arguments and units are those of
InfiniStore: ``write_cache``, ``read_cache`` and ``rdma_write_cache`` count offsets and pages in *elements* of the
tensor, ``allocate_rdma`` and the calls that take a pointer count *bytes*. What a pointer points to is the caller's to
keep until the call has ended. docs/client.md says what differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvrelay.client.blocking import PoolClient
from kvrelay.client.core.blocks import Blocks
from kvrelay.client.core.given import keys_of, pairs_of, whole_number
from kvrelay.client.tensors import bytes_of_tensor
from kvrelay.client.token import read_token
from kvrelay.errors import BadRequestError, KvRelayError, NotFoundError, PoolUnavailableError
from kvrelay.wire import limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.client.tensors import Memory

R = TypeVar("R")

TYPE_RDMA = "RDMA"
TYPE_TCP = "TCP"
TYPE_LOCAL_GPU = "LOCAL_GPU"
LINK_ETHERNET = "Ethernet"
LINK_IB = "IB"

InfiniStoreException = KvRelayError


class InfiniStoreKeyNotFound(NotFoundError):  # noqa: N818 - InfiniStore's name
    """A key that was to be read is not in the pool."""


def key_of(key: str) -> bytes:
    """The pool's key for a string: its UTF-8 bytes, or their SHA-256 where these are more than 64."""
    if not isinstance(key, str):
        raise BadRequestError(f"{key!r} of type {type(key).__qualname__} is not a key: InfiniStore's are strings")
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(f"{key!r} is not a key: {error}") from None
    if not encoded:
        raise BadRequestError("a key is empty")
    return encoded if len(encoded) <= limits.MAX_KEY_BYTES else hashlib.sha256(encoded).digest()


class ClientConfig:
    """Where the pool is: ``host_addr`` and ``service_port``, or ``address`` as kvrelay writes it, with ``token``.

    ``connection_type``, ``dev_name``, ``ib_port``, ``link_type`` and ``log_level`` are taken and change nothing: a UNIX
    socket's address means shared memory, any other TCP.
    """

    def __init__(self, **settings: Any) -> None:
        self.host_addr: str | None = settings.pop("host_addr", None)
        self.service_port: int | None = settings.pop("service_port", None)
        self.address: str | None = settings.pop("address", None)
        self.token: str | None = settings.pop("token", None)
        self.connection_type: str = settings.pop("connection_type", TYPE_TCP)
        for ignored in ("dev_name", "ib_port", "link_type", "log_level"):
            settings.pop(ignored, None)
        if settings:
            raise BadRequestError(
                f"unknown settings {', '.join(sorted(settings))}: legal are host_addr, service_port, address, token, "
                "connection_type, dev_name, ib_port, link_type and log_level"
            )

    @property
    def where(self) -> str:
        """The pool's address. BadRequestError: none was given."""
        if self.address is not None:
            return self.address
        if not self.host_addr or not self.service_port:
            raise BadRequestError(f"no pool is named by host {self.host_addr!r} and port {self.service_port!r}")
        return f"tcp:{self.host_addr}:{self.service_port}"


class RemoteBlock(NamedTuple):
    """What `InfinityConnection.allocate_rdma` gives: a page to be written."""

    key: bytes
    size: int


class InfinityConnection:
    """A connection; any thread or task may use it. Calls end when their work is done: `sync` waits for nothing."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._client: PoolClient | None = None
        self._regions: list[tuple[int, int]] = []

    # --- the connection ---

    @property
    def rdma_connected(self) -> bool:
        """Whether it is connected; whatever the transport."""
        return self._client is not None and not self._client.closed

    local_connected = rdma_connected

    def connect(self) -> None:
        """Connect. Errors as for `kvrelay.client.blocking.PoolClient.connect`."""
        if self.rdma_connected:
            raise BadRequestError("this connection is connected already")
        self.close()
        token = self.config.token or read_token(None)
        self._client = PoolClient.connect(self.config.where, name="infinistore client", token=token)

    async def connect_async(self) -> None:
        """`connect` without blocking the loop."""
        await _in_thread(self.connect)

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()

    @property
    def _pool(self) -> PoolClient:
        if self._client is None:
            raise PoolUnavailableError("not connected: call connect() first")
        return self._client

    def register_mr(self, memory: int | Memory, size: int | None = None) -> int:
        """Say that this memory (a pointer and its size, or a tensor) will be used. Needed before pointers are used."""
        if isinstance(memory, Integral):
            start, count = _region(memory, size)
            self._regions.append((start, start + count))
        else:
            bytes_of_tensor(memory)
        return 0

    def sync(self) -> None:
        """Everything before it is done. PoolUnavailableError: the connection has ended."""
        self._pool.sync()

    # --- tensors: elements ---

    def write_cache(self, cache: Memory, blocks: Sequence[tuple[str, int]], page_size: int) -> int:
        """Store pages of a tensor; keys that are there already are left alone."""
        self._pool.write_cache(cache, _named(blocks), page_size)
        return 0

    local_gpu_write_cache = write_cache

    def read_cache(self, cache: Memory, blocks: Sequence[tuple[str, int]], page_size: int) -> None:
        """Read pages into a tensor. InfiniStoreKeyNotFound: one is not there."""
        with _KeyNotFound():
            self._pool.read_cache(cache, _named(blocks), page_size)

    def allocate_rdma(self, keys: Sequence[str], page_size_in_bytes: int) -> list[RemoteBlock]:
        """Pages to be written by `rdma_write_cache`. Nothing is asked of the pool before that."""
        return [RemoteBlock(key, page_size_in_bytes) for key in _keys_of(keys)]

    def rdma_write_cache(
        self, cache: Memory, offsets: Sequence[int], page_size: int, remote_blocks: Sequence[RemoteBlock]
    ) -> int:
        """Store pages of a tensor, at ``offsets``, as the pages that `allocate_rdma` gave."""
        if len(offsets) != len(remote_blocks):
            raise BadRequestError(f"{len(offsets)} offsets for {len(remote_blocks)} remote blocks")
        blocks = [(block.key, offset) for block, offset in zip(remote_blocks, offsets, strict=True)]
        self._pool.write_cache(cache, blocks, page_size)
        return 0

    async def write_cache_async(self, cache: Memory, blocks: Sequence[tuple[str, int]], page_size: int) -> int:
        """`write_cache` without blocking the loop."""
        return await _in_thread(lambda: self.write_cache(cache, blocks, page_size))

    async def read_cache_async(self, cache: Memory, blocks: Sequence[tuple[str, int]], page_size: int) -> None:
        """`read_cache` without blocking the loop."""
        await _in_thread(lambda: self.read_cache(cache, blocks, page_size))

    async def allocate_rdma_async(self, keys: Sequence[str], page_size_in_bytes: int) -> list[RemoteBlock]:
        """`allocate_rdma`, which does not block."""
        return self.allocate_rdma(keys, page_size_in_bytes)

    # --- pointers: bytes ---

    async def rdma_write_cache_async(self, blocks: Sequence[tuple[str, int]], block_size: int, ptr: int) -> int:
        """Store ``block_size`` bytes at each offset from ``ptr``, in registered memory."""
        keys, pages = self._at(ptr, blocks, block_size)
        await _in_thread(lambda: self._pool.put_blocks(keys, pages))
        return 200

    async def rdma_read_cache_async(self, blocks: Sequence[tuple[str, int]], block_size: int, ptr: int) -> int:
        """Read blocks to their offsets from ``ptr``, in registered memory. InfiniStoreKeyNotFound: one is not there."""
        keys, pages = self._at(ptr, blocks, block_size)
        count = await _in_thread(lambda: self._pool.get_blocks(keys, pages))
        if count < len(keys):
            raise InfiniStoreKeyNotFound(f"key {blocks[count][0]!r} is not in the pool")
        return 200

    def tcp_write_cache(self, key: str, ptr: int, size: int, **_ignored: Any) -> None:
        """Store ``size`` bytes at ``ptr``."""
        self._pool.put(key_of(key), _memory(*_region(ptr, size)))

    def tcp_read_cache(self, key: str, **_ignored: Any) -> Any:
        """One object, as a NumPy array of bytes. InfiniStoreKeyNotFound: it is not there."""
        import numpy as np

        data = self._pool.get(key_of(key))
        if data is None:
            raise InfiniStoreKeyNotFound(f"key {key!r} is not in the pool")
        return np.frombuffer(data, dtype=np.uint8)

    def _at(self, ptr: int, blocks: Sequence[tuple[str, int]], block_size: int) -> tuple[list[bytes], Blocks]:
        names, places = pairs_of(blocks, "blocks", "key and offset")
        offsets = [whole_number(place, "offset") for place in places]
        ptr, block_size = _region(ptr, block_size)
        first = ptr + min(offsets, default=0)
        last = ptr + max(offsets, default=0) + block_size
        if not any(start <= first and last <= stop for start, stop in self._regions):
            raise BadRequestError(f"memory from {first:#x} to {last:#x} was not registered: call register_mr first")
        return _keys_of(names), Blocks.of_pages(_memory(ptr, last - ptr), offsets, block_size)

    # --- keys ---

    def check_exist(self, key: str) -> bool:
        """Whether the pool holds the whole object."""
        return self._pool.exists([key_of(key)])[0]

    def get_match_last_index(self, keys: Sequence[str]) -> int:
        """Index of the last key of the longest prefix that the pool holds. NotFoundError: not even the first."""
        sealed = self._pool.count_prefix(_keys_of(keys)).sealed
        if not sealed:
            raise InfiniStoreKeyNotFound("can't find a match: the first key is not in the pool")
        return sealed - 1

    def delete_keys(self, keys: Sequence[str]) -> int:
        """Forget objects; how many there were."""
        return self._pool.delete(_keys_of(keys))


def _keys_of(keys: Sequence[str]) -> list[bytes]:
    """The pool's keys for strings."""
    return [key_of(key) for key in keys_of(keys)]


def _region(address: Any, size: Any) -> tuple[int, int]:
    """An address and how many bytes are there. BadRequestError: neither can be."""
    start, count = whole_number(address, "address"), whole_number(size, "size")
    if start <= 0 or count <= 0 or start + count > 1 << 64:
        raise BadRequestError(f"{count} bytes at {start:#x} cannot be used as memory")
    return start, count


def _named(blocks: Sequence[tuple[str, int]]) -> list[tuple[bytes, int]]:
    """Blocks under keys of the pool."""
    keys, offsets = pairs_of(blocks, "blocks", "key and offset")
    return list(zip(_keys_of(keys), offsets, strict=True))


class _KeyNotFound:
    """Raises a `NotFoundError` under InfiniStore's name."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NotFoundError):
            raise InfiniStoreKeyNotFound(str(error)) from error


def _memory(ptr: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(ptr)).cast("B")


async def _in_thread(work: Callable[[], R]) -> R:
    """Do blocking work in a thread. Who is cancelled, however often, waits for its end: memory is in use until then."""
    done = asyncio.get_running_loop().run_in_executor(None, work)  # no task: a loop that ends cancels those
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        while not done.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([done])
        raise
