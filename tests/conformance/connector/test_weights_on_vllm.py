"""Whether an engine's weights are still what its namespace names, by what vLLM's own `EngineCore` is told to do."""

from __future__ import annotations

import random
import time
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.connector.engine_calls import EngineCalls
from kvrelay.testing.contract_moves import until_idle
from kvrelay.testing.contract_world import ContractEngine, Shape
from kvrelay.testing.true_models import DENSE, MIXED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrelay.testing.pool import PoolThread

    Act = Callable[[Any], Any]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]

PROMPT = [100 + at for at in range(70)]
WHOLE = (len(PROMPT), len(PROMPT) - 1)
WAIT_S = 30.0


@pytest.fixture
def engine(pool: PoolThread, request: pytest.FixtureRequest) -> Iterator[ContractEngine]:
    """An engine of vLLM's; ``request``'s parameter, if it has one: its model."""
    from kvrelay.testing.vllm_engine import VllmEngine

    engine = VllmEngine(pool.unix, "E", random.Random(7), Shape(model=getattr(request, "param", DENSE)))
    try:
        yield engine
        engine.drain(WAIT_S)
    finally:
        engine.close()


def core_of(engine: ContractEngine, kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watched engine core of vLLM's around the engine's scheduler, whose workers do nothing."""
    from vllm.v1.engine import core

    from kvrelay.connector import compat

    for name in ("add_lora", "collective_rpc", "sleep", "_reset_caches", "reset_prefix_cache"):
        monkeypatch.setattr(core.EngineCore, name, getattr(core.EngineCore, name))  # put back after the test
    config: Any = None
    compat.watch_engine(config, EngineCalls(engine.side.sides, None))
    made = object.__new__(getattr(core, kind))
    made.scheduler = engine.scheduler._vllm
    made.mm_receiver_cache, made.batch_queue, made.engines_running = None, None, False
    made.model_executor = SimpleNamespace(
        collective_rpc=lambda *_: [],
        sleep=lambda _: None,
        wake_up=lambda _: None,
        reset_mm_cache=lambda: None,
        reset_encoder_cache=lambda: None,
        is_sleeping=False,
    )
    return made


def loaded(engine: ContractEngine) -> float:
    """Of a prompt that was saved under the engine's first namespace, and is in none of its blocks."""
    engine.scheduler.reset_prefix_cache()
    engine.counters.take()
    engine.add("again", PROMPT, 2)
    until_idle(engine)
    return engine.counters.take().get("loaded_tokens", 0)


def told(engine: ContractEngine, core: Any, act: Act) -> float:
    """How much is loaded of what was saved before the engine was told to do something."""
    engine.add("first", PROMPT, 2)
    until_idle(engine)
    act(core)
    core.wake_up()
    return loaded(engine)


LEAVES: dict[str, Act] = {
    "sleep of level 0": lambda core: core.sleep(0),
    "sleep": lambda core: core.sleep(level=1),
    "sleep when all are done": lambda core: core.sleep(1, "wait"),
    "pause": lambda core: core.pause_scheduler(),
    "pause that keeps requests": lambda core: core.pause_scheduler("keep"),
    "reset of the prefix cache": lambda core: core.reset_prefix_cache(),
    "checksums": lambda core: core.compute_weight_checksums(),
    "a trainer that connects": lambda core: core.collective_rpc("init_weight_transfer_engine", None, (), {}),
}


@pytest.mark.parametrize("act", LEAVES.values(), ids=LEAVES)
def test_what_leaves_the_weights_leaves_the_exchange(
    engine: ContractEngine, monkeypatch: pytest.MonkeyPatch, act: Act
) -> None:
    assert told(engine, core_of(engine, "EngineCoreProc", monkeypatch), act) in WHOLE


@pytest.mark.parametrize("engine", [DENSE, MIXED], ids=["dense", "windows in some layers"], indirect=True)
def test_a_pause_that_keeps_requests_waits_for_what_is_being_saved(
    engine: ContractEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A step orders saves. 2. The engine is told to pause, and to drop its caches: no block may be held by then."""
    core = core_of(engine, "EngineCoreProc", monkeypatch)
    core._idle_state_callbacks = []
    engine.add("r", PROMPT, 8)
    saver = engine.ranks[0].side._saver
    with saver._reading:  # no block is copied meanwhile
        engine.step()
        assert engine.side.saving
        paused = core.pause_scheduler("keep")
        assert paused is not None
        assert not paused.done()
    deadline = time.monotonic() + WAIT_S
    while core.has_work():
        assert time.monotonic() < deadline
        engine.step()
    core._notify_idle_state_callbacks()
    paused.result(0)
    assert not any(side.saving for side in engine.side.sides)
    core.resume_scheduler()
    until_idle(engine)


MAY_REPLACE: dict[str, Act] = {
    "sleep of level 2": lambda core: core.sleep(level=2),
    "a new update": lambda core: core.collective_rpc("start_weight_update"),
    "an update": lambda core: core.collective_rpc("update_weights", kwargs={"update_info": {}}),
    "files read again": lambda core: core.collective_rpc(method="reload_weights"),
    "a worker extension's own way": lambda core: core.collective_rpc("take_over", None, (1,)),
    "anybody's function": lambda core: core.collective_rpc(print),
    "a reset of the connector": lambda core: core.reset_prefix_cache(False, True),
}


@pytest.mark.parametrize("act", MAY_REPLACE.values(), ids=MAY_REPLACE)
def test_what_may_replace_weights_ends_the_exchange_before_it_does(
    engine: ContractEngine, monkeypatch: pytest.MonkeyPatch, act: Act
) -> None:
    assert told(engine, core_of(engine, "EngineCoreProc", monkeypatch), act) == 0


def test_nobody_knows_the_weights_of_an_engine_in_its_callers_process_once_its_caches_are_dropped(
    engine: ContractEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(engine, core_of(engine, "EngineCore", monkeypatch), lambda core: core.sleep(1)) == 0


def test_what_old_weights_left_in_the_prefix_cache_is_not_found_once_that_is_reset(
    engine: ContractEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Weights are replaced. 2. KV of the old ones is found, and saved. 3. The engine's own cache is reset."""
    core = core_of(engine, "EngineCoreProc", monkeypatch)
    core.collective_rpc("update_weights")
    engine.add("first", PROMPT, 2)
    until_idle(engine)
    assert core.reset_prefix_cache()
    assert loaded(engine) == 0


def test_what_a_client_sends_is_still_decoded(engine: ContractEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(engine, "EngineCoreProc", monkeypatch)
    for method, sent in (("sleep", (1, "wait")), ("collective_rpc", ("update_weights", None, (), None))):
        assert tuple(core._convert_msgspec_args(MethodType(getattr(type(core), method), core), sent)) == sent
