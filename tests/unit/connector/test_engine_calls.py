"""What an engine is told to do reaches all of its sides, until it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.connector.adapters import Adapter, Adapters
from kvrelay.connector.engine_calls import EngineCalls
from kvrelay.errors import ConfigError
from kvrelay.identity.digests import DigestCache

if TYPE_CHECKING:
    from pathlib import Path


class Side:
    """Notes what it is told."""

    def __init__(self, *in_use: int) -> None:
        self.adapters_in_use = set(in_use)
        self.weights_stay = False
        self.told: list[str] = []

    def weights_replaced(self, by: str) -> None:
        self.told.append(by)

    def prefix_cache_dropped(self) -> None:
        self.told.append("dropped")


def test_every_side_is_told_and_none_after_the_end() -> None:
    sides: Any = (Side(), Side())
    calls = EngineCalls(sides, None)
    calls.weights_replaced("update_weights")
    calls.prefix_cache_dropped()
    calls.end()
    calls.weights_replaced("of another engine")
    assert [side.told for side in sides] == [["update_weights", "dropped"]] * 2


def test_that_weights_stay_is_true_only_while_caches_are_dropped() -> None:
    side: Any = Side()
    calls = EngineCalls([side], None)

    def drop() -> None:
        with calls.dropping(weights_stay=True):
            assert side.weights_stay
            raise RuntimeError("somebody holds blocks")

    with pytest.raises(RuntimeError, match="holds blocks"):
        drop()
    assert not side.weights_stay


def test_an_adapter_that_runs_on_any_side_is_remembered_when_the_prefix_cache_was_dropped(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_text("weights")
    adapters, sides = Adapters(DigestCache(None)), (Side(1), Side(2))
    given: Any = sides
    calls = EngineCalls(given, adapters)
    for number in (1, 2):
        adapters.use(Adapter("sql", number, str(tmp_path)))
    calls.prefix_cache_dropped()
    with pytest.raises(ConfigError, match="other weights ran"):
        adapters.identity(Adapter("sql", 2, str(tmp_path)))
    sides[0].adapters_in_use.clear()
    calls.prefix_cache_dropped()
    assert adapters.identity(Adapter("sql", 2, str(tmp_path)))
