"""Real torch tensors on the CPU, of types NumPy does not know, are written and read in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvrelay.errors import BadRequestError

if TYPE_CHECKING:
    from kvrelay.client.blocking import PoolClient

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "float8_e4m3fn"])
def test_pages_of_a_torch_tensor_come_back_as_they_were(client: PoolClient, dtype: str) -> None:
    source = torch.arange(64 * 128).remainder(100).to(getattr(torch, dtype)).reshape(64, 128)
    blocks = [(b"%d" % n, (n * 37 % 64) * 128) for n in range(64)]
    client.write_cache(source, blocks, 128)
    target = torch.zeros_like(source)
    client.read_cache(target, blocks, 128)
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


def test_tensors_made_as_they_are_asked_for_are_stored_as_they_were(client: PoolClient) -> None:
    sources = [torch.full((32 * 1024,), float(n)) for n in range(8)]
    size = 64 * 1024
    expected = [source.half().numpy().tobytes() for source in sources]
    client.put_many((b"%d" % n, source.to(torch.float16)) for n, source in enumerate(sources))
    assert [client.get(b"%d" % n) for n in range(8)] == expected
    pieces = ((n * size, source.to(torch.float16)) for n, source in enumerate(sources))
    client.write_ranges(b"whole", 8 * size, pieces, segment_bytes=size)
    assert client.get(b"whole") == b"".join(expected)


def test_a_transposed_tensor_is_refused(client: PoolClient) -> None:
    with pytest.raises(BadRequestError, match=r"shape \(8, 4\) is not contiguous"):
        client.write_cache(torch.zeros(4, 8).t(), [(b"k", 0)], 4)


def test_a_tensor_whose_values_are_made_when_they_are_read_is_refused(client: PoolClient) -> None:
    lazy = torch.ones(4, dtype=torch.complex64).conj()
    with pytest.raises(BadRequestError, match="whose memory holds other values"):
        client.put(b"k", lazy)
    client.put(b"k", lazy.resolve_conj())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor", "ignore:Sparse CSR tensor support")
def test_tensors_without_memory_of_their_own_are_refused(client: PoolClient) -> None:
    from torch._subclasses import FakeTensorMode

    fake = FakeTensorMode().from_tensor(torch.zeros(4))
    for tensor, why in (
        (fake, "FakeTensor of 16 bytes has no memory of its own"),
        (torch.eye(3).to_sparse_csr(), "has no memory to be read from here"),
        (torch.empty(3, device="meta"), "on meta cannot be read from here"),
    ):
        with pytest.raises(BadRequestError, match=why):
            client.put(b"k", tensor)
        with pytest.raises(BadRequestError, match=why):
            client.get_many([b"k"], [tensor])
