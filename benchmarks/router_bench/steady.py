"""Requests as fast as they go: processor time for each, requests a second of one core, added latency."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.bench.report import median, spread
from kvrelay.bench.section import Goal, Section, ratio
from router_bench.contestants import OURS, PEER, Absent, Router, version_of_peer
from router_bench.loading import running_engines
from router_bench.messages import Hop, ask, client_body

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router_bench.loading import Bench, Engines, Load

DIRECT = "engines alone"
KIB = 1 << 10


class Settings(Struct, frozen=True):
    """``sizes``: of prompts, in KiB."""

    mode: str
    sizes: tuple[int, ...]
    connections: tuple[int, ...]
    rounds: int
    seconds: float
    peers: bool


class Sample(Struct, frozen=True):
    """One turn of one contestant. ``cpu_us``: of the router, for a request."""

    load: Load
    cpu_us: float


def run_steady(bench: Bench, settings: Settings) -> Section:
    """Measure every size of prompt at every number of connections."""
    title = {"spread": "each event by itself", "burst": "answers written whole"}[settings.mode]
    header = ["prompt", "connections", "router", "CPU us", "requests/s", "p50 ms", "p99 ms", "+p50 ms", "+p99 ms"]
    section = Section(f"Requests of {bench.chunks} chunks, {title}", header)
    with running_engines(bench, settings.mode) as engines, ExitStack() as running:
        routers = [_start(OURS, bench, engines, running)]
        if settings.peers:
            try:
                routers.append(_start(PEER, bench, engines, running))
                section.versions[PEER] = version_of_peer()
            except Absent as absent:
                section.absent[PEER] = str(absent)
        for size in settings.sizes:
            hops = _verified(bench, engines, routers, size)
            for connections in settings.connections:
                samples = _measure(bench, settings, routers, hops, connections)
                _report(section, size, connections, samples)
    section.notes.append(
        "+p50 and +p99: over the two legs sent to the engines one after the other, without a router, by the same load"
        " generator. CPU: the router's processor time for a request."
    )
    return section


def _start(name: str, bench: Bench, engines: Engines, running: ExitStack) -> Router:
    router = Router(name, bench, engines)
    running.callback(router.process.stop)
    return router


def _verified(bench: Bench, engines: Engines, routers: Sequence[Router], size_kib: int) -> dict[str, list[Hop]]:
    body = client_body(size_kib * KIB, bench.chunks)
    leg = client_body(size_kib * KIB, 1, streamed=False)
    hops = {}
    for router in routers:
        router.process.resume()
        hops[router.name] = [router.hop(body, engines)]
        router.process.pause()
    prefill, decode = engines.prefill_port, engines.decode_port
    hops[DIRECT] = [
        Hop.make(bench.directory, f"prefill-{size_kib}", prefill, leg, ask(prefill, leg)),
        Hop.make(bench.directory, f"decode-{size_kib}", decode, body, ask(decode, body)),
    ]
    return hops


def _measure(
    bench: Bench, settings: Settings, routers: Sequence[Router], hops: Mapping[str, Sequence[Hop]], connections: int
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in (DIRECT, *(router.name for router in routers))}
    for number in range(settings.rounds):
        samples[DIRECT].append(Sample(bench.load(connections, hops[DIRECT], seconds=settings.seconds / 2), 0.0))
        for router in routers if number % 2 == 0 else list(reversed(routers)):
            process = router.process
            process.resume()
            bench.load(connections, hops[router.name], requests=2 * connections)  # connections are made, caches warm
            before = process.cpu_s()
            load = bench.load(connections, hops[router.name], seconds=settings.seconds)
            samples[router.name].append(Sample(load, (process.cpu_s() - before) * 1e6 / load.requests))
            process.pause()
    return samples


def _report(section: Section, size: int, connections: int, samples: Mapping[str, Sequence[Sample]]) -> None:
    figures: dict[str, dict[str, float]] = {}
    floor = samples[DIRECT]
    for name, taken in samples.items():
        loads = [sample.load for sample in taken]
        figures[name] = figure = {
            "cpu_us": median([sample.cpu_us for sample in taken]),
            "rate": median([load.rate for load in loads]),
            "p50_us": median([load.p50_us for load in loads]),
            "p99_us": median([load.p99_us for load in loads]),
            "added_p50_us": median(
                [load.p50_us - direct.load.p50_us for load, direct in zip(loads, floor, strict=True)]
            ),
            "added_p99_us": median(
                [load.p99_us - direct.load.p99_us for load, direct in zip(loads, floor, strict=True)]
            ),
            "spread": spread([load.rate for load in loads]),
        }
        router = name != DIRECT
        section.rows.append([
            f"{size} KiB", str(connections), name,
            f"{figure['cpu_us']:.0f}" if router else "",
            f"{figure['rate']:,.0f} ±{figure['spread']:.0%}",
            *(f"{figure[key] / 1e3:.2f}" for key in ("p50_us", "p99_us")),
            *(f"{figure[key] / 1e3:.2f}" if router else "" for key in ("added_p50_us", "added_p99_us")),
        ])  # fmt: skip
    section.figures[f"{size}KiB x{connections}"] = figures
    if PEER in samples:
        section.goals += _goals(f"{size} KiB, {connections}", figures, busy=connections > 1)


def _goals(where: str, figures: Mapping[str, Mapping[str, float]], *, busy: bool) -> list[Goal]:
    """``busy``: whether the router's core is; one connection waits for its own answers most of the time."""

    def compared(key: str) -> float | None:
        return ratio(figures[OURS][key], figures[PEER][key])

    rate = [Goal(f"{where}: requests/s / {PEER}", 2.0, compared("rate"))] if busy else []
    return [
        Goal(f"{where}: CPU / {PEER}", 0.5, compared("cpu_us"), at_least=False),
        *rate,
        Goal(f"{where}: added p50 / {PEER}", 0.7, compared("added_p50_us"), at_least=False),
        Goal(f"{where}: added p99 / {PEER}", 0.7, compared("added_p99_us"), at_least=False),
    ]
