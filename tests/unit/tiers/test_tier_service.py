"""The tiers' threads: what is carried out is reported; what hangs is left behind."""

from __future__ import annotations

import math
import queue
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvrelay.pool.core.pool import PoolCore
from kvrelay.pool.tiers import service as module
from kvrelay.pool.tiers.config import open_tiers, parse_tiers
from kvrelay.pool.tiers.service import TierService
from kvrelay.transport.checksum import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGE = 4_096


class Below:
    """A core with a folder below it, and an event loop that turns when the test says so."""

    def __init__(self, path: Path) -> None:
        self.core = PoolCore(64 * PAGE, pool="pool", server="test")
        self.arena = memoryview(bytearray(64 * PAGE))
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.settled = 0
        self.now = 100.0
        self.wall = time.time()
        configs = parse_tiers([{"kind": "folder", "path": str(path)}])
        self.guards = open_tiers(configs)
        self.service = TierService(
            configs, self.guards, self.core, self.arena, post=self.posted.put, settle=self.settle,
            now=lambda: self.now, wall=lambda: self.wall,
        )  # fmt: skip

    def settle(self) -> None:
        self.settled += 1
        self.service.dispatch()

    def turn(self) -> None:
        """Wait for one report and take it."""
        self.posted.get(timeout=10)()

    def seal(self, key: bytes, expires: float = math.inf) -> int:
        row = self.core.catalog.add(0, key, PAGE)
        assert row is not None
        offset = self.core.catalog.geometry(row)[0]
        self.arena[offset : offset + PAGE] = key[:1] * PAGE
        self.core.catalog.seal(row, struct.pack("<Q", checksum(key[:1] * PAGE)), expires)
        return row

    def demote(self, *rows: int) -> None:
        self.service.tiering.offer(struct.pack(f"<{len(rows)}I", *rows), self.now)
        self.service.dispatch()
        self.turn()

    def promote(self, key: bytes) -> bool:
        """Whether it came up."""
        self.service.tiering.seek(0, [key], None, self.now, bring=True)
        self.service.dispatch()
        self.turn()
        if self.core.catalog.find(0, key) is None:
            return False
        self.turn()
        row = self.core.catalog.find(0, key)
        assert row is not None
        offset = self.core.catalog.geometry(row)[0]
        assert self.arena[offset : offset + PAGE] == key[:1] * PAGE
        return True


@pytest.fixture
def below(tmp_path: Path) -> Iterator[Below]:
    made = Below(tmp_path / "tier")
    yield made
    made.service.close()
    made.core.check_integrity()


def test_an_object_goes_down_and_comes_up_with_its_time_to_live(below: Below) -> None:
    row = below.seal(b"a", expires=below.now + 50)
    below.demote(row)
    assert below.core.catalog.info(row).clean
    below.core.catalog.trim(PAGE, clean=True)
    assert below.promote(b"a")
    row_ = below.core.catalog.find(0, b"a")
    assert row_ is not None
    assert below.core.catalog.info(row_).expires == pytest.approx(below.now + 50, abs=1)
    below.core.catalog.trim(PAGE)
    below.now, below.wall = below.now + 60, below.wall + 60
    assert not below.promote(b"a")


def test_an_object_damaged_in_memory_is_not_stored_and_is_forgotten(below: Below) -> None:
    row, sound = below.seal(b"b"), below.seal(b"c")
    below.arena[below.core.catalog.geometry(row)[0]] ^= 1
    below.demote(row, sound)
    assert below.core.catalog.find(0, b"b") is None
    assert below.core.stats()["corrupt"] == 1
    assert below.core.catalog.info(sound).clean
    assert not below.promote(b"b")


def test_a_thread_that_hangs_does_not_keep_the_pool_from_ending(
    below: Below, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.1)
    hanging, let_go = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> list[None]:
        hanging.set()
        let_go.wait(10)
        return [None]

    monkeypatch.setattr(below.guards[0], "find", hang)
    below.service.tiering.seek(0, [b"x"], None, below.now, bring=True)
    below.service.dispatch()
    assert hanging.wait(10)
    below.service.close()
    assert "is not closed, because one of its threads hangs: folder look" in caplog.text
    let_go.set()
