"""Eviction policies on a real trace and a synthetic one: what a pool of 1 % to 100 % of all chunks finds.

Prints one table a trace and use, and a closing JSON line; ``--plot`` draws the curves (needs the extra ``dev``). No
policy may find more objects than the best choice in hindsight: that is checked in every cell.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from eviction_bench.policies.adaptive import Adaptive
from eviction_bench.policies.arc import Arc
from eviction_bench.policies.lru import Fifo, Lru
from eviction_bench.policies.s3fifo import S3Fifo
from eviction_bench.policies.sieve import Sieve
from eviction_bench.policies.tinylfu import TinyLfu
from eviction_bench.replay import Hits, hindsight, replay
from eviction_bench.traces import conversation, footprint, scans
from kvrelay.bench.report import closing_line, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eviction_bench.policies import Policy
    from eviction_bench.traces import Requests

TRACE = Path(__file__).parents[2] / "shared/data/conversation_trace.jsonl"
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
POLICIES: dict[str, tuple[Callable[[], Policy], bool]] = {  # how to make it, and whether tails go first
    "FIFO": (Fifo, True),
    "LRU, heads first": (Lru, False),
    "LRU": (Lru, True),
    "SIEVE, heads first": (Sieve, False),
    "SIEVE": (Sieve, True),
    "SIEVE, two hits": (lambda: Sieve(most=2, spared=1), True),
    "S3-FIFO": (S3Fifo, True),
    "S3-FIFO, small half": (lambda: S3Fifo(small=0.5), True),
    "ARC": (Arc, True),
    "W-TinyLFU": (TinyLfu, True),
    "the pool, heads first": (Adaptive, False),
    "the pool": (Adaptive, True),
}
BEST = "in hindsight"
DRAWN = {"LRU": "C0", "SIEVE": "C1", "S3-FIFO": "C2", "ARC": "C4", "W-TinyLFU": "C5", "the pool": "C3", BEST: "0.6"}

Curves = dict[str, list[Hits]]  # a policy's, one point a share


def curves(requests: Requests, capacities: Sequence[int], *, hand_over: bool) -> Curves:
    """Every policy at every size; and hindsight, which a hand-over does not concern."""
    best = [hindsight(requests, capacity) for capacity in capacities]
    found = {
        name: [replay(requests, make(), size, tails_first=tails, hand_over=hand_over) for size in capacities]
        for name, (make, tails) in POLICIES.items()
    }
    for name, curve in found.items():
        for hits, bound, size in zip(curve, best, capacities, strict=True):
            if hits.objects > bound.objects + 1e-9:
                raise AssertionError(f"{name} finds {hits.objects} at {size} chunks, hindsight {bound.objects}")
    return {**found, BEST: best}


def draw(path: Path, panels: dict[str, Curves], shares: Sequence[float]) -> None:
    """One panel a trace and use: usable hits over the size of the pool."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True)
    for axes, (title, found) in zip(grid.flat, panels.items(), strict=True):
        for name, colour in DRAWN.items():
            width = 2.5 if name == "the pool" else 1.3
            points = [100 * hits.usable for hits in found[name]]
            axes.plot([100 * share for share in shares], points, color=colour, linewidth=width, marker=".", label=name)
        axes.set(
            title=title, xscale="log", xlabel="pool size, % of all chunks", ylabel="usable hits, % of chunks asked"
        )
        axes.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
        axes.grid(alpha=0.3)
    grid[0][0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", default=TRACE, help=f"conversation trace (default {TRACE})")
    parser.add_argument("--requests", type=int, help="of each trace, the first (default: all; 6000 synthetic ones)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="where to draw the curves, as PNG")
    args = parser.parse_args()

    traces = {
        "conversations": conversation(args.trace)[: args.requests],
        "scans": scans(args.requests or 6_000, args.seed),
    }
    panels: dict[str, Curves] = {}
    for name, requests in traces.items():
        chunks = footprint(requests)
        asked = sum(map(len, requests))
        print(f"\n{name}: {len(requests)} requests ask for {asked} chunks, {chunks} different ones")
        capacities = [max(1, round(share * chunks)) for share in SHARES]
        for hand_over in (False, True):
            use = "each chunk read once after writing" if hand_over else "prefix reuse only"
            found = panels[f"{name}: {use}"] = curves(requests, capacities, hand_over=hand_over)
            rows = [[policy, *(f"{h.usable:.3f} ({h.objects:.3f})" for h in line)] for policy, line in found.items()]
            print(f"\n{name}, {use}: usable hits (hits), by size of the pool\n")
            print(table(["policy", *(f"{share:.0%}" for share in SHARES)], rows), flush=True)
    if args.plot:
        draw(args.plot, panels, SHARES)
    results = {
        panel: {policy: {"usable": [round(h.usable, 4) for h in line], "objects": [round(h.objects, 4) for h in line]}
                for policy, line in found.items()}
        for panel, found in panels.items()
    }  # fmt: skip
    print(closing_line("eviction", results, shares=SHARES, seed=args.seed, requests=args.requests))


if __name__ == "__main__":
    main()
