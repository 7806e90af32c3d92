"""Where the admin API listens, and who may use it. Settings only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.hosts import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN_VARIABLE = "KVRELAY_ROUTER_ADMIN_TOKEN"  # noqa: S105 - the variable's name


class AdminSettings(Struct, frozen=True, kw_only=True):
    """As given."""

    port: int | None = None
    """None: there is no admin API; 0: any free port."""
    host: str = "127.0.0.1"
    token_file: str | None = None

    def problems(self, token: str | None) -> Iterator[str]:
        """What cannot be, as one line each. ``token``: from the file or the environment."""
        if self.port is None:
            if self.token_file is not None:
                yield "--admin-token-file has no effect without --admin-port: give one, 0 for any free port"
            return
        if not 0 <= self.port <= 65535:
            yield f"--admin-port {self.port} is not a port: give one from 1 to 65535, or 0 for any free one"
        if token is None and not is_loopback(self.host):
            yield (
                f"--admin-host {self.host} can be reached from other hosts, and the admin API asks for no token: "
                f"give --admin-token-file FILE or {TOKEN_VARIABLE}, or leave --admin-host out"
            )


class Admin(Struct, frozen=True, kw_only=True):
    """Checked. ``listen``: HOST:PORT."""

    listen: str
    token: str | None

    def __repr__(self) -> str:
        return f"Admin({self.listen!r})"  # the token stays out of logs
