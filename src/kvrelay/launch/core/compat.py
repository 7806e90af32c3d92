"""Whether the engines that registered with the pool can exchange KV.

Engines never meet: each registers its namespace, and the facts that made it, with the pool. Engines of different
namespaces share no key, so the decode side would silently recompute everything. That is found here, before the first
request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.identity.core.compat import difference, differing_facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.wire.messages import Engine


def check(expected: Sequence[str], engines: Sequence[Engine]) -> None:
    """Raise `ConfigError` unless every engine of ``expected`` registered, all under one namespace.

    Engines not expected (of another launcher on the same pool) do not matter. The first expected engine is the one the
    others are compared with.
    """
    found = {engine.engine: engine for engine in engines}
    problems = [
        f"{name} runs but did not register with the pool: its connector could not reach the pool or was not loaded; "
        f"see its log for lines of kvrelay"
        for name in expected
        if name not in found
    ]
    present = [found[name] for name in expected if name in found]
    problems += [_difference(present[0], other) for other in present[1:] if other.namespace != present[0].namespace]
    if problems:
        raise ConfigError(*problems)


def _difference(one: Engine, other: Engine) -> str:
    return f"{difference(one, other)}. {_mend(differing_facts(one, other))}"


def _mend(facts: Sequence[str]) -> str:
    if any("weight" in name for name in facts):
        return "Start both on the same model files"
    return "Give both the same settings, in [engine] of the file or by flags without --prefill- and --decode-"
