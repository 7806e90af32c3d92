"""A caller's memory: what can be used as it is, what is refused, and how pages are counted."""

from __future__ import annotations

import gc
import weakref
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvrelay.client.core.blocks import Blocks, bytes_of
from kvrelay.client.tensors import all_bytes_of, bytes_of_tensor, element_size, objects_of, pages_of, pieces_of
from kvrelay.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def memory_of(tensor: Any) -> bytes:
    return bytes(bytes_of(bytes_of_tensor(tensor)))


class CpuTensor:
    """As much of a torch tensor as is looked at."""

    def __init__(
        self,
        data: np.ndarray[Any, Any],
        *,
        device: str = "cpu",
        contiguous: bool = True,
        address: int | None = None,
    ) -> None:
        self._data = data
        self._address = int(data.ctypes.data) if address is None else address
        self._contiguous = contiguous
        self.device = type("device", (), {"type": device, "__str__": lambda _: f"{device}:0"})()
        self.shape = data.shape

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return self._data.itemsize

    def numel(self) -> int:
        return self._data.size

    def is_contiguous(self) -> bool:
        return self._contiguous


@pytest.mark.parametrize(
    "tensor",
    [
        b"\x01\x02\x03\x04",
        bytearray(b"\x01\x02\x03\x04"),
        memoryview(b"\x01\x02\x03\x04"),
        array("H", [0x0201, 0x0403]),
        np.array([[1, 2], [3, 4]], dtype=np.uint8),
        np.array([0x04030201], dtype=np.uint32),
        CpuTensor(np.array([[0x0201], [0x0403]], dtype=np.uint16)),
    ],
    ids=lambda tensor: type(tensor).__name__,
)
def test_memory_of_many_kinds_is_used_as_its_bytes(tensor: Any) -> None:
    assert memory_of(tensor) == b"\x01\x02\x03\x04"


def test_a_numpy_array_of_a_type_buffers_do_not_know_is_used_in_place() -> None:
    times = np.array([1, 2], dtype="datetime64[s]")
    bytes_of_tensor(times)[0] = 7
    assert int(times.astype(np.int64)[0]) == 7
    times.flags.writeable = False
    assert bytes_of_tensor(times).readonly


def test_a_tensor_is_written_in_place() -> None:
    memory = np.zeros(4, dtype=np.float32)
    bytes_of_tensor(CpuTensor(memory))[:4] = np.float32(1.5).tobytes()
    assert memory[0] == 1.5


def times() -> np.ndarray[Any, Any]:
    """An array of a type buffers do not know."""
    return np.array(range(4), dtype="datetime64[s]")


@pytest.mark.parametrize("make", [lambda: CpuTensor(np.arange(4)), times], ids=["tensor", "times"])
@pytest.mark.parametrize(
    "views_of",
    [
        lambda tensors: list(all_bytes_of(tensors)),
        lambda tensors: objects_of((b"k", tensor) for tensor in tensors)[1].views(),
        lambda tensors: [view for _, view in pieces_of((0, tensor) for tensor in tensors)],
        lambda tensors: pages_of(next(tensors), [(b"k", 0)], 4)[1].views(),
        lambda tensors: [bytes_of_tensor(next(tensors)).toreadonly()[8:]],
    ],
    ids=["buffers", "objects", "pieces", "pages", "a slice"],
)
def test_a_tensor_that_nobody_else_holds_lives_as_long_as_its_views(
    views_of: Callable[[Iterator[Any]], list[memoryview]], make: Callable[[], Any]
) -> None:
    made: list[weakref.ref[Any]] = []

    def one() -> Iterator[Any]:
        tensor = make()
        made.append(weakref.ref(tensor))
        yield tensor

    views = views_of(one())
    gc.collect()
    assert made[0]() is not None
    assert bytes(views[0])[-8:] == (3).to_bytes(8, "little")
    del views
    gc.collect()
    assert made[0]() is None


