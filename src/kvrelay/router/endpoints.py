"""What the router answers itself: its health, its metrics, the hand-overs it remembers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from kvrelay.router.core.answers import Refusal
from kvrelay.router.core.fleet import Role
from kvrelay.router.core.paths import HANDOVERS
from kvrelay.router.health_checks import HealthChecks
from kvrelay.router.metrics import CONTENT_TYPE, render

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.records import Record, RecordBook
    from kvrelay.router.engines import Engines
    from kvrelay.router.http.messages import Request
    from kvrelay.router.http.reply import Reply
    from kvrelay.router.kv_compatibility import KvCompatibility
    from kvrelay.router.metrics import RouterMetrics
    from kvrelay.router.tickets import TicketManager
    from kvrelay.router.worker_peers import PeerRequest, WorkerPeers
    from kvrelay.router.worker_sync import WorkerSync


class RouterEndpoints:
    """The router's own endpoints."""

    def __init__(
        self,
        engines: Engines,
        tickets: TicketManager | None,
        book: RecordBook,
        metrics: RouterMetrics,
        compatibility: KvCompatibility,
        *,
        colocated_fallback: bool = False,
        peers: WorkerPeers | None = None,
        worker_sync: WorkerSync | None = None,
    ) -> None:
        """Reads what the others keep. ``colocated_fallback``: whether prefill engines can answer alone.

        ``peers``: the other workers of this router, if there are several; ``worker_sync``: this one's part with them.
        """
        self._peers = peers
        self._worker_sync = worker_sync
        self._able = frozenset(Role) if colocated_fallback else frozenset({Role.DECODE})
        self._engines = engines
        self._tickets = tickets
        self._book = book
        self._metrics = metrics
        self._compatibility = compatibility
        self._health_checks = HealthChecks(engines)
        self.draining = False
        """Whether the router is about to end: load balancers that ask are to send nothing more."""

    async def start(self) -> None:
        """Answer other workers, if there are any."""
        if self._peers is not None:
            await self._peers.start(self._answer)

    async def close(self) -> None:
        """Stop asking engines how they are, and answering other workers."""
        self._health_checks.close()
        if self._peers is not None:
            await self._peers.close()

    def forget_all_but(self, engines: Collection[Engine]) -> None:
        """Only these are there now."""
        self._health_checks.forget_all_but(engines)

    async def health(self, reply: Reply) -> None:
        """200 while an engine is well that can answer alone; 503 otherwise, and before the router ends.

        Every engine's state as JSON.
        """
        states = await asyncio.gather(*(self._state(engine) for engine in self._engines.all))
        able = any(state["role"] in self._able and state["healthy"] and not state["draining"] for state in states)
        whole = all(state["healthy"] for state in states)
        pool = "unused" if self._tickets is None else "up" if self._tickets.link.up else "away"
        status = "draining" if self.draining else ("ok" if whole else "degraded") if able else "unavailable"
        view = {
            "status": status,
            "engines": states,
            "pool": pool,
            "kv_mismatches": self._compatibility.mismatches,
        }
        reply.answer(200 if able and not self.draining else 503, msgspec.json.encode(view))

    async def text(self) -> bytes:
        """Prometheus text, of all workers together."""
        self._refresh()
        if self._peers is None:
            return self._metrics.render()
        return render(await self._peers.gather(self._metrics.snapshot()))

    async def metrics(self, reply: Reply) -> None:
        """Prometheus text, of all workers together."""
        reply.answer(200, await self.text(), CONTENT_TYPE)

    async def handover(self, request: Request, reply: Reply) -> str:
        """One hand-over's record. Waits a moment for proofs that are on their way. The outcome."""
        name = request.path.removeprefix(HANDOVERS)
        record = self._book.find(name)
        if record is not None:
            reply.answer(200, await self._view(record))
            return "ok"
        found = None if self._peers is None else await self._peers.find(name)
        if found is None:
            reply.refuse(Refusal(404, "unknown_handover", f"No hand-over {name!r} among the last ones"))
            return "client_error"
        reply.answer(200, found)
        return "ok"

    async def _view(self, record: Record) -> bytes:
        if self._tickets is not None:
            await self._tickets.settled(record.life.name)
        return msgspec.json.encode(record.view())

    async def _answer(self, request: PeerRequest) -> bytes:
        """To another worker."""
        if request.what == "handover":
            record = self._book.find(request.name)
            return b"" if record is None else await self._view(record)
        if self._worker_sync is not None and request.what == "state":
            return self._worker_sync.state()
        if self._worker_sync is not None and request.what == "adopt":
            return self._worker_sync.told(request.state)
        if self._worker_sync is not None and request.what == "statuses":
            return self._worker_sync.statuses()
        assert self._peers is not None
        self._refresh()
        return msgspec.msgpack.encode(self._peers.with_before(self._metrics.snapshot()))

    def _refresh(self) -> None:
        self._metrics.refresh(self._engines.all, asyncio.get_running_loop().time())

    async def _state(self, engine: Engine) -> dict[str, Any]:
        problem = await self._health_checks.problem(engine)
        resting = engine.health.is_resting(asyncio.get_running_loop().time())
        return {
            "name": engine.name,
            "role": engine.role,
            "url": engine.address.url,
            "healthy": not problem,
            "problem": problem or None,
            "resting": resting,
            "draining": engine.draining,
        }
