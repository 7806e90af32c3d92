"""The native catalog takes the very decisions of the one in Python: any sequence of calls has the same answers."""

from __future__ import annotations

import math
import random
from array import array
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.pool.core.catalog import Catalog, State
from kvrelay.testing.catalogs import CATALOGS
from kvrelay.wire import limits
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = 4096
SIZES = [1, 64, 65, 1_000, 4_032, 4_033, PAGE, PAGE + 1, 3 * PAGE, 5 * PAGE - 1, 16 * PAGE, 40 * PAGE]
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Calls:
    """Random calls. Rows are chosen among those that once were given out, whether or not they still are."""

    def __init__(self, seed: int, tenants: int) -> None:
        self.rng = random.Random(seed)
        self.tenants = tenants
        self.now = 0.0
        self.rows = 1
        self.held: list[int] = []
        self.pinned: list[int] = []
        self.keys = [self.rng.randbytes(self.rng.choice([0, 8, 32, 33, 64])) for _ in range(60)]

    def next(self) -> Call:
        name = self.rng.choice(
            ["reserve", "publish", "add", "seal", "forget", "pin_rows", "unpin_rows", "unhold_rows", "trim", "expire"]
            * 2
            + ["lookup", "prefix", "count_prefix", "keep", "mark_clean", "touch", "set_expiry", "set_quota", "victims"]
            + ["describe", "runs", "page", "usage", "hold", "unhold", "pin", "unpin", "find", "forget_rows", "sums"]
        )
        args = getattr(self, f"_{name}")()
        kwargs = {"clean": self.rng.random() < 0.3} if name == "trim" else {}
        return name, args, kwargs

    def heed(self, call: Call, answer: Any) -> None:
        """Remember what has to be published, and unpinned, some time."""
        name, args, _ = call
        if answer is ValueError:
            return
        if name == "reserve":
            rows = memoryview(answer[1]).cast("I")
            self.held += [row for row, state in zip(rows, answer[0], strict=True) if state == Stored.STORED]
            self.rows = max([self.rows, *(row + 1 for row in rows)])
        elif name == "add" and answer is not None:
            self.held.append(answer)
            self.rows = max(self.rows, answer + 1)
        elif name == "pin_rows":
            self.pinned += memoryview(args[0]).cast("I").tolist()
        elif name == "pin":
            self.pinned.append(args[0])

    def _some_of(self, rows: list[int]) -> bytes:
        """A column of rows, taken off the list; or any."""
        if not rows or self.rng.random() < 0.1:
            return self._column()
        self.rng.shuffle(rows)
        return array("I", {rows.pop() for _ in range(min(len(rows), self.rng.randrange(1, 12)))}).tobytes()

    def _tenant(self) -> int:
        return self.rng.randrange(self.tenants)

    def _row(self) -> int:
        return self.rng.randrange(self.rows + 1)

    def _batch(self) -> list[bytes]:
        start = self.rng.randrange(len(self.keys))
        return self.keys[start : start + self.rng.randrange(1, 12)]

    def _column(self) -> bytes:
        return array("I", {self._row() for _ in range(self.rng.randrange(5))}).tobytes()

    def _expires(self) -> float:
        return self.rng.choice([math.inf, self.now + self.rng.randrange(6)])

    def _reserve(self) -> tuple[Any, ...]:
        keys = self._batch()
        same = self.rng.choice(SIZES)
        sizes = [same if self.rng.random() < 0.8 else self.rng.choice(SIZES) for _ in keys]
        return self._tenant(), keys, array("Q", sizes).tobytes()

    def _publish(self) -> tuple[Any, ...]:
        rows = self._some_of(self.held)
        return rows, self.rng.randbytes(2 * len(rows)), self._expires()

    def _add(self) -> tuple[Any, ...]:
        segments = self.rng.choice([(1, 1), (1, 1), (2, 3)])
        return self._tenant(), self.rng.choice(self.keys), self.rng.choice(SIZES), *segments

    def _seal(self) -> tuple[Any, ...]:
        row = self.held.pop() if self.held else self._row()
        return row, self.rng.randbytes(self.rng.choice([8, 48])), self._expires()

    def _trim(self) -> tuple[Any, ...]:
        return self.rng.choice([0, 1, PAGE, 9 * PAGE]), self.rng.choice([None, self._tenant()])

    def _expire(self) -> tuple[Any, ...]:
        self.now += self.rng.choice([0.0, 1.0])
        return self.now, self.rng.choice([1, 3, 100])

    def _prefix(self) -> tuple[Any, ...]:
        return self._tenant(), self._batch(), self.rng.choice([State.WRITING, State.SEALED]), self.rng.choice([1, 100])

    def _count_prefix(self) -> tuple[Any, ...]:
        return self._tenant(), self._batch()

    _lookup = _count_prefix

    def _find(self) -> tuple[Any, ...]:
        return self._tenant(), self.rng.choice(self.keys)

    def _keep(self) -> tuple[Any, ...]:
        return self._row(), self.rng.random() < 0.4

    _mark_clean = _keep

    def _set_expiry(self) -> tuple[Any, ...]:
        return self._row(), self._expires()

    def _set_quota(self) -> tuple[Any, ...]:
        return self._tenant(), self.rng.choice([None, None, 20 * PAGE, 90 * PAGE]), self.rng.choice([None, None, 9, 40])

    def _victims(self) -> tuple[Any, ...]:
        return self.rng.randrange(1, 9), self.rng.choice([None, self._tenant()])

    def _page(self) -> tuple[Any, ...]:
        return self.rng.choice([None, self._tenant()]), self.rng.randrange(5), self.rng.randrange(1, 40), b""

    def _usage(self) -> tuple[Any, ...]:
        return (self._tenant(),)

    def _sums(self) -> tuple[Any, ...]:
        return self._row(), self.rng.randrange(4), self.rng.randrange(8)

    def _one(self) -> tuple[Any, ...]:
        return (self._row(),)

    _forget = _hold = _unhold = _pin = _touch = _one

    def _unpin(self) -> tuple[Any, ...]:
        return (self.pinned.pop() if self.pinned else self._row(),)

    def _some(self) -> tuple[Any, ...]:
        return (self._column(),)

    _pin_rows = _unhold_rows = _describe = _runs = _forget_rows = _some

    def _unpin_rows(self) -> tuple[Any, ...]:
        return (self._some_of(self.pinned),)


