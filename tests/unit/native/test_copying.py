"""Copies with checksums: the hash against xxhash's own, the copy against slices, and what is refused."""

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import BadRequestError
from kvrelay.transport import copying, pure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.transport.copying import Copies

LENGTHS = (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1_023, 1_024, 1_025, 1_087, 1_088, 4_096, 65_536, 1_048_577)


def u64s(values: Sequence[int]) -> bytes:
    return array("Q", values).tobytes()


def ints(column: bytes) -> list[int]:
    return memoryview(column).cast("Q").tolist()


def random_bytes(count: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(count)


def reference(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


def test_every_length_to_5000_has_the_published_hash_wherever_it_lies_in_memory(copies: Copies) -> None:
    memory = memoryview(random_bytes(5_064))
    for length in range(5_001):
        view = memory[length % 64 : length % 64 + length]
        assert copies.checksum(view) == reference(view), length


def test_large_buffers_have_the_published_hash(copies: Copies) -> None:
    memory = memoryview(random_bytes(3 << 20))
    rng = random.Random(2)
    for _ in range(60):
        start, end = sorted(rng.randrange(len(memory)) for _ in range(2))
        assert copies.checksum(memory[start:end]) == reference(memory[start:end]), (start, end)


def test_a_copy_stores_the_bytes_and_tells_their_hash_at_any_alignment(copies: Copies) -> None:
    memory = random_bytes(2 << 20)
    for length in (*LENGTHS, *range(200, 1_300, 7)):
        for source_at, target_at in ((0, 0), (1, 0), (0, 13), (64, 32), (7, 64)):
            target = bytearray(length + 256)
            sums = copies.copy_sums(target, u64s([target_at]), memory, u64s([source_at]), length)
            wanted = memory[source_at : source_at + length]
            assert ints(sums) == [reference(wanted)]
            assert bytes(target) == bytes(target_at) + wanted + bytes(256 - target_at)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_batch_past_the_caches_is_copied_whole_by_any_number_of_threads(copies: Copies, threads: int) -> None:
    memory = random_bytes(9 << 20)
    rng = random.Random(3)
    sizes, source_at, target_at, used = [], [], [], 0
    while used < 8 << 20:
        size = rng.choice([rng.randrange(1, 5_000), rng.randrange(60_000, 300_000)])
        sizes.append(size)
        target_at.append(used + (-used % rng.choice([1, 64])))
        used = target_at[-1] + size
        source_at.append(rng.randrange(len(memory) - size))
    target = bytearray(used)
    sums = copies.copy_sums(target, u64s(target_at), memory, u64s(source_at), u64s(sizes), threads)
    wanted = [memory[at : at + size] for at, size in zip(source_at, sizes, strict=True)]
    assert [bytes(target[at : at + size]) for at, size in zip(target_at, sizes, strict=True)] == wanted
    assert ints(sums) == [reference(piece) for piece in wanted]
    back = bytearray(len(memory))
    assert copies.copy_verify(back, u64s(source_at), target, u64s(target_at), u64s(sizes), sums, threads) is None
    for broken in (len(sizes) - 1, len(sizes) // 2):
        target[target_at[broken]] ^= 1
        assert copies.copy_verify(back, u64s(source_at), target, u64s(target_at), u64s(sizes), sums, threads) == broken
        assert copies.verify(target, u64s(target_at), u64s(sizes), sums, threads) == broken


def test_copies_past_the_caches_touch_nothing_around_their_targets_at_any_alignment(copies: Copies) -> None:
    memory = random_bytes(1 << 20)
    sizes = [241, 1_024, 1_025, 1_087, 2_049, 5_000, 65_536, 65_600]
    placed = [(shift, size) for shift in range(65) for size in sizes]
    slot = (max(sizes) + 128) // 64 * 64
    target = bytearray(b"\xaa" * (slot * len(placed)))
    target_at = [index * slot + shift for index, (shift, _) in enumerate(placed)]
    source_at = [(7 * index) % (len(memory) - size) for index, (_, size) in enumerate(placed)]
    taken = u64s([size for _, size in placed])
    assert sum(size for _, size in placed) > 4 << 20, "all of it in one batch: it goes past the caches"
    sums = copies.copy_sums(target, u64s(target_at), memory, u64s(source_at), taken)
    wanted = bytearray(b"\xaa" * len(target))
    for to, at, (_, size) in zip(target_at, source_at, placed, strict=True):
        wanted[to : to + size] = memory[at : at + size]
    assert target == wanted
    assert ints(sums) == [reference(memory[at : at + size]) for at, (_, size) in zip(source_at, placed, strict=True)]


def test_pieces_may_be_buffers_of_their_own_on_either_side(copies: Copies) -> None:
    pieces = [random_bytes(size, size) for size in LENGTHS[:15]]
    offsets = [sum(map(len, pieces[:index])) for index in range(len(pieces))]
    whole = bytearray(sum(map(len, pieces)))
    sums = copies.copy_sums(whole, u64s(offsets), pieces, None, None)
    assert bytes(whole) == b"".join(pieces)
    assert ints(sums) == [reference(piece) for piece in pieces]
    assert copies.sums(pieces, None, None) == sums
    assert copies.sums(whole, u64s(offsets), u64s([len(piece) for piece in pieces])) == sums
    targets = [bytearray(len(piece)) for piece in pieces]
    assert copies.copy_verify(targets, None, whole, u64s(offsets), None, sums) is None
    assert [bytes(target) for target in targets] == pieces
    again = [bytearray(len(piece)) for piece in pieces]
    copies.copy(again, None, targets, None, None)
    assert again == targets


def test_buffers_of_any_item_type_and_columns_at_any_address_will_do(copies: Copies) -> None:
    values = array("d", [1.5, -2.5, 1e300])
    target = array("I", bytes(24))
    column = memoryview(b"?" + u64s([8]))[1:]
    sums = copies.copy_sums(target, column, values, u64s([16]), 8)
    assert target.tobytes() == bytes(8) + values.tobytes()[16:] + bytes(8)
    assert ints(sums) == [reference(values.tobytes()[16:])]


def test_segments_are_summed_in_order(copies: Copies) -> None:
    memory = random_bytes(300_000)
    for size in (100, 1_000, 100_000, 300_000):
        assert copies.segment_sums(memory, size) == [
            reference(memory[at : at + size]) for at in range(0, len(memory), size)
        ]
    for size in (0, -1, 7):
        with pytest.raises(BadRequestError, match=f"300000 bytes are no whole segments of {size} bytes"):
            copies.segment_sums(memory, size)


@pytest.mark.parametrize(
    ("target_at", "source_at", "sizes", "message"),
    [
        ([0, 95], [0, 0], 10, "target 1: 10 bytes at offset 95 are not within a buffer of 100 bytes"),
        ([0, 0], [0, 50], 60, "source 1: 60 bytes at offset 50 are not within a buffer of 100 bytes"),
        ([0], [(1 << 64) - 1], 1, "source 0: 1 bytes at offset 18446744073709551615 are not within"),
        ([0], [1], (1 << 64) - 1, "source 0: 18446744073709551615 bytes at offset 1 are not within"),
        ([0], [0, 0], 1, "targets: 1 entries for 2 objects"),
        ([0], [0], u64s([1, 1]), "sizes: 2 entries for 1 objects"),
        ([0], [0], b"1234567", "sizes: 7 bytes are no packed 64-bit integers"),
        ([0], [0], -1, "sizes: -1 is not a number of bytes"),
        ([0], [0], None, "sizes: None is for sources or targets that are buffers of their own"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_a_byte_is_touched(
    copies: Copies, target_at: list[int], source_at: list[int], sizes: int | bytes | None, message: str
) -> None:
    target = bytearray(100)
    with pytest.raises(BadRequestError, match=message):
        copies.copy_sums(target, u64s(target_at), b"x" * 100, u64s(source_at), sizes)
    assert target == bytes(100)


def test_sums_threads_and_buffers_are_checked_too(copies: Copies) -> None:
    target = bytearray(8)
    with pytest.raises(BadRequestError, match="sums: 2 entries for 1 objects"):
        copies.copy_verify(target, u64s([0]), b"12345678", u64s([0]), 8, u64s([1, 2]))
    with pytest.raises(BadRequestError, match="source 0 has 8 bytes, not the 7 of the object"):
        copies.copy_sums(target, u64s([0]), [b"12345678"], None, 7)
    for threads in (0, 65):
        with pytest.raises(BadRequestError, match=f"threads: {threads} is not from 1 to 64"):
            copies.sums([b""], None, None, threads)
    with pytest.raises(BufferError):
        copies.copy([bytes(8)], None, [b"12345678"], None, None)
    with pytest.raises(BufferError):
        copies.checksum(memoryview(b"12345678")[::2])
    assert target == bytes(8)


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(max_size=3_000),
    cuts=st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 3_000)), max_size=8),
)
def test_what_is_chosen_agrees_with_python_on_any_batch(data: bytes, cuts: list[tuple[int, int]]) -> None:
    """The batch may be impossible: then both refuse it."""
    offsets, sizes = u64s([cut[0] for cut in cuts]), u64s([cut[1] for cut in cuts])
    results: list[tuple[str | bytes, bytes]] = []
    for copies in (copying.copies, pure):
        target = bytearray(3_000)
        try:
            results.append((copies.copy_sums(target, offsets, data, offsets, sizes), bytes(target)))
        except BadRequestError as error:
            results.append((str(error), bytes(target)))
    assert results[0] == results[1]
