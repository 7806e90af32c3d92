"""What a KV-aware choice costs: one engine for a prompt, by what 64 engines hold.

Each case fills an index with events, checks choices against a walk through every engine's blocks, and then times, for
prompts that are new to the process: packing token ids, finding how far each engine's blocks reach, choosing. Prints a
table and a closing JSON line. The goal is for the worst case's median: at most 200 µs with 64 engines and 8,192 tokens.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.bench.report import closing_line, percentile, table
from kvrelay.router.core.fleet import Role
from kvrelay.router.core.kv.events import BlockStored
from kvrelay.router.core.kv.index import KvIndex, Source
from kvrelay.router.core.policy.base import EngineView, RequestView
from kvrelay.router.core.policy.kv_aware import KvAware, KvOptions

if TYPE_CHECKING:
    from collections.abc import Callable

GOAL_US = 200.0
VOCABULARY = 128_000


class Case(Struct, frozen=True):
    """How much of a prompt each engine holds, as parts of it."""

    name: str
    held: Callable[[int, int, random.Random], float]
    """Of engine number i of n."""


CASES = (
    Case("new to all", lambda _i, _n, _rng: 0.0),
    Case("a system prompt everywhere", lambda _i, _n, _rng: 0.125),
    Case("a conversation on one engine", lambda i, _n, _rng: 1.0 if i == 0 else 0.125),
    Case("all of it everywhere", lambda _i, _n, _rng: 1.0),
    Case("another length on each engine", lambda i, n, _rng: (i + 1) / n),
    Case("random lengths", lambda _i, _n, rng: rng.random()),
)


class Prompts:
    """Prompts, who holds what of them, and the policy that is to find out."""

    def __init__(self, case: Case, args: argparse.Namespace) -> None:
        rng = random.Random(args.seed)
        size = args.block_tokens
        self.index = KvIndex(seed=rng.getrandbits(64))
        self.policy = KvAware(KvOptions(), Role.PREFILL, self.index)
        self.engines = [EngineView(f"P{number}", Role.PREFILL, number) for number in range(args.engines)]
        self.prompts = [[rng.randrange(VOCABULARY) for _ in range(args.tokens)] for _ in range(args.prompts)]
        self.held: list[dict[str, int]] = []
        for engine in self.engines:
            self.index.join(Source(engine.name))
            self._store(Source(engine.name), [rng.randrange(VOCABULARY) for _ in range(64 * size)], size)
        for prompt in self.prompts:
            blocks = {
                engine.name: round(case.held(engine.order, args.engines, rng) * (args.tokens // size))
                for engine in self.engines
            }
            for name, count in blocks.items():
                self._store(Source(name), prompt[: count * size], size)
            reached = {name: min(count, (args.tokens - 1) // size) * size for name, count in blocks.items()}
            self.held.append({name: tokens for name, tokens in reached.items() if tokens})

    def _store(self, source: Source, tokens: list[int], size: int) -> None:
        if tokens:
            names = [hash(tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]
            self.index.apply(source, [BlockStored(list(names), None, tokens, size, medium="GPU", group_idx=0)])

    def verify(self) -> None:
        """Every engine's reach, and that the choice has the longest: all engines are idle."""
        rng = random.Random(0)
        for prompt, held in zip(self.prompts, self.held, strict=True):
            if self.index.cached(prompt) != held:
                raise AssertionError("the index does not agree with what was stored")
            choice = self.policy.choose(RequestView(tokens=prompt), self.engines, 0.0, rng)
            if held.get(choice.engine, 0) != max(held.values(), default=0):
                raise AssertionError(f"{choice.engine} was chosen, which does not hold the most")

    def time(self, rounds: int, *, packed: bool) -> list[float]:
        """Microseconds for each choice. ``packed``: token ids come as an array, as from the router's own cache."""
        rng = random.Random(0)
        given = [array("I", prompt) if packed else prompt for prompt in self.prompts]
        clock, choose, engines = time.perf_counter, self.policy.choose, self.engines
        taken = []
        for _ in range(rounds):
            for tokens in given:
                request = RequestView(tokens=tokens)
                began = clock()
                choose(request, engines, 0.0, rng)
                taken.append((clock() - began) * 1e6)
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8_192, help="in a prompt (default %(default)s)")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=8, help="different ones (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few prompts and rounds: to see that it works")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.rounds = 2, 5
    results, rows = {}, []
    for case in CASES:
        prompts = Prompts(case, args)
        prompts.verify()
        plain = prompts.time(args.rounds, packed=False)
        packed = prompts.time(args.rounds, packed=True)
        results[case.name] = {
            "median us": round(percentile(plain, 50), 1),
            "p99 us": round(percentile(plain, 99), 1),
            "packed median us": round(percentile(packed, 50), 1),
            "nodes": prompts.index.num_nodes,
        }
        rows.append([case.name, *(str(value) for value in results[case.name].values())])
    print(f"{args.engines} engines, prompts of {args.tokens} tokens, blocks of {args.block_tokens}\n")
    header = ["what engines hold", "median, µs", "p99, µs", "packed ids: median, µs", "nodes"]
    print(table(header, rows))
    worst = max(result["median us"] for result in results.values())
    print(f"\nworst median: {worst:.1f} µs, goal {GOAL_US:g} µs")
    settings = {
        name: getattr(args, name) for name in ("engines", "tokens", "block_tokens", "prompts", "rounds", "seed")
    }
    goals = {"worst median us": {"value": worst, "goal": GOAL_US}}
    print(closing_line("kv-choice", {"cases": results, "goals": goals}, **settings))


if __name__ == "__main__":
    main()
