"""Which of a client's headers reach engines.

By default all that are about the request and not about the connection it came on. An operator may name those that do
not (``--drop-header``), or the only ones that do (``--forward-header``); what an engine cannot do without always does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

REQUEST_ID = b"x-request-id"
ALWAYS = frozenset({b"content-type", b"content-encoding"})
"""Without them an engine would read the body as something else."""
_PATTERN = re.compile(r"[!#$%&'+.^_`|~0-9A-Za-z-]+\*?|\*")
_NEVER = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection"})
MAX_KNOWN = 4096
"""Names whose fate is remembered: clients choose names."""


class HeaderSettings(Struct, frozen=True):
    """As given. Names, maybe with a ``*`` at their end; case does not matter."""

    forward: tuple[str, ...] = ()
    """If any: only these, and `ALWAYS`, reach engines."""
    drop: tuple[str, ...] = ()
    """Never reach engines, whatever ``forward`` says."""
    request_id: tuple[str, ...] = ()
    """Where a client's name for its request is looked for, after `REQUEST_ID`, in this order."""

    @property
    def naming(self) -> tuple[bytes, ...]:
        """The headers that may name a request, the first that does counts."""
        return REQUEST_ID, *(name.lower().encode() for name in self.request_id)


class HeaderRules:
    """Settings made ready. Without any it costs nothing: see `rules_of`."""

    def __init__(self, settings: HeaderSettings, own: Collection[bytes] = ()) -> None:
        """``settings``: checked by `problems_of`. ``own``: names that pass all the same."""
        self._forward = _Patterns(settings.forward)
        self._drop = _Patterns(settings.drop)
        self._only = bool(settings.forward)
        self._known = dict.fromkeys(own, True)

    def passes(self, name: bytes) -> bool:
        """Whether a header of that name, in lower case, reaches engines."""
        known = self._known.get(name)
        if known is None:
            known = name in ALWAYS or (not self._drop.match(name) and (not self._only or self._forward.match(name)))
            if len(self._known) < MAX_KNOWN:
                self._known[name] = known
        return known


class _Patterns:
    def __init__(self, patterns: Iterable[str]) -> None:
        names = {pattern.lower().encode() for pattern in patterns}
        self._exact = {name for name in names if not name.endswith(b"*")}
        self._begins = tuple(name[:-1] for name in names if name.endswith(b"*"))

    def match(self, name: bytes) -> bool:
        return name in self._exact or name.startswith(self._begins)


def rules_of(settings: HeaderSettings, *, own: Collection[bytes] = ()) -> HeaderRules | None:
    """The rules; None where all headers pass. ``own``: headers that the router sets itself, and that pass."""
    return HeaderRules(settings, own) if settings.forward or settings.drop else None


def problems_of(settings: HeaderSettings) -> Iterator[str]:
    """What is wrong with the settings."""
    yield from _bad_names("--forward-header", settings.forward, _NEVER, "the router writes it itself, for each engine")
    yield from _bad_names("--drop-header", settings.drop, ALWAYS, "engines cannot read a request without it")
    for name in settings.request_id:
        if _PATTERN.fullmatch(name) is None or name.endswith("*"):
            yield f"--request-id-header {name!r} is not the name of a header: give one, such as x-correlation-id"


def _bad_names(flag: str, patterns: Sequence[str], barred: Collection[bytes], why: str) -> Iterator[str]:
    for pattern in patterns:
        if _PATTERN.fullmatch(pattern) is None:
            yield f"{flag} {pattern!r} is not the name of a header: give a name, or its beginning and a *"
        elif pattern.lower().encode() in barred:
            yield f"{flag} {pattern}: {why}"
