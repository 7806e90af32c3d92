"""What is made of how a connection stands, look by look: who is gone, who is there and takes nothing, who is slow."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop

from kvrelay.router.http.watch import Sent, Watch, sent_by

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_S = 5.0


def watched(*looks: Sent) -> Watch:
    """After looks that are `STEP_S` apart."""
    watch = Watch(0.0)
    for number, sent in enumerate(looks, 1):
        watch.look(sent, number * STEP_S)
    return watch


def test_a_peer_that_answers_nothing_to_what_is_on_its_way_is_silent_since() -> None:
    watch = watched(Sent(0, 1, 10, 0), *(Sent(3, 5.0 * turn, 10, 0) for turn in range(1, 8)))
    assert watch.silent_s == watch.stuck_s == 30


def test_a_peer_that_says_it_has_no_room_is_stuck_and_not_silent() -> None:
    """Its window is closed: nothing is on its way but a question now and then, which it answers."""
    watch = watched(*(Sent(0, 60, 10, 4096) for _ in range(9)))
    assert (watch.silent_s, watch.stuck_s) == (0, 40)


def test_a_peer_that_takes_a_little_now_and_then_is_neither() -> None:
    watch = watched(*(Sent(1, 4, 10 * turn, 4096) for turn in range(9)))
    assert (watch.silent_s, watch.stuck_s) == (0, 0)
    assert watch.pending


def test_what_is_sent_after_a_long_quiet_does_not_make_its_peer_silent_at_once() -> None:
    watch = Watch(0.0)
    watch.look(Sent(0, 2, 10, 0), 5.0)
    watch.look(Sent(1, 600, 10, 0), 600.0)
    assert (watch.silent_s, watch.stuck_s) == (0, 0)


def test_a_peer_of_whom_acknowledgements_come_that_take_nothing_further_is_not_silent() -> None:
    watch = watched(*(Sent(1, 0.5, 10, 0) for _ in range(9)))
    assert (watch.silent_s, watch.stuck_s) == (0.5, 40)


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_of_a_closed_connection_nothing_is_told(new_event_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def look() -> None:
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            sock = writer.get_extra_info("socket")
            writer.close()
            await writer.wait_closed()
            assert sock.fileno() == -1
            assert sent_by(sock) is None

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(look())
