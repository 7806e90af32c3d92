"""A soak: clients that write, read, follow, pin, delete and vanish, processes that are killed; every byte is checked.

A pool and eight processes of four clients each, over shared memory and TCP. Every object follows from its key, so every
byte read is compared. Now and then a process is killed (SIGKILL) and another takes its place. At the end the pool must
hold nothing for anybody, and its memory and descriptors must be what they were. Exit status 1 on any violation. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.bench.report import closing_line
from kvrelay.client.blocking import PoolClient
from kvrelay.testing.pool import pool_process
from soak.verdict import anonymous_bytes, descriptors, leaks
from soak.worker import CLIENTS

if TYPE_CHECKING:
    from kvrelay.testing.pool import PoolProcess

STOP_S = 60.0
GROWTH_BYTES = 24 << 20
"""How much more memory of its own the server may have at the end than once it was warm."""
OPENED_LATER = 4
"""Descriptors a pool may open when it first needs them, such as for lower tiers."""
MUST_HAPPEN = (
    "put", "get", "match", "write layers", "follow layers", "exists", "delete", "pin", "short-lived", "ticket",
    "abrupt end", "half a frame", "concurrent put", "concurrent get", "concurrent lease", "bytes verified",
    "keys matched", "layers followed", "objects written in layers", "objects got", "objects deleted",
)  # fmt: skip
"""A soak in which one of these never happened has shown less than it says."""


class Workers:
    """The processes; reports of all of them."""

    def __init__(self, pool: PoolProcess, count: int, seed: int) -> None:
        self._addresses = f"{pool.unix},{pool.tcp}"
        self._seed = seed
        self._started = 0
        self._selector = selectors.DefaultSelector()
        self._partial: dict[int, bytes] = {}
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.processes = [self._start(slot) for slot in range(count)]

    def _start(self, slot: int) -> subprocess.Popen[bytes]:
        self._started += 1
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "soak.worker",
                str(slot * CLIENTS),
                self._addresses,
                str(self._seed + self._started),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent,
        )
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ)
        return process

    def listen(self, seconds: float) -> None:
        """Take reports for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self._selector.get_map():
            for key, _ in self._selector.select(left):
                self._take(key.fd)

    def _take(self, fd: int) -> None:
        data = self._selector.get_key(fd).fileobj.read1(1 << 16)  # type: ignore[union-attr]
        if not data:
            self._selector.unregister(fd)
            return
        *lines, rest = (self._partial.pop(fd, b"") + data).split(b"\n")
        self._partial[fd] = rest
        for line in lines:
            told = json.loads(line)
            self.counts.update(told.get("counts", {}))
            if "violation" in told:
                self.violations.append(told["violation"])
                print(f"VIOLATION {told['violation']}", flush=True)

    def replace(self, slot: int) -> None:
        """Kill a process as a crash would, and start another in its place."""
        process = self.processes[slot]
        if process.poll() is not None:
            self.violations.append(f"process {slot} ended by itself with status {process.returncode}")
        process.kill()
        self._finish(process)
        self.counts["processes killed"] += 1
        self.processes[slot] = self._start(slot)

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout in self._selector.get_map():
            self._take(process.stdout.fileno())
        if process.stdout in self._selector.get_map():
            self._selector.unregister(process.stdout)
        self._partial.pop(process.stdout.fileno(), None)
        process.wait(STOP_S)
        process.stdin.close()
        process.stdout.close()

    def stop(self) -> None:
        """Let all end by themselves."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        self.listen(STOP_S)  # until all have closed their ends
        for slot, process in enumerate(self.processes):
            if process.poll() is None:
                try:
                    process.wait(1.0)
                except subprocess.TimeoutExpired:
                    self.violations.append(f"process {slot} did not end within {STOP_S:.0f} s")
                    process.kill()
            if process.wait(STOP_S):
                self.violations.append(f"process {slot} ended with status {process.returncode}")

    def kill(self) -> None:
        """End whatever is left."""
        for process in self.processes:
            process.kill()
            process.wait(STOP_S)


def soak(pool: PoolProcess, args: argparse.Namespace) -> tuple[Counter[str], list[str], dict[str, int]]:
    rng = random.Random(args.seed)
    pid = pool.process.pid
    with PoolClient.connect(pool.unix, name="supervisor", timeout_s=STOP_S) as client:
        idle_descriptors = descriptors(pid)
        workers = Workers(pool, args.processes, args.seed)
        try:
            begun = time.monotonic()
            warm = 0
            kill_at, tell_at = args.kill_every, 10.0
            while (passed := time.monotonic() - begun) < args.seconds:
                workers.listen(min(1.0, args.seconds - passed))
                if pool.process.poll() is not None:
                    workers.violations.append(f"the pool ended with status {pool.process.returncode}")
                    return workers.counts, workers.violations, {}
                if not warm and passed > args.seconds / 5:
                    warm = anonymous_bytes(pid)
                if passed > kill_at:
                    workers.replace(rng.randrange(args.processes))
                    kill_at = passed + args.kill_every * rng.uniform(0.5, 1.5)
                if passed > tell_at:
                    _tell(client, workers, pid, passed)
                    tell_at = passed + 10.0
            workers.stop()
        finally:
            workers.kill()
        violations = workers.violations
        ended = time.monotonic()
        violations += [f"left behind: {leak}" for leak in leaks(client, args.processes * CLIENTS)]
        settled = time.monotonic() - ended
        memory, held = anonymous_bytes(pid), descriptors(pid)
        if held > idle_descriptors + OPENED_LATER:
            violations.append(f"the pool has {held} descriptors open, {idle_descriptors} before")
        if memory > warm + GROWTH_BYTES:
            violations.append(f"the pool has {memory} bytes of its own, {warm} once it was warm")
        violations += [f"never happened: {what}" for what in MUST_HAPPEN if not workers.counts[what]]
        end = {"memory_warm_bytes": warm, "memory_end_bytes": memory, "descriptors": held, **client.stat()}
        end["settled_s"] = round(settled)
        return workers.counts, violations, end


def _tell(client: PoolClient, workers: Workers, pid: int, passed: float) -> None:
    stat = client.stat()
    counts = workers.counts
    print(
        f"{passed:4.0f} s: {stat['requests']:,} requests, {counts['bytes verified'] >> 20:,} MiB verified, "
        f"{stat['objects']:,} objects, {stat['evictions']:,} evictions, {stat['leases']} leases, "
        f"{counts['processes killed']} killed, {anonymous_bytes(pid) >> 20} MiB, "
        f"{len(workers.violations)} violations",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default %(default)s)")
    parser.add_argument("--processes", type=int, default=8, help=f"processes of {CLIENTS} clients (%(default)s)")
    parser.add_argument("--kill-every", type=float, default=5.0, help="seconds between kills (default %(default)s)")
    parser.add_argument("--size", default="128MiB", help="the pool's arena (default %(default)s)")
    parser.add_argument("--pool-options", default="", help="more flags of `kvrelay pool serve`, such as for tiers")
    parser.add_argument("--seed", type=int, default=1, help="of all choices; timing is not part of it")
    args = parser.parse_args()
    options = ["--log-level", "warning", *args.pool_options.split()]
    with (
        tempfile.TemporaryDirectory() as directory,
        pool_process(Path(directory), size=args.size, options=options) as pool,
    ):
        counts, violations, end = soak(pool, args)
    for violation in violations:
        print(f"VIOLATION {violation}")
    results = {"violations": violations, "counts": dict(sorted(counts.items())), "end": end}
    print(closing_line("soak", results, **vars(args)))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