def answer(catalog: Catalog, call: Call) -> Any:
    """What a call gives; any refusal is as good as any other."""
    name, args, kwargs = call
    if name == "unpin_rows" and not all(catalog.info(row).pins for row in _there(catalog, args[0])):
        return "not called: one of the rows has no pin"
    if name == "hold" and catalog.state(args[0]) is not State.WRITING:
        return "not called: nobody is writing"
    method: Callable[..., Any] = getattr(catalog, name)
    try:
        return method(*args, **kwargs)
    except ValueError:
        return ValueError


def _there(catalog: Catalog, rows: bytes) -> list[int]:
    return [row for row in memoryview(rows).cast("I") if catalog.state(row) is not State.FREE]


def everything(catalog: Catalog, rows: int) -> list[Any]:
    there = _there(catalog, array("I", range(rows)).tobytes())
    return [catalog.counts(), [(catalog.handle(row), catalog.info(row)) for row in there]]


@pytest.mark.skipif("native" not in CATALOGS, reason="the native module was not built, or is switched off")
@pytest.mark.parametrize("seed", range(24))
def test_any_calls_have_the_same_answers_and_leave_the_same_objects(seed: int) -> None:
    calls = Calls(seed, tenants=1 + seed % 3)
    pages = (16, 64, 300)[seed % 3]
    twins = [CATALOGS["pure"](pages * PAGE + 100), CATALOGS["native"](pages * PAGE + 100)]
    for step in range(4_000):
        call = calls.next()
        answers = [answer(twin, call) for twin in twins]
        assert answers[0] == answers[1], (step, call)
        calls.heed(call, answers[0])
        if step % 10 == 0:
            assert everything(twins[0], calls.rows) == everything(twins[1], calls.rows), (step, call)
        if step % 100 == 0:
            for twin in twins:
                twin.check_integrity()


@pytest.mark.skipif("native" not in CATALOGS, reason="the native module was not built, or is switched off")
def test_the_native_catalog_knows_the_limit_of_an_object() -> None:
    catalog = CATALOGS["native"](2 * limits.MAX_OBJECT_BYTES)
    assert catalog.add(0, b"largest", limits.MAX_OBJECT_BYTES) is not None
    with pytest.raises(ValueError, match=f"legal are 1 to {limits.MAX_OBJECT_BYTES}"):
        catalog.add(0, b"too large", limits.MAX_OBJECT_BYTES + 1)


@pytest.mark.skipif("native" not in CATALOGS, reason="the native module was not built, or is switched off")
def test_arguments_of_the_wrong_kind_are_refused() -> None:
    catalog: Any = CATALOGS["native"](64 * PAGE)
    row = catalog.add(0, b"k", 1)
    wrong: list[tuple[Any, ...]] = [
        ("find", 0, "text"),
        ("pin", "0"),
        ("add", 0, b"x" * 256, 1),
        ("reserve", 0, [b"a"], b"1234"),
        ("seal", row, bytes(8), math.nan),
        ("pin_rows", b"123"),
        ("unpin_rows", array("I", [row]).tobytes()),
        ("lookup", 0, [b"a", None]),
        ("row_of", None),
        ("set_quota", 0, -1),
        ("set_quota", 0, None, -1),
        ("prefix", 0, 7, 1, 1),
        ("touch", 1 << 80),
        ("forget", -1),
        ("publish", b"", bytes(8), 1.0),
    ]
    for name, *args in wrong:
        with pytest.raises((TypeError, ValueError, OverflowError)):
            getattr(catalog, name)(*args)
    with pytest.raises(ValueError, match="legal are 0 to"):
        CATALOGS["native"](-1)
    catalog.check_integrity()
    assert catalog.counts().writing == 1
    assert catalog.row_of(1 << 70) is None