@pytest.mark.parametrize("dtype", [object, [("number", "i4"), ("thing", object)]])
def test_python_objects_are_no_memory_of_anybody_elses(dtype: Any) -> None:
    array = np.zeros(2, dtype=dtype)
    with pytest.raises(BadRequestError, match="holds Python objects"):
        Blocks.of_buffers([bytes_of_tensor(array)])
    with pytest.raises(BadRequestError, match="holds Python objects"):
        pages_of(array, [(b"k", 0)], 1)
    assert len(Blocks.of_buffers([bytes_of_tensor(np.zeros(2, dtype=[("O", "i4")]))])) == 1


def test_a_page_is_a_whole_number_of_elements() -> None:
    with pytest.raises(BadRequestError, match=r"page_size = 1\.5 of type float: legal is a whole number"):
        pages_of(np.zeros(4, dtype=np.float32), [(b"k", 0)], 1.5)  # type: ignore[arg-type]
    assert len(pages_of(np.zeros(4), [(b"k", 0)], np.int64(2))[1]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (CpuTensor(np.zeros(2), device="cuda"), "cuda:0"),
        (CpuTensor(np.zeros(2), contiguous=False), "not contiguous"),
        (np.array(["2020-01-01"] * 4, dtype="datetime64[s]")[::2], "not contiguous"),
        (CpuTensor(np.zeros(2), address=0), "CpuTensor of 16 bytes has no memory of its own"),
        (np.ndarray, "ndarray'> is a type, not memory"),
        (CpuTensor, "CpuTensor'> is a type, not memory"),
        (7, "int cannot be used as memory"),
        ([1, 2], "list cannot be used as memory"),
    ],
)
def test_memory_that_cannot_be_used_is_refused_by_name(tensor: Any, why: str) -> None:
    with pytest.raises(BadRequestError, match=why):
        bytes_of_tensor(tensor)


@pytest.mark.parametrize(
    "tensor",
    [CpuTensor(np.zeros(0)), np.zeros((0, 4)), np.zeros((4, 0), np.float32), np.zeros(0, "datetime64[s]")],
    ids=["tensor", "rows", "columns", "times"],
)
def test_empty_tensors_have_no_bytes(tensor: Any) -> None:
    assert memory_of(tensor) == b""
    with pytest.raises(BadRequestError, match="buffer 0 is empty"):
        Blocks.of_buffers([bytes_of_tensor(tensor)], writable=True)


@pytest.mark.parametrize(
    ("tensor", "size"),
    [(b"abc", 1), (array("d", [1.0]), 8), (np.zeros(3, np.float16), 2), (CpuTensor(np.zeros(3, np.int32)), 4)],
    ids=["bytes", "array", "numpy", "tensor"],
)
def test_elements_have_the_size_the_tensor_says(tensor: Any, size: int) -> None:
    assert element_size(tensor) == size


def test_offsets_and_pages_count_elements() -> None:
    tensor = np.arange(32, dtype=np.float32)
    keys, pages = pages_of(tensor, [(b"a", 0), (b"b", 24)], 8)
    assert keys == [b"a", b"b"]
    assert [bytes(view) for view in pages.views()] == [tensor[:8].tobytes(), tensor[24:].tobytes()]


@pytest.mark.parametrize(
    ("tensor", "offset", "page", "why"),
    [
        (np.zeros(8, np.float32), 1, 8, "36|ends beyond"),
        (np.zeros(8, np.float32), -1, 4, "integers"),
        (np.zeros(8, np.float32), 0, 0, "at least one"),
        (np.zeros((8, 8), np.float32)[:, :4], 0, 4, "not contiguous"),
    ],
)
def test_pages_beyond_the_tensor_are_refused(tensor: Any, offset: int, page: int, why: str) -> None:
    with pytest.raises(BadRequestError, match=why):
        pages_of(tensor, [(b"a", offset)], page)


def test_reading_into_read_only_memory_is_refused() -> None:
    with pytest.raises(BadRequestError, match="read-only"):
        pages_of(b"12345678", [(b"a", 0)], 4, writable=True)
