from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.wire.scatter import MAX_VECTORS, Scatter


@given(
    st.lists(st.integers(0, 20), max_size=30),
    st.lists(st.integers(1, 17), max_size=200),
    st.none() | st.integers(1, 25),
)
def test_every_byte_is_moved_once_in_order(sizes: list[int], steps: list[int], max_bytes: int | None) -> None:
    source = bytes(index % 251 for index in range(sum(sizes)))
    pieces, at = [], 0
    for size in sizes:
        pieces.append(memoryview(source)[at : at + size])
        at += size
    scatter = Scatter(pieces)
    moved = b""
    for step in [*steps, *[1 << 30] * 600]:
        window = b"".join(scatter.window(max_bytes))
        assert len(window) <= scatter.left
        if not window:
            break
        moved += window[:step]
        scatter.advance(min(step, len(window)))
    assert moved == source
    assert scatter.left == 0


def test_a_window_never_exceeds_what_a_system_call_takes() -> None:
    scatter = Scatter([memoryview(b"xy")] * (MAX_VECTORS + 5))
    assert len(scatter.window()) == MAX_VECTORS
    assert len(scatter.window(1 << 20)) == MAX_VECTORS
    scatter.advance(2 * MAX_VECTORS)
    assert len(scatter.window()) == 5
