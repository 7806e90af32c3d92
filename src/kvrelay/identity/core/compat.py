"""Which engines can exchange KV, told by what they registered with the pool.

Engines never meet: each registers its namespace, and the facts that made it. Engines of different namespaces share no
key, so the decode side silently recomputes everything.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kvrelay.wire.messages import Engine

ABSENT = "not stated"
LONGEST_VALUE = 40
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"
_RANK = re.compile(r"-dp\d+$")


def differing_facts(one: Engine, other: Engine) -> list[str]:
    """Names of the facts that are not the same on both, sorted."""
    return sorted(name for name in one.facts.keys() | other.facts.keys() if _of(one, name) != _of(other, name))


def difference(one: Engine, other: Engine) -> str:
    """A sentence, without its full stop, that names every differing fact of two engines and both its values."""
    told = [
        f"{name.replace('_', ' ')} is {_short(_of(one, name))} on {one.engine}"
        f" and {_short(_of(other, name))} on {other.engine}"
        for name in differing_facts(one, other)
    ] or [f"their namespaces are {_short(one.namespace)} and {_short(other.namespace)}, and no stated fact differs"]
    return f"{one.engine} and {other.engine} cannot exchange KV: {'; '.join(told)}"


def known_as(engines: Iterable[Engine], names: Collection[str]) -> list[Engine]:
    """Those of ``engines`` called by one of ``names``; data-parallel ranks bear their engine's."""
    return [engine for engine in engines if _RANK.sub("", engine.engine) in names]


def strangers(engines: Sequence[Engine]) -> list[tuple[Engine, Engine]]:
    """Engines that nobody can exchange KV with, each with the first of those it was meant for.

    Prefill engines are meant for decode engines and the other way round. One that both writes and reads counts as a
    prefill engine where others only read, as a decode engine where others only write, else as both. While there is
    nobody on the other side, nobody is a stranger.
    """
    roles = {engine.role for engine in engines}
    decodes = [e for e in engines if e.role == CONSUMER or (e.role != PRODUCER and CONSUMER not in roles)]
    prefills = [e for e in engines if e.role == PRODUCER or (e.role != CONSUMER and PRODUCER not in roles)]
    found: dict[int, tuple[Engine, Engine]] = {}
    for side, others in ((prefills, decodes), (decodes, prefills)):
        for engine in side:
            meant = [other for other in others if other is not engine]
            if meant and all(other.namespace != engine.namespace for other in meant):
                found.setdefault(id(engine), (engine, meant[0]))
    return list(found.values())


def _of(engine: Engine, fact: str) -> str:
    facts: Mapping[str, str] = engine.facts
    return facts.get(fact, ABSENT)


def _short(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else value[:12] + "…"
