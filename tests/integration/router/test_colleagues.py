"""Workers of one router ask each other, and nobody else is answered."""

from __future__ import annotations

import asyncio
import os
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvrelay.router import colleagues
from kvrelay.router.colleagues import Colleagues, Party, Question

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest


async def answer(question: Question) -> bytes:
    return f"{question.what} of {question.name}".encode()


@asynccontextmanager
async def two(party: Party, other: Party) -> AsyncIterator[tuple[Colleagues, Colleagues]]:
    pair = (Colleagues(party, 0, 2), Colleagues(other, 1, 2))
    for one in pair:
        await one.start(answer)
    try:
        yield pair
    finally:
        for one in pair:
            await one.close()


async def test_a_colleague_answers() -> None:
    party = Party.new()
    async with two(party, party) as (first, second):
        assert await first.find("x") == await second.find("x") == b"handover of x"


async def test_who_does_not_know_the_secret_is_not_answered() -> None:
    party = Party.new()
    async with two(party, replace(party, secret=b"guessed")) as (first, second):
        assert await first.find("x") is None
        assert await second.find("x") is None


async def test_another_user_is_neither_asked_nor_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    party = Party.new()
    async with two(party, party) as (first, _):
        monkeypatch.setattr(os, "geteuid", lambda: 123_456)
        assert await first.find("x") is None
        monkeypatch.undo()
        assert await first.find("x") == b"handover of x"
        assert struct.calcsize("3i") == colleagues._CREDENTIALS.size


async def test_a_place_that_is_empty_is_found_out_at_once() -> None:
    only = Colleagues(Party.new(), 0, 2)
    await only.start(answer)
    async with asyncio.timeout(colleagues.WAIT_S / 2):
        assert await only.find("x") is None
    await only.close()
