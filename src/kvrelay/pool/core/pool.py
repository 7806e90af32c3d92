"""The pool's one mutator: requests and the passing of time go in, actions come out.

The shell calls `connected`, `handle` (and, for requests with a payload, `begin_payload` and `finish_payload`),
`transferred`, `disconnected` and `tick`, and after each of them executes what `take_actions` returns. Time is the
caller's: seconds of any steady clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from kvrelay.errors import BadRequestError, KvRelayError, LeaseExpiredError, UnauthorizedError, VersionError
from kvrelay.pool.core.actions import Action, Close, SendArena, SendIndex
from kvrelay.pool.core.audit import audit
from kvrelay.pool.core.bulk import Bulk
from kvrelay.pool.core.catalog import new_catalog
from kvrelay.pool.core.desk import Connection, Desk
from kvrelay.pool.core.engines import Engines
from kvrelay.pool.core.keeping import Keeping
from kvrelay.pool.core.lower import Seeking
from kvrelay.pool.core.quotas import Quotas
from kvrelay.pool.core.reading import Reading
from kvrelay.pool.core.stats import collect
from kvrelay.pool.core.store import Store
from kvrelay.pool.core.tenants import Quota, Tenant, Tenants
from kvrelay.pool.core.tickets import Tickets
from kvrelay.pool.core.upkeep import Rules, Upkeep
from kvrelay.pool.core.writing import Writing
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.pool.core.catalog import Catalog
    from kvrelay.pool.core.delivery import Delivery
    from kvrelay.pool.core.lower import Lower
    from kvrelay.wire.bulk import ObjectInfo

DEFAULT_TENANT = "default"


class TenantUse(Struct, frozen=True):
    """What a tenant has. ``objects``: sealed or being written; ``held_bytes``: of the arena, in any state."""

    name: str
    objects: int
    held_bytes: int
    connections: int
    quota: Quota
    shm: bool


class NixlOffer(NamedTuple):
    """The shell's NIXL agent, and the arena's address in it."""

    agent: str
    metadata: bytes
    base: int


class IndexOffer(NamedTuple):
    """Sizes of the two files of a tenant's index, and the name of the clock it tells times of."""

    table_bytes: int
    marks_bytes: int
    clock: str


