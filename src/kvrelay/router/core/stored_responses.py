"""Which decode engine holds a stored response.

A response that an engine stores is known to that engine only. The router names responses itself, unless the client did,
and puts a mark of the engine into the name: any router in front of the same engines, restarted or not, reads from the
name who holds the response, and remembers nothing.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvrelay.router.core.answers import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.router.core.fleet import Engine

MARK_BYTES = 4
_NAME = re.compile(r"resp_[0-9a-f]{32}(?P<mark>[0-9a-f]{8})")


def name_response(unique: str, engine: Engine) -> str:
    """A new response's name on ``engine``. ``unique``: at least 32 random hexadecimal digits, the last ones count."""
    return f"resp_{unique[-32:]}{mark_of(engine)}"


def holder_of(name: str, engines: Sequence[Engine]) -> Engine | None:
    """Who holds the response of that name; None if the name does not tell."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return next((engine for engine in engines if mark_of(engine) == found["mark"]), None)


def mark_of(engine: Engine) -> str:
    """Eight hexadecimal digits, the same as long as the engine is reached at the same URL."""
    return blake2b(engine.address.url.encode(), digest_size=MARK_BYTES).hexdigest()


def unknown_whereabouts(name: str, silent: Sequence[Engine]) -> Refusal:
    """The refusal where nobody has the response and ``silent`` engines, which may have it, did not say."""
    who = ", ".join(engine.name for engine in silent)
    said = f"The stored response {name[:64]!r} may be held by {who}, out of reach now"
    return Refusal(503, "stored_response_away", said)
