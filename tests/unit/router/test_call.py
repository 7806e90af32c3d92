"""A call whose client does not keep up: the engine is held back, and is not blamed for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvrelay.router.errors import AnswerTooLargeError
from kvrelay.router.http.call import MAX_KEPT_BYTES, Call

if TYPE_CHECKING:
    from kvrelay.router.http.deadline import Deadline


class Line:
    """A connection of which nothing is there but its switches."""

    def __init__(self) -> None:
        self.due_s: float | None = None
        self.reading = True

    def state(self) -> tuple[bool, float | None]:
        """Whether the engine is read from, and how long it may say nothing."""
        return self.reading, self.due_s

    @property
    def deadline(self) -> Deadline:
        return cast("Deadline", self)

    def set(self, after_s: float) -> None:
        self.due_s = after_s

    def clear(self) -> None:
        self.due_s = None

    def abort(self) -> None:
        self.reading = False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


async def piped(kept: bytes) -> tuple[Line, Call, asyncio.Task[Any], list[bytes]]:
    """A call that has ``kept`` bytes when it is piped to a client that is full after any of them."""
    line, taken = Line(), list[bytes]()
    call = Call(line, asyncio.get_running_loop())
    call.on_head(200, b"OK", [])
    await call.head(1.0)
    call.on_data(kept)

    def sink(data: bytes) -> None:
        taken.append(data)
        call.pause()

    piping = asyncio.create_task(call.pipe(sink, silence_s=30.0))
    await asyncio.sleep(0)
    return line, call, piping, taken


async def test_a_client_that_is_full_at_once_holds_back_an_answer_of_which_much_was_kept() -> None:
    """1. So much of an answer has come that no more was read. 2. It is passed on, and fills the client's buffers."""
    line, call, piping, taken = await piped(bytes(MAX_KEPT_BYTES))
    assert line.state() == (False, None)
    call.resume()
    assert line.state() == (True, 30.0)
    call.on_end()
    await piping
    assert sum(map(len, taken)) == MAX_KEPT_BYTES


async def test_an_engine_has_no_deadline_while_the_client_takes_what_was_there_at_once() -> None:
    line, call, piping, _ = await piped(b"x")
    assert line.state() == (False, None)
    call.resume()
    assert line.state() == (True, 30.0)
    call.on_end()
    await piping


async def test_an_answer_that_was_whole_before_it_was_read_is_too_large_all_the_same() -> None:
    line = Line()
    call = Call(line, asyncio.get_running_loop())
    call.on_head(500, b"", [])
    call.on_data(b"12345")
    call.on_end()
    with pytest.raises(AnswerTooLargeError):
        await call.read(limit_bytes=4, timeout_s=1.0)
