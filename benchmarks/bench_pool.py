"""The pool beside its peers and beside what the machine can do at all.

Sections, each on its own with ``--section``:

tcp     put and get of batches over TCP on loopback: Mooncake Store, Redis, NIXL, a raw socket stream
shm     the same through shared memory: a plain scattered copy, NIXL
lookup  how long a prefix of 512 keys is there: p50 and p99, idle and beside transfers; Mooncake's ``batch_is_exist``
scale   many small objects: memory of the server for each, and lookups beside a pool that holds few
crowd   64 clients at once: their total beside the best a single one reaches, and the slowest of them

Within a section contestants take turns, so that a slower minute of the machine meets all of them; in each turn a round
is timed, after one that is not; bytes are verified before anything is timed; peers are stopped (SIGSTOP) while it is
not their turn. The last line is JSON.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvrelay.bench.report import closing_line
from pool_bench.crowd import CrowdSettings, run_crowd
from pool_bench.lookup import LookupSettings, run_lookup
from pool_bench.scale import ScaleSettings, run_scale
from pool_bench.transfer import KIB, TransferSettings, run_shm, run_tcp

if TYPE_CHECKING:
    from kvrelay.bench.section import Section

SECTIONS = ("tcp", "shm", "lookup", "scale", "crowd")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one; may be repeated")
    parser.add_argument("--no-peers", action="store_true", help="only kvrelay and the floors")
    parser.add_argument("--sizes", default="16,64,256,1024", help="tcp, shm: object sizes in KiB (default %(default)s)")
    parser.add_argument("--batch-mib", type=int, default=64, help="tcp, shm: bytes of a batch in MiB (%(default)s)")
    parser.add_argument("--repeats", type=int, default=11, help="tcp, shm: timed repeats (default %(default)s)")
    parser.add_argument(
        "--lookups", type=int, default=2000, help="lookup: timed lookups, and milliseconds, at least (%(default)s)"
    )
    parser.add_argument("--objects", type=int, default=10_000_000, help="scale: objects (default %(default)s)")
    parser.add_argument("--clients", type=int, default=64, help="crowd: clients (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="crowd: length of a measurement (%(default)s)")
    return parser.parse_args()


def run(name: str, args: argparse.Namespace) -> Section:
    peers = not args.no_peers
    sizes = [int(size) * KIB for size in args.sizes.split(",")]
    transfer = TransferSettings(sizes, args.batch_mib << 20, args.repeats, peers)
    match name:
        case "tcp":
            return run_tcp(transfer)
        case "shm":
            return run_shm(transfer)
        case "lookup":
            return run_lookup(LookupSettings(args.lookups, peers))
        case "scale":
            return run_scale(ScaleSettings(args.objects))
        case _:
            return run_crowd(CrowdSettings(args.clients, args.seconds))


def main() -> None:
    args = parse()
    results: dict[str, object] = {}
    versions: dict[str, str] = {}
    for name in args.section or SECTIONS:
        section = run(name, args)
        print(section.text(), flush=True)
        results[name] = section.data()
        versions |= section.versions
    settings = {name: value for name, value in vars(args).items() if name != "section"}
    print(closing_line("pool", results, peers=versions, **settings))


if __name__ == "__main__":
    main()
