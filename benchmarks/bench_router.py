"""The router beside vllm-router, in front of the same mock engines, alone on one core.

    python benchmarks/bench_router.py [--quick] [--section NAME ...] [--no-peers]

Sections, each on its own with ``--section``:

spread   requests of 32 chunks, each event sent by itself: processor time, requests a second, added latency; by prompt
         size (2, 32, 512 KiB) and number of connections (1, 64)
burst    the same with answers written whole, 2 KiB prompts only
workers  the same by one process and by two, on both cores
streams  10,000 streams open at once: memory
flat     memory over a million requests

The router has the first core to itself; the mock engines and the load generator, both in C, share the second. Routers
take turns, so that a slower minute of the machine meets both, and are stopped (SIGSTOP) while it is not their turn.
Before anything is timed each router must have sent both legs and answered with the engine's own bytes; while it is
timed every byte of every answer is compared. The last line is JSON.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.bench.report import closing_line
from router_bench.crowd import run_flat, run_streams
from router_bench.loading import Bench
from router_bench.processes import build, cores
from router_bench.several import run_workers
from router_bench.steady import Settings, run_steady

if TYPE_CHECKING:
    from kvrelay.bench.section import Section

SECTIONS = ("spread", "burst", "workers", "streams", "flat")
QUICK = {"sizes": "2", "rounds": 2, "seconds": 1.0, "streams": 500, "hold": 6.0, "requests": 20_000}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one; may be repeated")
    parser.add_argument("--no-peers", action="store_true", help="only kvrelay and the engines alone")
    parser.add_argument("--sizes", default="2,32,512", help="spread: sizes of prompts in KiB (default %(default)s)")
    parser.add_argument("--connections", default="1,64", help="spread, burst: at once (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="spread, burst, workers: turns of each (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="spread, burst, workers: length of a turn (%(default)s)"
    )
    parser.add_argument("--chunks", type=int, default=32, help="events of an answer (default %(default)s)")
    parser.add_argument("--streams", type=int, default=10_000, help="streams: at once (default %(default)s)")
    parser.add_argument("--hold", type=float, default=24.0, metavar="S", help="streams: length of one (%(default)g)")
    parser.add_argument("--requests", type=int, default=1_000_000, help="flat: in all (default %(default)s)")
    parser.add_argument(
        "--priority", type=int, default=0, metavar="NICE", help="of all that is started; below 0 as root"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a look: 2 KiB, 2 turns of 1 s, 500 streams, 20,000 requests"
    )
    args = parser.parse_args()
    if args.quick:
        for name, value in QUICK.items():
            if getattr(args, name) == parser.get_default(name):
                setattr(args, name, value)
    return args


def run(name: str, bench: Bench, args: argparse.Namespace) -> Section:
    sizes = tuple(int(size) for size in args.sizes.split(","))
    connections = tuple(int(count) for count in args.connections.split(","))
    match name:
        case "workers":
            return run_workers(bench, args.rounds, args.seconds)
        case "streams":
            return run_streams(bench, args.streams, args.hold)
        case "flat":
            return run_flat(bench, args.requests, max(connections))
        case _:
            chosen = sizes if name == "spread" else sizes[:1]
            settings = Settings(name, chosen, connections, args.rounds, args.seconds, not args.no_peers)
            return run_steady(bench, settings)


def main() -> None:
    args = parse()
    cores()
    results: dict[str, object] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="kvr") as root:
        directory = Path(root)
        bench = Bench(directory, build(directory), args.priority, args.chunks)
        for name in args.section or SECTIONS:
            section = run(name, bench, args)
            print(section.text(), flush=True)
            results[name] = section.data()
            versions |= section.versions
    settings = {name: value for name, value in vars(args).items() if name != "section"}
    print(closing_line("router", results, peers=versions, **settings))


if __name__ == "__main__":
    main()
