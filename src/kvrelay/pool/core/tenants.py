"""Who may come in, and as whom."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import NotFoundError, UnauthorizedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Quota(Struct, frozen=True, kw_only=True):
    """What a tenant may have at most; None for no bound."""

    quota_bytes: int | None = None
    """Of the arena."""
    max_objects: int | None = None
    """Sealed, or being written."""
    max_connections: int | None = None


class Tenant(Struct, frozen=True, kw_only=True):
    """One tenant: its clients see its objects and tickets alone.

    ``token``, ``certificate`` (a common name): what its clients present, one or the other; with neither, whoever
    presents nothing else is this tenant. ``quota``: what it may have. ``shm``: trusted with the whole arena's memory.
    """

    name: str
    token: str | None = None
    certificate: str | None = None
    quota: Quota = Quota()
    shm: bool = False

    def __repr__(self) -> str:
        return f"Tenant({self.name!r}, {self.quota}, shm={self.shm})"  # never the token


class Tenants:
    """The tenants of a pool. Their numbers, in the catalog, are their places in the list."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._tenants = tuple(tenants)
        self._open = next((n for n, t in enumerate(tenants) if t.token is None and t.certificate is None), None)

    def __getitem__(self, number: int) -> Tenant:
        return self._tenants[number]

    def __iter__(self) -> Iterator[tuple[int, Tenant]]:
        return enumerate(self._tenants)

    def number(self, name: str) -> int:
        """The number of the tenant called ``name``.

        Raises:
            NotFoundError: there is none.
        """
        for number, tenant in self:
            if tenant.name == name:
                return number
        known = ", ".join(tenant.name for tenant in self._tenants)
        raise NotFoundError(f"there is no tenant {name!r}: this pool's are {known}")

    def admit(self, token: str | None, certificates: Sequence[str] = ()) -> int:
        """The number of the tenant whose token, or a name of whose certificate, was presented.

        Raises:
            UnauthorizedError: it is nobody's.
        """
        presented = (token or "").encode()
        found = None
        for number, tenant in self:
            if tenant.token is not None and hmac.compare_digest(tenant.token.encode(), presented):
                found = number
        if found is None and not token:
            found = next((number for number, tenant in self if tenant.certificate in certificates), None)
        if found is None:
            found = self._open
        if found is None:
            given = "a wrong token" if token else "no token"
            raise UnauthorizedError(f"{given} was presented: give the token this pool was started with")
        return found
