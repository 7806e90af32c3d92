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

    listen: str | None = None
    """HOST:PORT, 0 for any free port; None: there is no admin API."""
    token_file: str | None = None

    def problems(self, host: str | None, token: str | None) -> Iterator[str]:
        """What cannot be, as one line each. ``host``: of `listen`; ``token``: from the file or the environment."""
        if host is None:
            if self.token_file is not None:
                yield "--admin-token-file has no effect without --admin-listen HOST:PORT"
        elif token is None and not is_loopback(host):
            yield (
                f"--admin-listen {self.listen} can be reached from other hosts, and the admin API asks for no token: "
                f"give --admin-token-file FILE or {TOKEN_VARIABLE}, or listen on 127.0.0.1"
            )


class Admin(Struct, frozen=True, kw_only=True):
    """Checked. ``listen``: HOST:PORT."""

    listen: str
    token: str | None

    def __repr__(self) -> str:
        return f"Admin({self.listen!r})"  # the token stays out of logs
