"""Bytes that no message tells of, in an event loop: looked for at once, then seldom."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvrelay.client import aio_link
from kvrelay.client.core.steps import Transfer
from kvrelay.errors import DeadlineError
from kvrelay.transport.address import parse_address


async def naps(monkeypatch: pytest.MonkeyPatch, looks: int) -> list[float]:
    """How long an operation sleeps between looks, the bytes being there at the last."""
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    here, there = socket.socketpair()
    here.setblocking(False)
    left = iter(range(looks - 1, -1, -1))
    link = aio_link.AsyncLink(here, parse_address("unix:/pool"))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", sleep)
            await link._wait_for(Transfer(lambda: next(left) == 0), 30.0)
        with pytest.raises(DeadlineError, match="did not arrive within 0"):
            await link._wait_for(Transfer(lambda: False), 0.0)
    finally:
        await link.close()
        there.close()
    return slept


def test_a_long_wait_leaves_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(naps(monkeypatch, 4)) == [0] * 3
    slept = asyncio.run(naps(monkeypatch, 100))
    assert slept[: aio_link.QUICK_TURNS] == [0] * aio_link.QUICK_TURNS
    assert min(slept[aio_link.QUICK_TURNS :]) == aio_link.LOOK_S > 0
