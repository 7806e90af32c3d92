"""Very many streams at once, and very many requests one after the other: what memory they take."""

from __future__ import annotations

import resource
import subprocess
import time
from typing import TYPE_CHECKING, Self

import msgspec

from kvrelay.bench.report import median
from kvrelay.bench.section import Goal, Section
from router_bench.contestants import OURS, Router
from router_bench.loading import running_engines
from router_bench.messages import client_body
from router_bench.processes import LOAD_CORE, on_core

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from router_bench.loading import Bench, Load
    from router_bench.messages import Hop

SPARE_FILES = 400
"""Files a router may have open beside the two of each stream."""
EVENTS = 6
"""Of an idle-ish stream."""
MAX_STREAMS_MB = 1500
MAX_GROWTH = 1.05
LOOK_S = 0.25
MB = 1e6


class Running:
    """A load that goes on beside us."""

    def __init__(self, bench: Bench, connections: int, hop: Hop, *, requests: int) -> None:
        self._bench = bench
        self._process = subprocess.Popen(
            bench.command(connections, [hop], requests=requests),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=on_core(LOAD_CORE, bench.priority),  # noqa: PLW1509 - no threads here
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def looks(self) -> Iterator[None]:
        """Now and then until it has ended."""
        while self._process.poll() is None:
            yield
            time.sleep(LOOK_S)

    def load(self) -> Load:
        """What it came to.

        Raises:
            RuntimeError: an answer was wrong, or the load generator failed.
        """
        output, complaints = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"the load generator failed: {complaints!r}")
        return self._bench.judge(output, complaints)


def run_streams(bench: Bench, asked: int, hold_s: float) -> Section:
    """Open ``asked`` streams, each of which lasts for ``hold_s``, so that all are open at once, and let them end.

    A stream takes two files of a router: where one process may not have so many, several share the core.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1] - SPARE_FILES
    count = min(asked, files)  # the load generator and the engines have one for each
    workers = -(-2 * count // files)
    bench = msgspec.structs.replace(bench, chunks=EVENTS)
    interval_s = hold_s / EVENTS
    section = Section(f"{count:,} streams at once, an event every {interval_s:g} s on each", ["figure", "value"])
    with running_engines(bench, f"{interval_s * 1e3:g}") as engines:
        router = Router(OURS, bench, engines, ["--workers", str(workers)])
        try:
            hop = router.hop(client_body(2048, EVENTS), engines)
            before, empty_bytes = engines.counts().decodes, router.process.rss_bytes()
            peak_bytes, began_cpu_s, began, all_open_s = empty_bytes, router.process.cpu_s(), time.monotonic(), 0.0
            with Running(bench, count, hop, requests=count) as running:
                for _ in running.looks():
                    peak_bytes = max(peak_bytes, router.process.rss_bytes())
                    if not all_open_s and engines.counts().decodes - before >= count:
                        all_open_s = time.monotonic() - began
                load = running.load()
            cpu_share = (router.process.cpu_s() - began_cpu_s) / (time.monotonic() - began)
        finally:
            router.process.stop()
    held = 0 < all_open_s < hold_s
    if not held:
        section.absent["all streams at once"] = "the first ended before the last began; give a longer --hold"
    each_kb = (peak_bytes - empty_bytes) / count / 1e3
    section.figures = {
        "streams": count,
        "processes": workers,
        "rss_mb": peak_bytes / MB,
        "rss_kb_each": each_kb,
        "all_open_s": all_open_s,
        "cpu_share": cpu_share,
        "first_event_p99_s": load.first_p99_us / 1e6,
    }
    section.rows = [
        ["streams open at once", f"{count:,}"],
        ["resident memory, MB", f"{peak_bytes / MB:.0f}"],
        ["of it for each stream, kB", f"{each_kb:.1f}"],
        ["until all were open, s", f"{all_open_s:.1f}"],
        ["share of the core over the whole run", f"{cpu_share:.0%}"],
    ]
    if workers > 1:
        section.notes.append(
            f"By {workers} processes on the one core: a process may have {files + SPARE_FILES:,} files here."
        )
    if count < asked:
        section.notes.append(f"{asked:,} were asked for, which is more than a process may have files.")
    what = f"{count:,} streams: resident memory, MB"
    section.goals = [Goal(what, MAX_STREAMS_MB, peak_bytes / MB if held else None, at_least=False)]
    return section


def run_flat(bench: Bench, requests: int, connections: int) -> Section:
    """Send ``requests`` and watch the router's memory from the first fifth on, in which its records fill up."""
    section = Section(f"Memory over {requests:,} requests", ["figure", "value"])
    with running_engines(bench, "burst") as engines:
        router = Router(OURS, bench, engines)
        try:
            hop = router.hop(client_body(2048, bench.chunks), engines)
            seen: list[tuple[int, int]] = []
            with Running(bench, connections, hop, requests=requests) as running:
                seen.extend((engines.counts().decodes, router.process.rss_bytes()) for _ in running.looks())
                load = running.load()
        finally:
            router.process.stop()
    early = [rss for done, rss in seen if 0.2 <= done / requests < 0.4] or [seen[0][1]]
    late = [rss for done, rss in seen if done / requests >= 0.9] or [seen[-1][1]]
    growth = median(late) / median(early)
    section.figures = {
        "requests": load.requests,
        "rss_mb_early": median(early) / MB,
        "rss_mb_late": median(late) / MB,
        "rss_mb_max": max(rss for _, rss in seen) / MB,
        "growth": growth,
        "rate": load.rate,
    }
    section.rows = [
        ["requests", f"{load.requests:,}"],
        ["requests/s", f"{load.rate:,.0f}"],
        ["resident memory from a fifth to two fifths, MB", f"{median(early) / MB:.1f}"],
        ["resident memory in the last tenth, MB", f"{median(late) / MB:.1f}"],
    ]
    section.goals = [Goal(f"memory at the end of {requests:,} requests / early", MAX_GROWTH, growth, at_least=False)]
    return section
