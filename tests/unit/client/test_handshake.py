"""Which way to the arena a client asks for."""

from __future__ import annotations

import pytest

from kvrelay.client.core.handshake import reach
from kvrelay.client.core.session import Ask
from kvrelay.errors import ConfigError
from kvrelay.wire import messages as m


def asked(transport: str, *, shm: bool, offered: bool, nixl: bool) -> str | None:
    welcome = m.Welcome(0, 1, "server", "pool", 4096, shm, offered)
    step = next(reach(welcome, transport, nixl=nixl), None)
    return type(step.request).__name__ if isinstance(step, Ask) else None


@pytest.mark.parametrize(
    ("transport", "shm", "offered", "nixl", "way"),
    [
        ("auto", True, True, True, "MapArena"),
        ("auto", False, True, True, "NixlMap"),
        ("auto", False, True, False, None),
        ("auto", False, False, True, None),
        ("shm", True, True, True, "MapArena"),
        ("nixl", True, True, True, "NixlMap"),
        ("nixl", False, True, False, "NixlMap"),  # and then NIXL says what is missing
        ("tcp", True, True, True, None),
    ],
)
def test_the_best_way_both_sides_have_is_taken_unless_one_is_named(
    transport: str, way: str | None, *, shm: bool, offered: bool, nixl: bool
) -> None:
    assert asked(transport, shm=shm, offered=offered, nixl=nixl) == way


@pytest.mark.parametrize(
    ("transport", "why"), [("rdma", "choose one of auto, shm, nixl, tcp"), ("shm", "UNIX socket"), ("nixl", "--nixl")]
)
def test_a_way_that_is_not_there_is_refused_by_name(transport: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        asked(transport, shm=False, offered=False, nixl=True)
