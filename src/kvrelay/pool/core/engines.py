"""Which engines are connected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.errors import BadRequestError, PoolFullError
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.pool.core.desk import Connection, Desk


class Engines:
    """What connections said of the engines they belong to."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def register(self, conn: Connection, request: m.Register, _now: float) -> None:
        """Note which engine a connection belongs to."""
        size = sum(len(key.encode()) + len(value.encode()) for key, value in request.facts.items())
        if size > limits.MAX_FACTS_BYTES:
            raise BadRequestError(f"{size} bytes of facts: at most {limits.MAX_FACTS_BYTES} are kept")
        size += sum(len(name.encode()) for name in (request.engine, request.role, request.namespace))
        others = sum(c.engine_bytes for c in self._of(conn.tenant) if c is not conn)
        if others + size > limits.MAX_ENGINES_BYTES:
            raise PoolFullError(f"the registered engines take {others} of {limits.MAX_ENGINES_BYTES} bytes")
        conn.engine = m.Engine(request.engine, request.role, request.namespace, request.facts)
        conn.engine_bytes = size
        self._desk.send(conn.number, m.Done(request.id))

    def list_engines(self, conn: Connection, request: m.ListEngines, _now: float) -> None:
        """Answer with the engines of the tenant that asks."""
        engines = [c.engine for c in self._of(conn.tenant) if c.engine is not None]
        self._desk.send(conn.number, m.Engines(request.id, engines))

    def _of(self, tenant: int) -> Iterator[Connection]:
        return (conn for conn in self._desk.connections.values() if conn.tenant == tenant)
