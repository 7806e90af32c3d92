"""Engines for these tests, and how many random lives of engines a run goes through."""

from __future__ import annotations

import itertools
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("numpy")

from kvrelay.client.blocking import PoolClient
from kvrelay.testing.contract_moves import HANDOVER
from kvrelay.testing.contract_world import ContractEngine, Shape
from kvrelay.testing.pool import PoolThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SEEDS = 3
WAIT_S = 30.0
VLLM = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=SEEDS, help="how many random lives of engines to go through")
    parser.addoption("--first-seed", type=int, default=0, help="the first of them")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--first-seed", default=0)
        metafunc.parametrize("seed", range(first, first + metafunc.config.getoption("--seeds", default=SEEDS)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits half a second for a preempted request's saves."""
    monkeypatch.setattr("kvrelay.connector.worker_side.DRAIN_S", 0.005)


@pytest.fixture(params=["small", pytest.param("vllm", marks=VLLM)])
def kind(request: pytest.FixtureRequest) -> type[ContractEngine]:
    """An engine of our own, which needs no vLLM, or one with vLLM's scheduler and the real connector class."""
    if request.param == "small":
        return ContractEngine
    from kvrelay.testing.vllm_engine import VllmEngine

    return VllmEngine


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolThread]:
    with PoolThread(tmp_path) as thread:
        yield thread
    thread.server.core.check_integrity()


@pytest.fixture
def router(pool: PoolThread) -> Iterator[PoolClient]:
    """A router's connection, with the ticket of a hand-over."""
    with PoolClient.connect(pool.unix, name="router", map_arena=False) as client:
        client.open_ticket(HANDOVER, 60.0)
        yield client


@pytest.fixture
def make_engine(kind: type[ContractEngine], pool: PoolThread) -> Iterator[Callable[..., ContractEngine]]:
    """``make_engine(name, **shape)``: an engine on the pool, stopped after the test."""
    numbers, engines = itertools.count(), ExitStack()

    def make(name: str = "E", **shape: Any) -> ContractEngine:
        engine = kind(pool.unix, f"{name}{next(numbers)}", random.Random(7), Shape(**shape))
        engines.callback(engine.close)
        return engine

    with engines:
        yield make
