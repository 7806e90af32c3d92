"""How much of the arena can hold live objects, under churn by the hour, and what an allocation costs.

Prints a table a scenario and a closing JSON line. ``refill``: fill, free half at random, refill with other sizes, until
the first does not fit; nothing is evicted. ``churn``: sizes that change by phase, objects evicted to make room, in the
pool's order or at random, one by one until it fits or by windows of neighbours. ``usable``: the same sizes through the
pool's own catalog, held against the goal. ``cost``: an allocation and a freeing.
The allocator is checked after every scenario.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict
from typing import TYPE_CHECKING

from allocator_bench.candidates import CANDIDATES
from allocator_bench.churn import Phase, Pool, Refill, churn, cost, refill
from allocator_bench.usable import usable_shares
from kvrelay.bench.report import closing_line, table
from kvrelay.bench.section import Goal
from kvrelay.pool.core.blocks import Blocks
from kvrelay.pool.core.catalog import new_catalog

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

REFILLS = [
    ("mixed", "mixed"),
    ("powers", "uniform"),
    ("uniform", "chunks"),
    ("1 MiB", "16 KiB"),
    ("16 KiB", "64 KiB"),
    ("64 KiB", "1 MiB"),
    ("mixed and small", "mixed and small"),
]
PHASES = ["mixed", "powers", "chunks", "uniform", "16 KiB", "1 MiB", "mixed and small", "mixed"]
RULES = [("blocks", True), *((name, False) for name in CANDIDATES)]  # and whether neighbours go, too
SIZES = [10_000, 100_000, 1_000_000]


def pool_of(rule: tuple[str, bool], arena: int, seed: int, *, ordered: bool) -> Pool:
    name, windows = rule
    return Pool(CANDIDATES[name](arena), random.Random(seed), ordered=ordered, windows=windows)


def named(rule: tuple[str, bool]) -> str:
    return rule[0] + (", windows" if rule[1] else "")


def refills(arena: int, seed: int) -> dict[str, Any]:
    found: dict[str, dict[str, Refill]] = {}
    for before, after in REFILLS:
        line = found[f"{before}, then {after}"] = {}
        for rule in RULES:
            pool = pool_of(rule, arena, seed, ordered=True)
            line[named(rule)] = refill(pool, arena, before, after)
            check(pool)
    print(
        "\nrefill: live share when the first did not fit, filling > after half was freed > after evicting; and lost\n"
    )
    rows = [
        [sizes, *(f"{r.full:.3f} > {r.again:.3f} > {r.settled:.3f}; {r.lost:.3f}" for r in line.values())]
        for sizes, line in found.items()
    ]
    print(table(["sizes", *map(named, RULES)], rows), flush=True)
    return {sizes: {name: rounded(asdict(r)) for name, r in line.items()} for sizes, line in found.items()}


def check(pool: Pool) -> None:
    if isinstance(pool.allocator, Blocks):
        pool.allocator.check_integrity()


def rounded(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: round(fact, 4) if isinstance(fact, float) else fact for name, fact in facts.items()}


def churns(arena: int, turnover: float, seed: int, *, ordered: bool) -> dict[str, Any]:
    found: dict[str, list[Phase]] = {}
    for rule in RULES:
        pool = pool_of(rule, arena, seed, ordered=ordered)
        found[named(rule)] = churn(pool, arena, PHASES, turnover)
        check(pool)
    how = "in the pool's order" if ordered else "at random"
    print(f"\nchurn, evicted {how}: live share of the arena, mean (least) of a phase\n")
    rows = [[name, *(f"{p.steady:.3f} ({p.least:.3f})" for p in line)] for name, line in found.items()]
    print(table(["allocator", *PHASES], rows))
    operations = sum(phase.operations for phase in next(iter(found.values())))
    print(
        f"\n{operations} objects stored; processor microseconds for each, eviction and the benchmark itself included:"
    )
    spent = {name: 1e6 * sum(p.seconds for p in line) / operations for name, line in found.items()}
    print(", ".join(f"{name} {each:.1f}" for name, each in spent.items()), flush=True)
    return {name: [rounded(asdict(phase)) for phase in line] for name, line in found.items()}


def usable(arena: int, turnover: float, seed: int) -> dict[str, Any]:
    shares = usable_shares(new_catalog(arena), PHASES, turnover, random.Random(seed))
    names = [f"live share, phase {number}, {mix}" for number, mix in enumerate(PHASES, 1)]
    goals = [Goal(name, 0.95, share) for name, share in zip(names, shares, strict=True)]
    print("\nusable: live share of the arena in the pool's own catalog, mean of a phase\n")
    print(table(["goal", "bound", "reached", ""], [goal.row() for goal in goals]), flush=True)
    return {goal.what: {"bound": goal.bound, "value": goal.value, "met": goal.met} for goal in goals}


def costs(most: int, pairs: int, seed: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, make in CANDIDATES.items():
        results[name] = {live: cost(make, live, pairs, seed) for live in SIZES if live <= most}
    print("\ncost: processor microseconds an allocation and a freeing, at so many live objects\n")
    rows = [[name, *(f"{1e6 * a:.2f} {1e6 * b:.2f}" for a, b in line.values())] for name, line in results.items()]
    print(table(["allocator", *(str(live) for live in SIZES if live <= most)], rows), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--section", choices=["", "refill", "churn", "usable", "cost"], default="", help="default: all")
    parser.add_argument("--arena-mib", type=int, default=2_048)
    parser.add_argument("--turnover", type=float, default=4.0, help="arenas full of objects that a phase stores")
    parser.add_argument("--objects", type=int, default=SIZES[-1], help="most live objects of the cost section")
    parser.add_argument("--pairs", type=int, default=50_000, help="timed allocations and freeings")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    arena = args.arena_mib << 20
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "refill": lambda: refills(arena, args.seed),
        "churn in order": lambda: churns(arena, args.turnover, args.seed, ordered=True),
        "churn at random": lambda: churns(arena, args.turnover, args.seed, ordered=False),
        "usable": lambda: usable(arena, args.turnover, args.seed),
        "cost": lambda: costs(args.objects, args.pairs, args.seed),
    }
    results = {name: run() for name, run in sections.items() if name.startswith(args.section)}
    print(closing_line("allocator", results, arena_bytes=arena, turnover=args.turnover, seed=args.seed))


if __name__ == "__main__":
    main()
