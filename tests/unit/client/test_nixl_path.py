"""Memory that NIXL may still read or write stays registered and alive, whatever ends a copy or the client."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.client import nixl_path
from kvrelay.client.core.blocks import Blocks
from kvrelay.client.core.session import AbandonedError
from kvrelay.client.core.steps import Transfer
from kvrelay.client.mover import BatchMover
from kvrelay.client.nixl_path import NixlPath
from kvrelay.errors import DeadlineError, PoolUnavailableError
from kvrelay.transport import nixl
from kvrelay.wire.messages import NixlMapped

if TYPE_CHECKING:
    from collections.abc import Generator

SIZE = 4096
AT_0 = bytes(8)


class ScriptedAgent:
    """As much of NIXL's agent as a client uses. Its copies go on until they are released, or for ever."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []
        self.moving: list[tuple[int, int]] = []
        self.pools = ["pool"]
        self.done = False
        self.can_stop = True
        self.torn: list[tuple[int, int]] = []
        """Memory that was taken away from copies under way."""

    def add_remote_agent(self, _metadata: bytes) -> bytes:
        return b"pool"

    def remove_remote_agent(self, name: str) -> None:
        self.pools.remove(name)

    def register_memory(self, regions: list[tuple[int, int, int, str]], _kind: str, **_: Any) -> tuple[int, int]:
        ((start, size, _device, _note),) = regions
        self.registered.append((start, size))
        return start, size

    def deregister_memory(self, region: tuple[int, int]) -> None:
        start, size = region
        self.torn += [place for place in self.moving if start <= place[0] < start + size]
        self.registered.remove(region)

    def get_xfer_descs(self, places: list[tuple[int, int, int]], _kind: str) -> list[tuple[int, int, int]]:
        return places

    def initialize_xfer(self, _way: str, here: list[tuple[int, int, int]], *_: Any) -> tuple[int, int]:
        (place,) = here
        return place[:2]

    def transfer(self, place: tuple[int, int]) -> str:
        self.moving.append(place)
        return "PROC"

    def check_xfer_state(self, _place: tuple[int, int]) -> str:
        return "DONE" if self.done else "PROC"

    def release_xfer_handle(self, place: tuple[int, int]) -> None:
        if not self.can_stop:
            raise RuntimeError("still active")
        self.moving.remove(place)


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent()


@pytest.fixture
def path(agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch) -> NixlPath:
    monkeypatch.setattr(nixl, "_agent", lambda *_, **__: agent)
    return NixlPath("client", NixlMapped(id=1, agent="pool", metadata=b"metadata", base=0, size=1 << 20), BatchMover())


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Every staging buffer that was made."""
    made: list[weakref.ref[Any]] = []

    class Watched(bytearray):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            made.append(weakref.ref(self))

    monkeypatch.setattr(nixl_path, "bytearray", Watched, raising=False)
    return made


def started(path: NixlPath, *, write: bool, source: bytearray | None = None) -> Generator[Any, Any, Any]:
    """A copy under way, of registered memory if ``source`` is."""
    view = memoryview(bytearray(SIZE) if source is None else source)
    blocks = Blocks.of_pages(view, [0], SIZE)
    operation = path.write(blocks, AT_0) if write else path.read(AT_0, blocks, bytes(8))
    assert isinstance(next(operation), Transfer)
    return operation


def break_off(operation: Generator[Any, Any, Any], error: BaseException) -> None:
    with contextlib.suppress(PoolUnavailableError, type(error)):
        operation.throw(error)
    error.__traceback__ = error.__context__ = None


@pytest.mark.parametrize("can_stop", [True, False])
@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
@pytest.mark.parametrize("error", [DeadlineError, AbandonedError, KeyboardInterrupt, GeneratorExit])
def test_the_staging_buffer_of_a_copy_that_was_broken_off_lives_until_the_client_is_closed(
    path: NixlPath,
    agent: ScriptedAgent,
    staging: list[weakref.ref[Any]],
    error: type[BaseException],
    write: bool,
    can_stop: bool,
) -> None:
    operation = started(path, write=write)
    agent.can_stop = can_stop
    break_off(operation, error("broken off"))
    del operation
    gc.collect()
    assert [made() is not None for made in staging] == [True]
    assert len(agent.registered) == 1
    with pytest.raises(PoolUnavailableError, match="connect anew"):
        started(path, write=write)
    path.close()
    gc.collect()
    assert [made() is not None for made in staging] == [False]
    assert not agent.registered


@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_registered_memory_does_not_travel_either_after_a_copy_was_broken_off(
    path: NixlPath, agent: ScriptedAgent, write: bool
) -> None:
    source = bytearray(SIZE)
    path.register(memoryview(source))
    operation = started(path, write=write, source=source)
    break_off(operation, DeadlineError("too late"))
    assert not agent.moving
    with pytest.raises(PoolUnavailableError, match="connect anew"):
        started(path, write=write, source=source)
    assert not agent.moving


@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_a_client_closed_amid_copies_keeps_their_memory_until_the_last_has_ended(
    path: NixlPath, agent: ScriptedAgent, write: bool
) -> None:
    """1. two threads copy; 2. a third closes the client; 3. each copy is told so, and stops."""
    source = bytearray(SIZE)
    path.register(memoryview(source))
    copies = [started(path, write=write, source=source), started(path, write=write)]
    path.close()
    path.close()
    assert len(agent.registered) == 2
    for left, copy in zip((2, 0), copies, strict=True):
        assert len(agent.registered) == 2
        with pytest.raises(PoolUnavailableError, match="broken off: the client was closed"):
            copy.throw(PoolUnavailableError("the client was closed"))
        assert len(agent.registered) == left
    assert (agent.torn, agent.moving, agent.pools) == ([], [], [])
    with pytest.raises(PoolUnavailableError, match="connect anew"):
        path.register(memoryview(source))


def test_a_copy_is_told_of_the_close_at_its_next_look(path: NixlPath) -> None:
    view = memoryview(bytearray(SIZE))
    operation = path.write(Blocks.of_pages(view, [0], SIZE), AT_0)
    transfer = next(operation)
    assert isinstance(transfer, Transfer)
    assert not transfer.finished()
    path.close()
    with pytest.raises(PoolUnavailableError, match="the client was closed"):
        transfer.finished()
    break_off(operation, PoolUnavailableError("the client was closed"))


def test_a_copy_whose_last_byte_came_as_the_client_was_closed_ends_well(path: NixlPath, agent: ScriptedAgent) -> None:
    operation = started(path, write=True)
    agent.done = True
    path.close()
    with pytest.raises(StopIteration):
        next(operation)
    assert (agent.registered, agent.torn, agent.moving, agent.pools) == ([], [], [], [])


def test_an_idle_client_forgets_memory_and_pool_at_once(path: NixlPath, agent: ScriptedAgent) -> None:
    path.register(memoryview(bytearray(SIZE)))
    agent.done = True
    with pytest.raises(StopIteration):
        next(started(path, write=True))
    path.close()
    assert (agent.registered, agent.pools) == ([], [])
