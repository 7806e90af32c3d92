"""Damaged requests over real sockets: each connection ends in clean answers, and the next client is served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import Any

import pytest

from kvrelay.router.http.server import Limits
from kvrelay.testing.fake_engine import raw
from kvrelay.testing.http_stream import ANSWERS, Mutator, check_answers, pieces
from kvrelay.testing.raw_http import RawClient, post

LIMITS = Limits(max_body_bytes=4096, max_head_bytes=2048, max_headers=16, max_pipelined=3, idle_s=0.1, receive_s=0.1)
NUM_STREAMS = 80


async def answer(exchange: Any) -> None:
    """Whatever was asked: a damaged body may ask for very many tokens."""
    exchange.answer(200, b"{}")


async def served(port: int) -> bool:
    """Whether a client with nothing wrong about it is."""
    try:
        return (await post(port, "/v1/completions", {"prompt": "a", "max_tokens": 2})).status == 200
    except ConnectionError:
        return False


@pytest.mark.parametrize("seed", range(3))
async def test_damaged_requests_hurt_nobody(
    engine: Any, router: Any, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    caplog.set_level(logging.WARNING)
    engines = [await engine(default=answer), await engine(default=answer)]
    service = await router(engines[:1], engines[1:], limits=LIMITS)
    mutator = Mutator(random.Random(seed))

    async def talk(stream: bytes, sizes: list[int]) -> bytes:
        async with await RawClient.open(service.port) as client:
            with contextlib.suppress(RuntimeError):  # closed by the router, and noticed here
                for piece in pieces(stream, sizes):
                    client.send(piece)
                    await asyncio.sleep(0)
                client.send(b"\r\n\r\nGET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n\0\r\n\r\n")
            try:
                return await client.rest()
            except ConnectionError:  # the router closed on what was still being sent
                return b""

    for _ in range(NUM_STREAMS // 4):
        streams = [mutator.stream().replace(b"HEAD ", b"GET ") for _ in range(4)]
        for said in await asyncio.gather(*(talk(stream, mutator.sizes()) for stream in streams)):
            assert not any(status == 500 for status in check_answers(said)), streams
    async with asyncio.timeout(10):  # the limits that cut off the damaged ones may cut off a client of a busy machine
        while not await served(service.port):
            pass
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


@pytest.mark.parametrize("seed", range(3))
async def test_damaged_answers_of_engines_reach_nobody_as_good_ones(
    engine: Any, router: Any, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """Each client gets a whole answer that reads as one, or sees that it is cut off: never more than one."""
    caplog.set_level(logging.ERROR)
    decode = await engine(default=answer)
    service = await router([await engine(default=answer)], [decode], decode_timeout_s=3.0)
    mutator = Mutator(random.Random(seed), ANSWERS)
    num_whole = 0
    for _ in range(NUM_STREAMS):
        damaged = mutator.stream()
        decode.script(raw(damaged, close=True))
        async with await RawClient.open(service.port) as client:
            headers = "connection: close\r\n"
            client.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}, headers=headers)
            said = await client.rest()
        try:
            (status,) = check_answers(said)
        except AssertionError as error:
            assert "no chunk" in str(error) or "cut off" in str(error), (damaged, said)  # noqa: PT017
        else:
            num_whole += 1
            assert status != 500 or b"500" in damaged, (damaged, said)
    assert num_whole > NUM_STREAMS // 2
    assert (await post(service.port, "/v1/completions", {"prompt": "a", "max_tokens": 2})).status == 200
    assert not caplog.records, caplog.text
