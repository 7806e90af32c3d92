"""What of a hand-over is still to be waited for when D is asked while P computes.

D's first token comes after the last layer of the prompt's last chunk is sealed. What lies between is D's own: taking
that layer, one step, the answer's way out. It is held against a hit in D's own cache, whole, and one step.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from handoff_bench.asking import prompt_of
from handoff_bench.cases import BASE, Case, Table, beyond, cell
from handoff_bench.desk import WITHIN_S
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


class OverlappedCase(Case):
    """Rounds of: a prompt of which D is asked while P computes it; the same again, now in D's cache."""

    def __init__(self, legs: Legs, length: int) -> None:
        super().__init__(legs, length)
        self.exposed: list[float] = []
        self.local: list[float] = []
        self.step = 0.0

    def begin(self, what: str) -> None:
        """Time a step of D, and have somebody watch the pool."""
        super().begin(what)
        self._witness = Witness(self.legs.pool)
        self._meanwhile.callback(self._witness.close)
        prompt = prompt_of(33, "step")
        self.legs.decode.complete(prompt)
        first, _ = self.legs.decode.stream(prompt)
        began = time.perf_counter()
        self.legs.decode.stream(prompt, tokens=STEPS + 1)
        self.step = (time.perf_counter() - began - first) / STEPS

    def measure(self, round_: int, *, counts: bool) -> None:
        """One of each."""
        prompt = prompt_of(self.length, "overlapped", round_)
        before = self.legs.decode.external_tokens()
        exposed = _hand_over(self.legs, self._witness, prompt)
        self.legs.prove_taken(before, self.legs.handed_over(self.length))
        with self.legs.other_prefilled(prompt, "overlapped", round_):
            local = self.legs.decode.stream(prompt)[0]
        if counts:
            self.exposed.append(exposed)
            self.local.append(local)


class OverlappedTable(Table[OverlappedCase]):
    """Collects contestants' times, of those that can be asked early."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            settings,
            "D asked while P computes, ms",
            [
                "contestant",
                "prompt",
                "first token after the last layer",
                "local hit",
                "difference (95 %)",
                "a step of D",
                f"after the last layer beyond {BASE}'s (95 %)",
                "rounds",
            ],
        )

    def case(self, legs: Legs, length: int, decodes: int) -> OverlappedCase | None:  # noqa: ARG002
        """Those that hand over through our pool."""
        return OverlappedCase(legs, length) if legs.pool else None

    def note(self, cases: Sequence[OverlappedCase]) -> None:
        """Add everyone's row, and hold ours against the goal."""
        base = next((case.exposed for case in cases if case.name == BASE), [])
        for case in cases:
            over = beyond(case.exposed, case.local)
            assert over is not None
            versus = None if case.name == BASE else beyond(case.exposed, base)
            step, rounds = 1e3 * case.step, len(case.exposed)
            cells = [f"{1e3 * median(values):.1f} ±{spread(values):.0%}" for values in (case.exposed, case.local)]
            self.section.rows.append(
                [case.name, str(case.length), *cells, cell(over), f"{step:.1f}", cell(versus), str(rounds)]
            )
            self.section.figures[f"{case.name} {case.length}"] = {
                "exposed_ms": 1e3 * median(case.exposed),
                "local_ms": 1e3 * median(case.local),
                "difference_ms": list(over),
                "step_ms": step,
                "rounds": rounds,
                **({"exposed_beyond_ms": list(versus)} if versus else {}),
            }
            if case.name == BASE:
                what = f"overlapped, {case.length} tokens: beyond a local hit and a step, ms"
                self.section.goals.append(Goal(what, 3.0, over[0] - step, at_least=False, rounds=rounds))


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
