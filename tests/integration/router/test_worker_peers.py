"""Workers of one router ask each other, and nobody else is answered."""

from __future__ import annotations

import asyncio
import os
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvrelay.router import worker_peers
from kvrelay.router.worker_peers import PeerRequest, WorkerGroup, WorkerPeers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest


async def answer(request: PeerRequest) -> bytes:
    return f"{request.what} of {request.name}".encode()


@asynccontextmanager
async def two(group: WorkerGroup, other: WorkerGroup) -> AsyncIterator[tuple[WorkerPeers, WorkerPeers]]:
    pair = (WorkerPeers(group, 0, 2), WorkerPeers(other, 1, 2))
    for one in pair:
        await one.start(answer)
    try:
        yield pair
    finally:
        for one in pair:
            await one.close()


async def test_the_worker_that_has_it_answers() -> None:
    group = WorkerGroup.new()
    async with two(group, group) as (first, second):
        assert await first.find("x") == await second.find("x") == b"handover of x"


async def test_who_does_not_know_the_secret_is_not_answered() -> None:
    group = WorkerGroup.new()
    async with two(group, replace(group, secret=b"guessed")) as (first, second):
        assert await first.find("x") is None
        assert await second.find("x") is None


async def test_another_user_is_neither_asked_nor_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    group = WorkerGroup.new()
    async with two(group, group) as (first, _):
        monkeypatch.setattr(os, "geteuid", lambda: 123_456)
        assert await first.find("x") is None
        monkeypatch.undo()
        assert await first.find("x") == b"handover of x"
        assert struct.calcsize("3i") == worker_peers._CREDENTIALS.size


async def test_a_place_that_is_empty_is_found_out_at_once() -> None:
    only = WorkerPeers(WorkerGroup.new(), 0, 2)
    await only.start(answer)
    async with asyncio.timeout(worker_peers.WAIT_S / 2):
        assert await only.find("x") is None
    await only.close()
