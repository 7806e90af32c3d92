"""What tests of vLLM's contract do with an engine again and again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.testing.contract_world import ContractEngine

WAIT_S = 20.0
HANDOVER = "ho"
"""The hand-over they speak of, and its ticket."""


def until(engine: ContractEngine, done: Callable[[], object]) -> None:
    """Step until something holds, checking the engine's books after each step."""
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, engine.scheduler.statuses()
        engine.step()
        engine.check()


def until_idle(engine: ContractEngine) -> None:
    """Step until nothing is left to do."""
    until(engine, lambda: engine.scheduler.idle)


def said(leg: str, **more: Any) -> dict[str, Any]:
    """``kv_transfer_params`` of a leg, as the router gives them."""
    return {"kvrelay": {"handover": HANDOVER, "leg": leg, "worker": leg} | more}
