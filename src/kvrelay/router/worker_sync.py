"""Several workers with one fleet and the same settings: the first worker's, which the others go over to.

The first one tells the others whenever something changes; whoever does not hear it is told again until it does. What
the others know of an engine counts where it is to leave: its process may be stopped once no worker needs it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from kvrelay.errors import DeadlineError, KvRelayError
from kvrelay.router.core.router_state import EngineStatus, RouterState

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.router.saved_state import SavedState
    from kvrelay.router.worker_peers import WorkerPeers

logger = logging.getLogger(__name__)

AGAIN_S = 0.5
"""Between two attempts to tell a worker, or to find out whether it still needs an engine."""
_STATE = msgspec.msgpack.Decoder(RouterState).decode
_STATUSES = msgspec.msgpack.Decoder(dict[str, EngineStatus]).decode
_DONE = b"done"


class WorkerSync:
    """One worker's part in it."""

    def __init__(
        self,
        peers: WorkerPeers | None,
        read_state: Callable[[int], RouterState],
        adopt: Callable[[RouterState], None],
        statuses: Callable[[], dict[str, EngineStatus]],
        saved: SavedState | None = None,
    ) -> None:
        """``peers``: None for a router of one process; ``saved``: what is kept should all workers end.

        ``read_state``: how this worker stands, under a version; ``adopt``: go over to how another one does;
        ``statuses``: what this worker knows of its engines, by their names.
        """
        self._peers = peers
        self._read_state = read_state
        self._adopt = adopt
        self._read_statuses = statuses
        self._saved = saved
        self._version = 0
        """Of the last change; 0: the first worker has not begun."""
        self._behind: tuple[int, ...] = ()
        self._chasing: asyncio.Task[None] | None = None

    @property
    def leads(self) -> bool:
        """Whether this worker decides."""
        return self._peers is None or self._peers.number == 0

    async def begin(self) -> None:
        """Go over to how the others stand, if any are there yet, or stood when the last of them ended."""
        if self._peers is None:
            return
        said = [_STATE(answer) for answer in await self._peers.ask_states() if answer]
        if self._saved is not None and (saved := self._saved.load()):
            said.append(_STATE(saved))
        if not said:
            self.changed()  # so that whoever comes later has how we stand, whatever the configuration file says then
            return
        try:
            self._take(max(said, key=lambda state: state.version))
        except KvRelayError as error:
            logger.error("this worker cannot make the changes since the start: %s", error)  # noqa: TRY400
        self._tell_others()  # whoever sat here before may have ended before all had heard

    def changed(self) -> None:
        """Something is other than it was: tell the others, in the background."""
        if self._peers is None or not self.leads:
            return
        self._version = time.monotonic_ns()
        if self._saved is not None:
            self._saved.save(self.state())
        self._tell_others()

    def _tell_others(self) -> None:
        if self.leads and self._version and (self._chasing is None or self._chasing.done()):
            self._chasing = asyncio.create_task(self._chase())

    async def settled(self) -> None:
        """Wait until all workers have gone over to the last change.

        Raises:
            DeadlineError: some have not, and are told again.
        """
        if self._chasing is None:
            return
        await self._spread()
        if self._behind:
            numbers = ", ".join(map(str, self._behind))
            raise DeadlineError(f"done, but not yet by all workers: {numbers} did not answer, and will be told again")

    async def engine_statuses(self) -> list[dict[str, EngineStatus]]:
        """What each worker that answers knows of its engines, this one first."""
        if self._peers is None:
            return [self._read_statuses()]
        told = [_STATUSES(answer) for answer in await self._peers.ask_statuses() if answer]
        return [self._read_statuses(), *told]

    async def left(self, engine: str, by: float) -> None:
        """Wait until no other worker needs an engine that leaves, or until ``by``, on the host's monotonic clock."""
        if self._peers is None or not self.leads:
            return
        while any(engine in statuses for statuses in (await self.engine_statuses())[1:]):
            if time.monotonic() > by:
                logger.warning("%s: a worker has not let go of it in time", engine)
                return
            await asyncio.sleep(AGAIN_S)

    async def close(self) -> None:
        """Tell nobody any longer."""
        if self._chasing is not None:
            self._chasing.cancel()
            await asyncio.wait({self._chasing})

    # --- asked by another worker ---

    def state(self) -> bytes:
        """How this worker stands; empty until it knows."""
        return msgspec.msgpack.encode(self._read_state(self._version)) if self._version else b""

    def told(self, state: bytes) -> bytes:
        """Go over to how the first worker stands."""
        try:
            self._take(_STATE(state))
        except KvRelayError as error:
            logger.error("this worker cannot make the first worker's change: %s", error)  # noqa: TRY400 - said in full
            return str(error).encode()
        return _DONE

    def statuses(self) -> bytes:
        """What this worker knows of its engines."""
        return msgspec.msgpack.encode(self._read_statuses())

    # --- the rest ---

    def _take(self, state: RouterState) -> None:
        if state.version > self._version:
            self._adopt(state)
            self._version = max(self._version, state.version)

    async def _spread(self) -> None:
        assert self._peers is not None
        version = self._version
        answers = await self._peers.tell_state(self.state())
        if version == self._version:
            self._behind = tuple(number for number, answer in answers if answer not in {_DONE, None})

    async def _chase(self) -> None:
        """Tell the others until all have heard; whoever is not there asks by itself when it comes."""
        told = 0
        while told != self._version or self._behind:
            told = self._version
            await self._spread()
            if self._behind:
                await asyncio.sleep(AGAIN_S)
