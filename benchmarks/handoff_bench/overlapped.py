"""What of a hand-over is still to be waited for when D is asked while P computes.

D's first token comes after the last layer of the prompt's last chunk is sealed. What lies between is D's own: taking
that layer, one step, the answer's way out. It is held against a hit in D's own cache, whole, and one step.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from handoff_bench.asking import prompt_of
from handoff_bench.desk import WITHIN_S
from handoff_bench.legs import Table
from kvrelay.bench.report import median, spread
from kvrelay.bench.section import Goal
from kvrelay.client.blocking import PoolClient
from kvrelay.errors import DeadlineError
from kvrelay.identity.core.chunks import ChunkChain, chain_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from handoff_bench.legs import Legs, Settings

CHUNK_TOKENS = 64
"""The connector's default."""
LOOK_S = 0.005
STEPS = 64
"""Tokens one of D's steps is the mean of."""


class Witness:
    """Sees when the last layer of a prompt's last chunk is sealed, over a connection of its own."""

    def __init__(self, pool: str) -> None:
        self._client = PoolClient.connect(pool, name="witness", map_arena=False)
        self._seed = chain_seed(self._client.engines()[0].namespace)

    def sealed_at(self, prompt: Sequence[int]) -> float:
        """Wait for it; when it was, by `time.perf_counter`. Raises `DeadlineError`."""
        chain = ChunkChain(self._seed, CHUNK_TOKENS)
        chain.extend(prompt)
        last = [list(chain.all())[-1].key]
        until = time.monotonic() + WITHIN_S
        while not len(prefix := self._client.match_prefix(last, lease_s=WITHIN_S)):
            if time.monotonic() > until:
                raise DeadlineError(f"nothing of the prompt's last chunk in the pool within {WITHIN_S:g} s")
            time.sleep(LOOK_S)
        self._client.wait(prefix, prefix.layers, timeout_s=WITHIN_S)
        at = time.perf_counter()
        self._client.release(prefix)
        return at

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


class OverlappedTable(Table):
    """Collects contestants' times, of those that can be asked early."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            settings,
            "D asked while P computes, ms",
            ["contestant", "prompt", "first token after the last layer", "local hit", "difference", "a step of D"],
        )

    def add(self, legs: Legs, length: int) -> None:
        """Measure one contestant at one length."""
        if not legs.pool:
            return
        name = legs.contestant.name
        step = self._step(legs)
        exposed, local = self._measure(legs, length)
        over = 1e3 * median([one - other for one, other in zip(exposed, local, strict=True)])
        cells = [f"{1e3 * median(values):.1f} ±{spread(values):.0%}" for values in (exposed, local)]
        self.section.rows.append([name, str(length), *cells, f"{over:.1f}", f"{1e3 * step:.1f}"])
        self.section.figures[f"{name} {length}"] = {
            "exposed_ms": 1e3 * median(exposed),
            "local_ms": 1e3 * median(local),
            "step_ms": 1e3 * step,
        }
        if name == "kvrelay":
            what = f"overlapped, {length} tokens: beyond a local hit and a step, ms"
            self.section.goals.append(Goal(what, 3.0, over - 1e3 * step, at_least=False, rounds=len(exposed)))

    def _step(self, legs: Legs) -> float:
        prompt = prompt_of(33, "step")
        legs.decode.complete(prompt)
        first, _ = legs.decode.stream(prompt)
        began = time.perf_counter()
        legs.decode.stream(prompt, tokens=STEPS + 1)
        return (time.perf_counter() - began - first) / STEPS

    def _measure(self, legs: Legs, length: int) -> tuple[list[float], list[float]]:
        exposed: list[float] = []
        local: list[float] = []
        witness = Witness(legs.pool)
        try:
            for round_, counts in self.settings.rounds():
                prompt = prompt_of(length, "overlapped", legs.contestant.name, length, round_)
                before = legs.decode.external_tokens()
                one = _hand_over(legs, witness, prompt)
                legs.prove_taken(before, legs.handed_over(length))
                with legs.other_prefilled(prompt, "overlapped", round_):
                    other = legs.decode.stream(prompt)[0]
                if counts:
                    exposed.append(one)
                    local.append(other)
        finally:
            witness.close()
        return exposed, local


def _hand_over(legs: Legs, witness: Witness, prompt: list[int]) -> float:
    """Both legs at once. Seconds from the sealing of the last layer to D's first token."""
    sealed: list[float] = []
    with legs.desk.handover() as handover:

        def prefill_leg() -> None:
            legs.prefill.complete(prompt, handover.prefill_params())
            handover.seal()

        threads = [
            threading.Thread(target=prefill_leg, daemon=True),
            threading.Thread(target=lambda: sealed.append(witness.sealed_at(prompt)), daemon=True),
        ]
        for thread in threads:
            thread.start()
        began = time.perf_counter()
        seconds, _ = legs.decode.stream(prompt, handover.decode_params(overlapped=True))
        for thread in threads:
            thread.join(WITHIN_S)
        handover.prove(len(prompt) - 1)
    if not sealed:
        raise DeadlineError("the witness has not seen the prompt's last chunk")
    return began + seconds - sealed[0]
