"""A refusal must not leave a cycle behind: its traceback holds frames, and these the connection and its buffers."""

from __future__ import annotations

import gc

import pytest

from kvrelay.errors import KvRelayError
from kvrelay.testing.pool_core import Driver
from kvrelay.wire import messages as m

U64 = (8).to_bytes(8, "little")


@pytest.mark.parametrize(
    "request_",
    [
        m.Written(0, [m.Part(99, 0, [1]), m.Part(98, 0, [1])]),
        m.Fill(0, 99, U64),
        m.Release(0, 99),
        m.Wait(0, 99, 1, 1.0),
        m.EndTicket(0, "none"),
        m.Post(0, "none", b""),
        m.Pin(0, [b"absent"]),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_refused_request_is_forgotten_without_a_garbage_collection(request_: m.Request) -> None:
    driver = Driver()
    gc.collect()
    gc.disable()
    try:
        earlier = errors()  # other tests' that somebody still holds
        driver.send(1, request_)
        left = [error for error in errors() if not any(error is other for other in earlier)]
    finally:
        gc.enable()
    assert not left


def errors() -> list[object]:
    """All errors of ours that there are."""
    return [found for found in gc.get_objects() if issubclass(type(found), KvRelayError)]
