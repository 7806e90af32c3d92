"""Workers behind one port, on the cores there are: whether a second one brings anything."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.bench.report import median, spread
from kvrelay.bench.section import Section, ratio
from router_bench.contestants import OURS, Router
from router_bench.loading import running_engines
from router_bench.messages import client_body

if TYPE_CHECKING:
    from router_bench.loading import Bench, Load
    from router_bench.messages import Hop

COUNTS = (1, 2)
CONNECTIONS = 64


class Sample(Struct, frozen=True):
    """One turn. ``cpu_us``: of all workers, for a request."""

    load: Load
    cpu_us: float


def run_workers(bench: Bench, rounds: int, seconds: float) -> Section:
    """One worker and two, each free to use both cores, beside engines and load on the second; answers written whole."""
    section = Section(
        f"Workers, answers written whole, 2 KiB, {CONNECTIONS} connections",
        ["workers", "CPU us", "requests/s", "p50 ms", "p99 ms"],
    )
    samples: dict[int, list[Sample]] = {count: [] for count in COUNTS}
    with running_engines(bench, "burst") as engines, ExitStack() as running:
        routers: dict[int, tuple[Router, Hop]] = {}
        for count in COUNTS:
            router = Router(OURS, bench, engines, ["--workers", str(count)], place=None)
            running.callback(router.process.stop)
            routers[count] = router, router.hop(client_body(2048, bench.chunks), engines)
            router.process.pause()
        for number in range(rounds):
            for count in COUNTS if number % 2 == 0 else reversed(COUNTS):
                samples[count].append(_turn(bench, *routers[count], seconds))
    for count, taken in samples.items():
        loads = [sample.load for sample in taken]
        rates = [load.rate for load in loads]
        cpu_us = median([sample.cpu_us for sample in taken])
        p50_us, p99_us = median([load.p50_us for load in loads]), median([load.p99_us for load in loads])
        section.figures[str(count)] = {"cpu_us": cpu_us, "rate": median(rates), "p50_us": p50_us, "p99_us": p99_us}
        section.rows.append([
            str(count), f"{cpu_us:.0f}", f"{median(rates):,.0f} ±{spread(rates):.0%}",
            f"{p50_us / 1e3:.2f}", f"{p99_us / 1e3:.2f}",
        ])  # fmt: skip
    gain = ratio(median([s.load.rate for s in samples[2]]), median([s.load.rate for s in samples[1]]))
    section.figures["two / one"] = gain or 0.0
    section.notes.append(
        f"Two workers served {gain or 0.0:.2f} times what one did. One of the two cores also carries the engines and"
        " the load generator."
    )
    return section


def _turn(bench: Bench, router: Router, hop: Hop, seconds: float) -> Sample:
    process = router.process
    process.resume()
    bench.load(CONNECTIONS, [hop], requests=2 * CONNECTIONS)
    before = process.cpu_s()
    load = bench.load(CONNECTIONS, [hop], seconds=seconds)
    sample = Sample(load, (process.cpu_s() - before) * 1e6 / load.requests)
    process.pause()
    return sample