class PoolCore:
    """A pool of ``arena_bytes`` named ``pool``.

    ``tenants``: who may use it. Without, there is one, named `DEFAULT_TENANT`, trusted with shared memory, whose token
    is ``token``; None for no authentication. ``catalog``: which implementation keeps the objects.
    """

    def __init__(
        self,
        arena_bytes: int,
        *,
        pool: str,
        server: str,
        token: str | None = None,
        tenants: Sequence[Tenant] = (),
        rules: Rules | None = None,
        catalog: Callable[[int], Catalog] = new_catalog,
    ) -> None:
        self.catalog = catalog(arena_bytes)
        self.tenants = Tenants(tenants or (Tenant(name=DEFAULT_TENANT, token=token, shm=True),))
        self.quotas = Quotas(self.tenants, self.catalog)
        self.store = Store(self.catalog)
        self.desk = Desk(self.store)
        self.seeking = Seeking(self.desk)
        self.upkeep = Upkeep(self.catalog, rules or Rules(), self.seeking, self.quotas)
        self.tickets = Tickets(self.desk)
        self.reading = Reading(self.desk, self.seeking, self.tickets)
        self.bulk = Bulk(self.desk, self.reading, self.tickets, self.upkeep, self.seeking)
        self.writing = Writing(self.desk, self.reading, self.tickets, self.upkeep, self.bulk, self.seeking)
        self.keeping = Keeping(self.desk, self.reading, self.writing, self.upkeep, self.seeking)
        self.engines = Engines(self.desk)
        self._pool = pool
        self._server = server
        self.nixl: NixlOffer | None = None
        """How NIXL reaches the arena, once the shell offers it."""
        self._indexes: dict[int, IndexOffer] = {}
        """By tenant."""
        self._handlers: dict[type[m.Request], Callable[..., object]] = {
            m.Hello: self._hello,
            m.MapArena: self._map_arena,
            m.NixlMap: self._nixl_map,
            m.MapIndex: self._map_index,
            m.Announce: self.writing.announce,
            m.Written: self.writing.written,
            m.Abort: self.writing.abort,
            m.Disclaim: self.writing.disclaim,
            m.Room: self.bulk.room,
            m.Fill: self.bulk.fill,
            m.Match: self.reading.match,
            m.Wait: self.reading.wait,
            m.Read: self.reading.read,
            m.Release: self.reading.release,
            m.Forget: self.reading.forget,
            m.Locate: self.bulk.locate,
            m.Get: self.bulk.get,
            m.CountPrefix: self.bulk.count_prefix,
            m.Corrupt: self.keeping.corrupt,
            m.Exists: self.keeping.exists,
            m.Delete: self.keeping.delete,
            m.Pin: self.keeping.pin,
            m.Unpin: self.keeping.unpin,
            m.Touch: self.keeping.touch,
            m.Prefetch: self.keeping.prefetch,
            m.ListObjects: self.keeping.list_objects,
            m.Purge: self.keeping.purge_own,
            m.OpenTicket: self.tickets.open_ticket,
            m.SealTicket: self.tickets.seal_ticket,
            m.Follow: self.tickets.follow,
            m.EndTicket: self.tickets.end_ticket,
            m.Post: self.tickets.post,
            m.Collect: self.tickets.collect,
            m.Register: self.engines.register,
            m.ListEngines: self.engines.list_engines,
            m.Stat: self._stat,
            m.Invalid: self._invalid,
        }

    # --- the shell's side ---

    def take_actions(self) -> list[Action]:
        """What is to be done now, in order."""
        return self.desk.take_actions()

    def connected(self, number: int, *, shm_capable: bool, certificates: Sequence[str] = ()) -> None:
        """Note that a peer connected.

        ``shm_capable``: over a UNIX socket, so that a descriptor can be passed. ``certificates``: names in the
        certificate it proved to have.
        """
        self.desk.connections[number] = Connection(number, shm_capable=shm_capable, certificates=certificates)

    def is_known(self, number: int) -> bool:
        """Whether a peer has said hello, and was let in."""
        conn = self.desk.connections.get(number)
        return conn is not None and conn.client is not None

    def handle(self, number: int, request: m.Request, now: float) -> None:
        """Handle one request that has no payload."""
        self.tick(now)
        conn = self._greeted(number, request)
        if conn is None:
            return
        handler = self._handlers.get(type(request))
        try:
            if handler is None:
                raise BadRequestError(f"a {type(request).__name__} message comes with its bytes: none followed")
            handler(conn, request, now)
        except KvRelayError as error:
            self._refuse(number, request, error)

    def begin_payload(self, number: int, request: m.Request, payload_bytes: int, now: float) -> Delivery | None:
        """Say where the payload of ``request`` goes; None: it was answered already, drop the payload."""
        self.tick(now)
        conn = self._greeted(number, request)
        if conn is None:
            return None
        try:
            match request:
                case m.Write():
                    return self.writing.begin(conn, request, payload_bytes, now)
                case m.Put():
                    return self.bulk.put(conn, request, payload_bytes, now)
                case _:
                    raise BadRequestError(f"a {type(request).__name__} message has no payload, {payload_bytes} follow")
        except KvRelayError as error:
            self._refuse(number, request, error)
            return None

    def finish_payload(self, number: int, request: m.Request, sums: bytes, now: float, trailer: bytes = b"") -> None:
        """Note that the payload of ``request`` is where it belongs.

        ``sums``, ``trailer``: the checksums, and what came behind the bytes, as `Delivery` asked for.
        """
        self.tick(now)
        conn = self.desk.connections[number]
        incoming, conn.incoming = conn.incoming, None
        assert incoming is not None
        try:
            incoming.arrived(conn, sums, trailer, now)
        except KvRelayError as error:
            self._refuse(number, request, error)

    def transferred(self, transfer: int) -> None:
        """Note that the bytes of a `SendData` action have left, or never will."""
        self.reading.transferred(transfer)

    def disconnected(self, number: int, now: float) -> None:
        """Note that a connection ended: everything that belonged to it ends too."""
        conn = self.desk.connections.pop(number, None)
        if conn is None:
            return
        for lease in list(conn.leases.values()):
            self.reading.drop(lease, LeaseExpiredError("the connection ended"))
        for follower in list(conn.follows):
            self.tickets.forget(follower)
        for ticket in list(conn.tickets.values()):
            self.tickets.drop(ticket)
        self.seeking.disconnected(conn)
        if conn.incoming is not None:
            conn.incoming.lost()
        self.writing.disconnected(conn, now)
        self.bulk.disconnected(conn, now)

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest."""
        deadlines = [due for due in (self.desk.next_deadline(), self.upkeep.next_deadline()) if due is not None]
        return min(deadlines, default=None)

    def tick(self, now: float) -> None:
        """Let time pass: end what has run past its deadline."""
        self.desk.tick(now)
        self.upkeep.tick(now)

    def _greeted(self, number: int, request: m.Request) -> Connection | None:
        """The connection a request came on, if it may ask."""
        conn = self.desk.connections.get(number)
        if conn is None:
            return None
        self.desk.counters.requests += 1
        if conn.client is None and not isinstance(request, m.Hello | m.Invalid):
            self._refuse(number, request, UnauthorizedError(f"say hello first, not {type(request).__name__}"))
            return None
        return conn

    def _refuse(self, number: int, request: m.Request, error: KvRelayError) -> None:
        self.desk.fail(number, request.id, error)
        refused = isinstance(request, m.Hello) and not self.is_known(number)
        if refused or isinstance(error, UnauthorizedError | VersionError):
            self.desk.act(Close(number, str(error)))

    # --- the handshake ---

    def _hello(self, conn: Connection, request: m.Hello, _now: float) -> None:
        if conn.client is not None:
            raise BadRequestError("hello was said already")
        version = next((v for v in request.versions if v in limits.VERSIONS), None)
        if version is None:
            raise VersionError(
                f"the client speaks pool protocol {request.versions}, this pool {list(limits.VERSIONS)} "
                f"({self._server}): run the same kvrelay version on both sides"
            )
        tenant = self.tenants.admit(request.token, conn.certificates)
        self.quotas.check_connections(tenant, self.desk)
        conn.tenant = tenant
        conn.client = request.client
        conn.trusted = self.tenants[conn.tenant].shm
        conn.shm_capable = conn.shm_capable and conn.trusted
        size = self.catalog.arena_bytes
        nixl = self.nixl is not None and conn.trusted
        shown = conn.shm_capable and conn.tenant in self._indexes
        welcome = m.Welcome(request.id, version, self._server, self._pool, size, conn.shm_capable, nixl, shown)
        self.desk.send(conn.number, welcome)

    def _map_arena(self, conn: Connection, request: m.MapArena, _now: float) -> None:
        if not conn.shm_capable:
            raise BadRequestError("the arena is mapped over the pool's UNIX socket only, by tenants trusted with it")
        conn.shm = True
        self.desk.act(SendArena(conn.number, m.Arena(request.id, self.catalog.arena_bytes)))

    def _map_index(self, conn: Connection, request: m.MapIndex, _now: float) -> None:
        offer = self._indexes.get(conn.tenant)
        if offer is None or not conn.shm_capable:
            raise BadRequestError(
                "an index is kept for clients over the pool's UNIX socket only, of tenants trusted with shared memory"
            )
        mapped = m.IndexMapped(request.id, *offer, self.seeking.lower is not None)
        self.desk.act(SendIndex(conn.number, mapped, conn.tenant))

    def _nixl_map(self, conn: Connection, request: m.NixlMap, _now: float) -> None:
        if self.nixl is None:
            raise BadRequestError("this pool does not offer its arena over NIXL: start it with --nixl")
        if not conn.trusted:
            raise BadRequestError("the arena is reached over NIXL by tenants trusted with its memory only")
        conn.shm = True
        agent, metadata, base = self.nixl
        self.desk.send(conn.number, m.NixlMapped(request.id, agent, metadata, base, self.catalog.arena_bytes))

    def _invalid(self, _conn: Connection, request: m.Invalid, _now: float) -> None:
        raise BadRequestError(request.why)

    def _stat(self, conn: Connection, request: m.Stat, _now: float) -> None:
        self.desk.send(conn.number, m.Stats(request.id, self.stats()))

    def show_index(self, tenant: int, table: memoryview, marks: memoryview, clock: str) -> bool:
        """Keep an index of a tenant's objects in this memory from now on, and offer it; whether that is possible."""
        if not self.catalog.show(tenant, table, marks):
            return False
        self._indexes[tenant] = IndexOffer(table.nbytes, marks.nbytes, clock)
        return True

    # --- administration ---

    def stats(self) -> dict[str, int]:
        """Gauges and counters, as `kvrelay.pool.core.stats` describes them."""
        return collect(self)

    def tenant_uses(self) -> list[TenantUse]:
        """What each tenant holds."""
        return [
            TenantUse(
                tenant.name,
                *self.catalog.usage(number),
                self.desk.connections_of(number),
                self.quotas[number],
                tenant.shm,
            )
            for number, tenant in self.tenants
        ]

    def set_quota(self, name: str, **changes: int | None) -> Quota:
        """Change what a tenant may have, by the names of `Quota`; those not named stay.

        Objects beyond it go as the tenant writes; connections beyond it stay, and no more are let in.

        Raises:
            NotFoundError: there is no such tenant.
        """
        return self.quotas.change(self.tenants.number(name), changes)

    def objects(
        self, now: float, *, tenant: str | None = None, cursor: int = 0, limit: int = 1_024, prefix: bytes = b""
    ) -> tuple[int, list[tuple[str, ObjectInfo]]]:
        """The next page's cursor (0: none) and a page of objects with their tenants, of one tenant or all.

        Raises:
            NotFoundError: there is no such tenant.
        """
        number = None if tenant is None else self.tenants.number(tenant)
        following, page = self.keeping.page(number, cursor, limit, prefix, now)
        return following, [(self.tenants[of].name, shown) for of, shown in page]

    def delete(self, tenant: str, key: bytes, now: float) -> bool:
        """Forget an object, here and below; whether it was here.

        Raises:
            NotFoundError: there is no such tenant.
        """
        number = self.tenants.number(tenant)
        row = self.catalog.find(number, key)
        if row is not None:
            self.keeping.remove((row,))
            self.desk.counters.deleted += 1
        if self.seeking.lower is not None:
            self.seeking.lower.forget(number, [key], now)
        return row is not None

    def purge(self, tenant: str, now: float) -> int:
        """Forget every object of a tenant, here and below, that nobody has leased or pinned; how many there were here.

        Raises:
            NotFoundError: there is no such tenant.
        """
        return self.keeping.purge(self.tenants.number(tenant), now)

    def drain(self, *, on: bool = True) -> None:
        """Take nothing new in, or do again. What is being written may be completed; reads are answered."""
        self.desk.draining = on

    # --- lower tiers ---

    def attach(self, lower: Lower) -> None:
        """Put tiers below the arena."""
        self.seeking.lower = lower
        self.upkeep.tiered()

    def published(self, rows: bytes) -> None:
        """Note that lower tiers filled and published these rows: whoever waits for them is told."""
        self.reading.written(memoryview(rows).cast("I"))

    def abandoned(self, rows: bytes) -> None:
        """Give up rows that lower tiers reserved and cannot fill."""
        self.bulk.drop(rows)

    def damaged(self, handles: Sequence[int]) -> None:
        """Forget objects that lower tiers found not to match their checksums, if they still are there."""
        rows = [row for handle in handles if (row := self.catalog.row_of(handle)) is not None]
        self.desk.counters.corrupt += len(rows)
        self.keeping.remove(rows)

    def check_integrity(self) -> None:
        """Raise AssertionError unless objects, leases, tickets and waiters are accounted for."""
        audit(self)
