"""Any sequence of calls leaves the index of a catalog in agreement with a model of it, while it grows and shrinks."""

from __future__ import annotations

import math
import os
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvrelay.native import native
from kvrelay.transport.index import IndexMemory

pytestmark = pytest.mark.skipif(native is None, reason="the native module was not built")

SPACE = 3_000
RUNS = st.tuples(st.integers(0, SPACE), st.integers(1, 500) | st.integers(1, 40))
"""Long runs take the tables beyond the next size, short ones leave them half-way there."""
TENANTS = st.integers(0, 1)


def names(run: tuple[int, int]) -> list[bytes]:
    first, count = run
    return [b"name %d" % number for number in range(first, min(first + count, SPACE))] or [b"name 0"]


class IndexMachine(RuleBasedStateMachine):
    """Three thousand names of two tenants; the model is what each name is: not there, begun or sealed."""

    @initialize()
    def begin(self) -> None:
        assert native is not None
        self.catalog = native.Catalog(256 << 10)  # 4096 objects: hundreds are evicted when all names are put
        self.memory = [IndexMemory.create(256 << 10) for _ in range(2)]
        for tenant, memory in enumerate(self.memory):
            assert self.catalog.show(tenant, memory.table, memory.marks)
        self.begun: list[bytes] = []
        self.pipe = os.pipe()

    def teardown(self) -> None:
        for memory in self.memory:
            memory.close()
        for fd in self.pipe:
            os.close(fd)

    def _begin(self, tenant: int, run: tuple[int, int]) -> bytes:
        keys = names(run)
        states, rows, _ = self.catalog.reserve(tenant, keys, array("Q", [64] * len(keys)).tobytes())
        return array(
            "I", [row for row, state in zip(memoryview(rows).cast("I"), states, strict=True) if not state]
        ).tobytes()

    def _rows(self, tenant: int, run: tuple[int, int]) -> bytes:
        states, rows = self.catalog.lookup(tenant, names(run))
        found = zip(memoryview(rows).cast("I"), states, strict=True)
        return array("I", {row: None for row, state in found if state}).tobytes()

    @rule(tenant=TENANTS, run=RUNS, expires=st.sampled_from([math.inf, math.inf, 1e12]))
    def put(self, tenant: int, run: tuple[int, int], expires: float) -> None:
        rows = self._begin(tenant, run)
        self.catalog.publish(rows, bytes(2 * len(rows)), expires)

    @rule(tenant=TENANTS, run=RUNS)
    def announce(self, tenant: int, run: tuple[int, int]) -> None:
        self.begun.append(self._begin(tenant, run))

    @rule(whole=st.booleans())
    def end_what_was_begun(self, whole: bool) -> None:
        if self.begun:
            rows = self.begun.pop(0)
            if whole:
                self.catalog.publish(rows, bytes(2 * len(rows)), math.inf)
            else:
                self.catalog.forget_rows(rows)
                self.catalog.unhold_rows(rows)

    @rule(tenant=TENANTS, run=RUNS)
    def delete(self, tenant: int, run: tuple[int, int]) -> None:
        self.catalog.forget_rows(self._rows(tenant, run))

    @rule(tenant=TENANTS, bytes_=st.sampled_from([64, 64 << 8, 1 << 30]))
    def trim(self, tenant: int, bytes_: int) -> None:
        self.catalog.trim(bytes_, tenant)

    @rule()
    def expire(self) -> None:
        self.catalog.expire(2e12, 1 << 20)

    @rule(tenant=TENANTS, run=RUNS)
    def look_up(self, tenant: int, run: tuple[int, int]) -> None:
        assert native is not None
        memory, keys = self.memory[tenant], names(run)
        count = native.index_count(memory.table, memory.marks, self.pipe[0], keys, False)
        assert count == self.catalog.count_prefix(tenant, keys)

    @invariant()
    def the_index_says_what_the_catalog_says(self) -> None:
        assert native is not None
        if not hasattr(self, "catalog"):
            return
        self.catalog.check_integrity()
        keys = names((0, SPACE))
        for tenant, memory in enumerate(self.memory):
            states, _ = self.catalog.lookup(tenant, keys)
            told = native.index_exists(memory.table, memory.marks, self.pipe[0], keys)
            assert told == [state == 2 for state in states]


def test_any_sequence_of_calls_leaves_the_index_in_agreement_with_the_catalog() -> None:
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))
