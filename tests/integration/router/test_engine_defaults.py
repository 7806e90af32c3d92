"""What engines add to requests: asked in the background, remembered, and forgotten when that is due."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.router import engine_defaults as desk_module
from kvrelay.testing.fake_engine import fail, hang
from kvrelay.testing.fake_tokens import TokenEngine

if TYPE_CHECKING:
    from kvrelay.router.core.engine_defaults import Defaults
    from kvrelay.router.engine_defaults import EngineDefaults
    from kvrelay.router.service import RouterService
    from kvrelay.testing.fake_engine import FakeEngine

MODEL = "fake-model"


class Asked:
    """One engine, and who knows about it."""

    def __init__(self, service: RouterService, fake: FakeEngine, said: TokenEngine) -> None:
        self.desk: EngineDefaults = service._disaggregator.defaults
        (self.engine,) = service.engines.decodes
        self.fake = fake
        self.said = said

    def known(self) -> Defaults | None:
        return self.desk.known(self.engine, MODEL, [])

    async def told(self, rounds: int = 1) -> Defaults | None:
        """What is known when so many more questions have been answered, or not."""
        for _ in range(rounds):
            self.known()
            await asyncio.wait(set(self.desk._asking.values()))
        return self.known()


@pytest.fixture
async def asked(engine: Any, router: Any, monkeypatch: pytest.MonkeyPatch) -> Asked:
    for name in ("FRESH_S", "SLOW_S"):
        monkeypatch.setattr(desk_module, name, 0.0)
    said = TokenEngine()
    fake = await engine(default=said.behave)
    return Asked(await router([await engine()], [fake]), fake, said)


async def test_nothing_is_known_before_the_answer_and_changes_show_with_the_next(asked: Asked) -> None:
    assert asked.known() is None
    first = await asked.told()
    assert first is not None
    assert first.max_model_len == 4096
    asked.said.max_model_len = 100
    second = await asked.told()
    assert second is not None
    assert second.max_model_len == 100


async def test_an_engine_that_is_slow_is_what_it_was(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await asked.told() is not None
    monkeypatch.setattr(desk_module, "ANSWER_S", 0.05)
    asked.fake.script(hang())
    assert await asked.told() is not None


async def test_an_engine_that_fails_or_is_gone_is_not_known_any_more(asked: Asked) -> None:
    assert await asked.told() is not None
    asked.fake.script(fail(500))
    assert await asked.told() is None
    assert await asked.told() is not None
    await asked.fake.stop()
    assert await asked.told() is None


async def test_a_name_that_is_no_models_is_neither_asked_about_nor_remembered(asked: Asked) -> None:
    assert asked.desk.known(asked.engine, "m" * (desk_module.MAX_NAME_CHARS + 1), []) is None
    assert not asked.desk._asking
    assert await asked.told() is not None
    assert len(asked.desk._known) == 1


async def test_a_key_that_is_refused_says_nothing_about_the_engine(asked: Asked) -> None:
    assert await asked.told() is not None
    asked.fake.script(fail(401))
    assert await asked.told() is not None


async def test_an_engine_that_shows_nothing_is_named_once(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    asked.fake.script(*(fail(403) for _ in range(20)))
    assert await asked.told(rounds=3) is None
    said = [record.message for record in caplog.records if "--enable-scale-out" in record.message]
    assert len(said) == 1
    assert said[0].startswith("D0 does not show")
