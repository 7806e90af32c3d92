"""A pool core with clients and a clock, for tests."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from kvrelay.pool.core.actions import Action, Send, SendArena, SendData
from kvrelay.pool.core.pool import PoolCore
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvrelay.pool.core.delivery import Delivery
    from kvrelay.pool.core.tenants import Tenant
    from kvrelay.pool.core.upkeep import Rules

R = TypeVar("R", bound=m.Reply)
PAGE = 4096


class Driver:
    """A core with connections 1 (shared memory), 2 and 3 (TCP) that have said hello, and a clock."""

    def __init__(
        self,
        pages: int = 8,
        token: str | None = None,
        *,
        tenants: Sequence[Tenant] = (),
        rules: Rules | None = None,
    ) -> None:
        """With several ``tenants``, connections 1 and 2 are the first's, 3 the second's."""
        self.core = PoolCore(
            pages * PAGE,
            pool="pool",
            server="kvrelay test",
            token=token,
            tenants=tenants,
            rules=rules,
        )
        tokens = [tenant.token for tenant in tenants[:2]] or [token]
        self.now = 100.0
        self.log: list[Action] = []
        self._id = 0
        for number in (1, 2, 3):
            self.core.connected(number, shm_capable=number == 1)
            self.send(number, m.Hello(0, [1], f"client {number}", tokens[-1] if number == 3 else tokens[0]))
        self.send(1, m.MapArena(0))
        self.log.clear()

    def send(self, conn: int, request: m.Request) -> int:
        """Hand a request to the core; the id it was given."""
        self._id += 1
        self.core.handle(conn, msgspec.structs.replace(request, id=self._id), self.now)
        self.settle()
        return self._id

    def settle(self) -> None:
        """Log what the core wants done, and check its books."""
        self.log += self.core.take_actions()
        self.core.check_integrity()

    def begin(self, conn: int, request: m.Write | m.Put, payload_bytes: int) -> tuple[int, Delivery | None]:
        """Announce a payload; the request's id, and where the payload goes."""
        self._id += 1
        request = msgspec.structs.replace(request, id=self._id)
        delivery = self.core.begin_payload(conn, request, payload_bytes, self.now)
        self.settle()
        self._payload = request
        return self._id, delivery

    def arrive(self, conn: int, sums: bytes, trailer: bytes = b"") -> None:
        """The payload that was announced last has arrived, with these checksums and this behind it."""
        self.core.finish_payload(conn, self._payload, sums, self.now, trailer)
        self.settle()

    def put(self, conn: int, *keys: bytes, size: int = PAGE, ttl_s: float = 0.0, ticket: str | None = None) -> bytes:
        """Put whole objects whose checksum is the first byte of their key; the states."""
        return self.put_done(conn, *keys, size=size, ttl_s=ttl_s, ticket=ticket).states

    def put_done(
        self, conn: int, *keys: bytes, size: int = PAGE, ttl_s: float = 0.0, ticket: str | None = None
    ) -> m.PutDone:
        """The same; the answer."""
        sizes, sums = column("Q", [size] * len(keys)), column("Q", [key[0] for key in keys])
        request, delivery = self.begin(conn, m.Put(0, list(keys), sizes, sums, ttl_s, ticket), size * len(keys))
        if delivery is not None:
            kept = [key for key in keys if self._is_expected(conn, key, delivery)]
            self.arrive(conn, column("Q", [key[0] for key in kept]))
        reply = self.answer(request)
        assert isinstance(reply, m.PutDone), reply
        return reply

    def _is_expected(self, conn: int, key: bytes, delivery: Delivery) -> bool:
        """Whether the bytes of a key are among those that are taken."""
        row = self.core.catalog.find(self.core.desk.connections[conn].tenant, key)
        offsets = memoryview(delivery.offsets).cast("Q")
        return row is not None and self.core.catalog.geometry(row)[0] in offsets

    def there(self, conn: int, *keys: bytes) -> list[bool]:
        """Which keys are sealed."""
        return self.ask(conn, m.Exists(0, list(keys)), m.Existing).flags

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.core.tick(self.now)
        self.settle()

    def die(self, conn: int) -> None:
        """A connection ends."""
        self.core.disconnected(conn, self.now)
        self.settle()

    def answer(self, request: int) -> m.Reply | None:
        """The answer to a request so far."""
        for action in self.log:
            if isinstance(action, Send | SendArena | SendData) and action.reply.id == request:
                return action.reply
        return None

    def ask(self, conn: int, request: m.Request, kind: type[R]) -> R:
        """A request that is answered at once, with a ``kind``."""
        reply = self.answer(self.send(conn, request))
        assert isinstance(reply, kind), reply
        return reply

    def fails(self, conn: int, request: m.Request, code: str) -> m.Failed:
        """A request that is refused with ``code``."""
        failed = self.ask(conn, request, m.Failed)
        assert failed.code == code, failed
        return failed

    def announce(
        self,
        conn: int,
        *keys: bytes,
        group: str = "g",
        pages: int = 1,
        layers: int = 1,
        segments: int = 1,
        lease_s: float = 10.0,
        ticket: str | None = None,
    ) -> list[m.Grant]:
        """Announce objects, ``pages`` of 4 KiB each."""
        specs = [m.Spec(key, pages * PAGE, layers, segments) for key in keys]
        return self.ask(conn, m.Announce(0, group, specs, lease_s, ticket), m.Announced).grants

    def store(self, *keys: bytes, pages: int = 1) -> None:
        """Store sealed objects, by connection 2."""
        for grant in self.announce(2, *keys, pages=pages):
            assert grant.state == "granted", grant
            self.ask(2, m.Written(0, [m.Part(grant.handle, 0, [7])]), m.Done)

    def lease(self, conn: int, *keys: bytes, lease_s: float = 10.0) -> m.Matched:
        """Lease what is there of a prefix."""
        return self.ask(conn, m.Match(0, list(keys), lease_s), m.Matched)

    def held(self) -> dict[str, int]:
        """The gauges that are 0 when nobody holds anything."""
        stats = self.core.stats()
        return {name: stats[name] for name in ("unsealed", "leases", "tickets", "waiting", "lingering_bytes")}


def column(kind: Literal["I", "Q"], values: Iterable[int]) -> bytes:
    """A packed column."""
    return array(kind, values).tobytes()


NOTHING_HELD = {"unsealed": 0, "leases": 0, "tickets": 0, "waiting": 0, "lingering_bytes": 0}
