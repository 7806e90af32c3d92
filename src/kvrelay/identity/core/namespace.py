"""The namespace: one name for everything that changes KV bytes or what they mean.

Its facts are a flat ``str -> str`` dictionary. The dictionary is kept and registered with the pool, so that two engines
whose namespaces differ can be told *which* fact differs (see `kvrelay.identity.core.compat`); the name itself is a
digest of its canonical encoding.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ENCODING = b"kvrelay.namespace.1\x00"
"""Domain and version of the canonical encoding."""


def canonical(facts: Mapping[str, str]) -> bytes:
    """Encode facts so that equal dictionaries, whatever their order, and only those, give equal bytes."""
    parts = [ENCODING, len(facts).to_bytes(4, "little")]
    for name in sorted(facts):
        for text in (name, facts[name]):
            raw = text.encode()
            parts += (len(raw).to_bytes(4, "little"), raw)
    return b"".join(parts)


def namespace(facts: Mapping[str, str]) -> str:
    """The name of these facts: 64 hexadecimal digits."""
    return sha256(canonical(facts)).hexdigest()
