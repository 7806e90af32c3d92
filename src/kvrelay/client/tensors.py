"""The bytes of a caller's memory: buffers, NumPy arrays, torch tensors on the CPU. Nothing is copied or imported.

A view keeps the memory alive, so that callers may give what nobody else holds: each tensor of a generator, for one.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, TypeAlias

from kvrelay.client.core.blocks import Blocks, bytes_of
from kvrelay.client.core.given import pairs_of, whole_number
from kvrelay.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Memory: TypeAlias = Any
"""Anything with the buffer protocol (bytes, bytearray, memoryview, NumPy arrays), with ``__array_interface__``, or a
CPU tensor in the way of torch (``data_ptr``, ``element_size``, ``numel``, ``is_contiguous``, ``device``)."""


def bytes_of_tensor(memory: Memory) -> memoryview:
    """The memory itself, as it was given, which lives as long as this view of it. It is only checked where it is used.

    Raises:
        BadRequestError: it is none of `Memory`, not contiguous, or not in this host's memory.
    """
    if type(memory) is memoryview:
        return memory
    try:
        return memoryview(memory)
    except (TypeError, ValueError, BufferError):  # an array of a type that buffers do not know raises ValueError
        return _at_address(memory)


def all_bytes_of(memories: Iterable[Memory]) -> list[memoryview]:
    """`bytes_of_tensor` of each."""
    try:
        memories = list(memories)
    except TypeError:
        raise BadRequestError(f"{type(memories).__qualname__} is not a sequence of buffers") from None
    if set(map(type, memories)) == {memoryview}:
        return memories
    return [bytes_of_tensor(memory) for memory in memories]


def _at_address(memory: Memory) -> memoryview:
    kind = f"{type(memory).__module__}.{type(memory).__qualname__}"
    if isinstance(memory, type):
        raise BadRequestError(f"{memory!r} is a type, not memory")
    if hasattr(memory, "data_ptr"):
        try:
            address, size = _of_tensor(memory, kind)
        except RuntimeError as error:  # as of sparse ones
            raise BadRequestError(f"a {kind} has no memory to be read from here: {error}") from None
        read_only = False
    elif hasattr(memory, "__array_interface__"):
        described = memory.__array_interface__
        if described.get("strides") is not None:
            raise BadRequestError(f"a {kind} of shape {described['shape']} is not contiguous")
        address, read_only = described["data"]
        size = memory.nbytes
    else:
        raise BadRequestError(
            f"a {kind} cannot be used as memory: give a buffer (bytes, memoryview), a NumPy array or a CPU tensor"
        )
    if not size:
        return memoryview(bytearray())
    if not address:
        raise BadRequestError(f"a {kind} of {size} bytes has no memory of its own")
    held = (ctypes.c_ubyte * size).from_address(address)
    held.owner = memory  # type: ignore[attr-defined]  # an address keeps nothing alive; views keep this array
    view = memoryview(held).cast("B")
    return view.toreadonly() if read_only else view


def _of_tensor(tensor: Memory, kind: str) -> tuple[int, int]:
    """Address and size of a tensor's bytes."""
    if tensor.device.type != "cpu":
        raise BadRequestError(f"a {kind} on {tensor.device} cannot be read from here: copy it to the CPU first")
    if not tensor.is_contiguous():
        raise BadRequestError(f"a {kind} of shape {tuple(tensor.shape)} is not contiguous")
    if getattr(tensor, "is_conj", bool)() or getattr(tensor, "is_neg", bool)():
        raise BadRequestError(f"a {kind} whose memory holds other values: give .resolve_conj().resolve_neg()")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def element_size(memory: Memory) -> int:
    """Bytes of one element."""
    size = getattr(memory, "itemsize", None)
    if size is None:
        size = memory.element_size() if hasattr(memory, "element_size") else memoryview(memory).itemsize
    return int(size)


def pages_of(
    tensor: Memory, blocks: Sequence[tuple[bytes, int]], page_size: int, *, writable: bool = False
) -> tuple[list[bytes], Blocks]:
    """Keys and pages of a tensor: ``blocks`` are keys and offsets; offsets and ``page_size`` count elements.

    Raises:
        BadRequestError: a page is empty or not within the tensor, which is not contiguous, or read-only and written to.
    """
    flat = bytes_of(bytes_of_tensor(tensor), writable=writable)
    scale = element_size(tensor)
    keys, offsets = pairs_of(blocks, "blocks", "key and offset")
    places = [whole_number(offset, "offset") * scale for offset in offsets]
    return keys, Blocks.of_pages(flat, places, whole_number(page_size, "page_size") * scale)


def objects_of(items: Iterable[tuple[bytes, Memory]]) -> tuple[list[bytes], Blocks]:
    """Keys and memory of whole objects.

    Raises:
        BadRequestError: these are no pairs, or one is no memory that can be sent.
    """
    keys, memories = pairs_of(items, "items", "key and memory")
    return keys, Blocks.of_buffers(all_bytes_of(memories))


def pieces_of(pieces: Iterable[tuple[int, Memory]]) -> list[tuple[int, memoryview]]:
    """Offsets and bytes of an object's pieces.

    Raises:
        BadRequestError: these are no pairs, or one is no memory that can be sent.
    """
    offsets, memories = pairs_of(pieces, "pieces", "offset and memory")
    return list(zip(offsets, all_bytes_of(memories), strict=True))
