"""What watching a request costs the router: histograms alone, with the access log, with traces.

Each case gives a real observer the requests of a disaggregated stream of 32 tokens, without sockets or engines, and
times what it does for one: in the event loop (what other requests wait for) and on all threads (processor time, in
which the exporter's encoding is). Afterwards what came out is counted. Prints a table and a closing JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvrelay.bench.report import closing_line, percentile, table
from kvrelay.router import access_log, tracing
from kvrelay.router.core.fleet import Role, make_engines, parse_address
from kvrelay.router.core.health import HealthSettings
from kvrelay.router.core.lifecycle import Event, Lifecycle
from kvrelay.router.core.observing.observation import Leg
from kvrelay.router.core.observing.settings import Observing
from kvrelay.router.core.records import Record
from kvrelay.router.http.messages import Request
from kvrelay.router.http.reply import Reply
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.observer import Observer
from kvrelay.testing import fake_answers
from kvrelay.types import OnLostKv

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PATH = "/v1/completions"
SPANS = 5
STORY = (Event.PREFILL_SENT, Event.PREFILL_ANSWERED, Event.DECODE_SENT, Event.FIRST_BYTE, Event.LAST_BYTE)
HEADERS = [
    (b"host", b"router"), (b"content-type", b"application/json"), (b"authorization", b"Bearer k"), (b"accept", b"*/*"),
    (b"user-agent", b"bench"), (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
]  # fmt: skip
EVENTS = fake_answers.events(PATH, {"max_tokens": 32, "stream_options": {"include_usage": True}}, "id")


class Nowhere:
    """A transport that takes everything."""

    def write(self, data: bytes) -> None: ...

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return "127.0.0.1", 1


class Case:
    """An observer, and what its requests took."""

    def __init__(self, observing: Observing) -> None:
        addresses = [parse_address("http://engine:1")]
        engines = [*make_engines(Role.PREFILL, addresses, HealthSettings())]
        engines += make_engines(Role.DECODE, addresses, HealthSettings())
        offset = time.time() - time.monotonic()
        self.metrics = RouterMetrics(engines)
        self.observer = Observer(observing, self.metrics, None, lambda: time.monotonic() + offset)
        self.taken_us: list[float] = []

    def one(self, number: int) -> None:
        """A request from arrival to end; timed is what the observer does."""
        request = Request(
            method="POST", target=PATH.encode(), headers=HEADERS, body=b"x" * 2048, http_1_0=False, keep_alive=True
        )
        reply = Reply(cast("asyncio.Transport", Nowhere()), request, close=False, writable=True)
        clock = time.perf_counter
        began = clock()
        self.observer.arrived(request, reply, f"ho-{number:032x}", traced=True)
        taken = clock() - began
        record = Record(Lifecycle("ho", time.time()), prefill="P0", decode="D0", policy=OnLostKv.RECOMPUTE)
        for event in STORY:
            record.life.handle(event, time.time())
        seen = request.seen
        seen.record, seen.model, seen.answered = record, "model", clock()
        for worker, role in (("P0", "prefill"), ("D0", "decode")):
            now = clock()
            seen.legs.append(Leg(worker, role, (), ("engine", 1), seen.new_span(), now, now + 0.01, 200, "", True))
        reply.start(200, [(b"content-type", b"text/event-stream")])
        for event_bytes in EVENTS:
            reply.write(event_bytes)
        reply.finish()
        began = clock()
        self.observer.over(request, reply, "ok", told=True)
        self.taken_us.append((taken + clock() - began) * 1e6)


async def measure(observing: Observing, requests: int) -> tuple[Case, float]:
    """The case, and processor time of a request on all threads beyond the making of requests, in microseconds."""
    case = Case(observing)
    await case.observer.start()
    before = time.process_time()
    for number in range(requests):
        case.one(number)
        if number % 20 == 0:
            await asyncio.sleep(0.002)  # the other threads' turn, as between the requests of a router
    await case.observer.close()
    return case, (time.process_time() - before) / requests * 1e6


def collect(told: Connection, done: Any) -> None:
    from kvrelay.testing.otlp_collector import Collector

    with Collector() as collector:
        told.send(collector.url)
        done.wait()
        told.send(len(collector.spans))


def main() -> None:
    tracing.CLOSE_TIMEOUT_S = access_log.CLOSE_TIMEOUT_S = 60.0  # all is to arrive, however busy the machine is
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="of each case (default %(default)s)")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    done = context.Event()
    collector = context.Process(target=collect, args=(there, done))
    collector.start()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "access.log")
        cases = {
            "histograms": Observing(),
            "and the access log": Observing(access_log=str(log)),
            "and traces": Observing(otlp_endpoint=here.recv()),
        }
        for name, observing in cases.items():
            case, all_us = asyncio.run(measure(observing, args.requests))
            results[name] = {
                "loop median us": round(percentile(case.taken_us, 50), 1),
                "loop p99 us": round(percentile(case.taken_us, 99), 1),
                "all threads us": round(all_us, 1),
            }
        lines = len(log.read_bytes().splitlines())
    done.set()
    spans = here.recv()
    collector.join()
    bare = results["histograms"]["all threads us"]
    for figures in results.values():
        figures["more than histograms us"] = round(figures.pop("all threads us") - bare, 1)
    print(
        table(["what is told", *next(iter(results.values()))], [[n, *map(str, r.values())] for n, r in results.items()])
    )
    assert lines == args.requests, lines
    print(f"\n{lines} lines, {spans} of {SPANS * args.requests} spans")
    print(closing_line("observing", {"cases": results, "lines": lines, "spans": spans}, requests=args.requests))


if __name__ == "__main__":
    main()
