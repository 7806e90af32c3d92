"""What workers leave to those after them is whole, whenever one of them was killed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvrelay.router.saved_state import SavedState

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def state() -> Iterator[SavedState]:
    made = SavedState.new()
    yield made
    made.close()


def test_what_was_saved_last_is_loaded(state: SavedState) -> None:
    assert state.load() == b""
    for data in (b"first", b"a longer second", b"3rd"):
        state.save(data)
        assert state.load() == data


@pytest.mark.parametrize("written", range(21))
def test_what_was_being_saved_when_its_writer_was_killed_leaves_what_was_there(
    state: SavedState, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """However much of it had been written."""
    state.save(b"first")
    state.save(b"before")
    whole = os.pwrite
    with monkeypatch.context() as killed:
        killed.setattr(os, "pwrite", lambda place, data, offset: whole(place, data[:written], offset))
        state.save(b"after")
    assert state.load() == (b"after" if written == 21 else b"before")
    state.save(b"then")
    assert state.load() == b"then"
