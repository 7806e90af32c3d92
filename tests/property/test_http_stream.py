"""The HTTP front against requests that are valid, damaged or noise, cut anywhere."""

from __future__ import annotations

import random

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.http.server import Limits
from kvrelay.testing.http_stream import SEEDS, Mutator, check, check_answers, converse

sizes = st.lists(st.integers(1, 60), max_size=12)


@pytest.mark.parametrize("seed", SEEDS)
async def test_what_the_damage_starts_from_is_served(seed: bytes) -> None:
    conversation = await converse(seed, [])
    assert len(conversation.requests) == 1
    assert check_answers(conversation.said, [conversation.requests[0].method]) == [200]


@pytest.mark.parametrize("seed", range(20))
async def test_damaged_requests_get_clean_answers_however_they_are_cut(seed: int) -> None:
    mutator = Mutator(random.Random(seed))
    for _ in range(60):
        await check(mutator.stream(), mutator.sizes())


@settings(max_examples=60, deadline=None)
@given(noise=st.binary(max_size=300), cuts=sizes, seed=st.sampled_from([b"", *SEEDS]))
async def test_noise_gets_clean_answers_however_it_is_cut(noise: bytes, cuts: list[int], seed: bytes) -> None:
    await check(seed + noise, cuts)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nabHTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n",
        b"garbage",
    ],
)
def test_the_check_itself_sees_what_is_no_answer(said: bytes) -> None:
    with pytest.raises(AssertionError):
        check_answers(said)


@pytest.mark.parametrize("seed", range(4))
async def test_another_reader_finds_the_same_requests(seed: int) -> None:
    """The engines' server may read with h11: of what both take, nothing ends elsewhere."""
    mutator = Mutator(random.Random(seed))
    num_compared = 0
    for _ in range(150):
        stream = mutator.stream()
        ours = [(request.method.encode(), request.body) for request in (await converse(stream, [], Limits())).requests]
        theirs = read_with_h11(stream)
        num_compared += len(list(zip(ours, theirs, strict=False)))
        assert all(one == other for one, other in zip(ours, theirs, strict=False)), stream
    assert num_compared > 50


def read_with_h11(stream: bytes) -> list[tuple[bytes, bytes]]:
    """Methods and bodies up to the first that h11 refuses, or that it takes for the last."""
    reader = h11.Connection(h11.SERVER)
    found: list[tuple[bytes, bytes]] = []
    method, body = b"", b""
    try:
        reader.receive_data(stream)
        while True:
            event = reader.next_event()
            if isinstance(event, h11.Request):
                method, body = event.method, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                found.append((method, body))
                reader.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
                reader.send(h11.EndOfMessage())
                reader.start_next_cycle()
            else:
                return found
    except h11.ProtocolError:
        return found
