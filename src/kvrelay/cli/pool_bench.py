"""``kvrelay pool bench``: quick figures of a running pool, from where one stands. Leaves nothing behind."""

from __future__ import annotations

import secrets
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from kvrelay.errors import BadRequestError, ConfigError, KvRelayError, PoolFullError
from kvrelay.sizes import format_size, parse_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvrelay.client.blocking import PoolClient

LOOKUPS = 200
MAX_LOOKED_UP = 512


class Figures(NamedTuple):
    """Seconds of each run of one operation, and what a run moves."""

    operation: str
    seconds: list[float]
    keys: int
    moved_bytes: int

    def line(self) -> str:
        """The median, the 99th percentile and the rate, for a reader."""
        ordered = sorted(self.seconds)
        median, high = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        rate = f"{self.moved_bytes / median / 1e9:8.2f} GB/s" if self.moved_bytes else " " * 13
        times = f"{1e3 * median:10.3f} {1e3 * high:10.3f}"
        return f"{self.operation:8} {times} {rate} {self.keys / median:14,.0f} keys/s"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench``."""
    parser.add_argument("--object-size", metavar="SIZE", default="256KiB", help="of one object (%(default)s)")
    parser.add_argument("--batch", metavar="N", type=int, default=64, help="objects a request (%(default)s)")
    parser.add_argument("--seconds", metavar="S", type=float, default=5.0, help="how long, about (%(default)g)")


def run(args: argparse.Namespace) -> int:
    """Measure put, get and match; every byte read is compared with what was written."""
    from kvrelay.cli.pool_ask import connect

    size = _object_size(args.object_size)
    if not 1 <= args.batch <= 4_096:
        raise ConfigError(f"--batch {args.batch} is out of range: give 1 to 4096")
    if not 0.1 <= args.seconds <= 600:
        raise ConfigError(f"--seconds {args.seconds:g} is out of range: give 0.1 to 600")
    with connect(args, "bench", map_arena=True) as client:
        if size * args.batch > client.welcome.arena_bytes:
            raise ConfigError(
                f"--batch {args.batch} of --object-size {format_size(size)} does not fit the pool, "
                f"which has {format_size(client.welcome.arena_bytes)}"
            )
        print(
            f"{args.address} ({'shared memory' if client.arena is not None else 'socket'}): "
            f"{args.batch} objects of {format_size(size)} a request"
        )
        bench = Bench(client, size, args.batch)
        try:
            found = bench.measure(args.seconds)
        except PoolFullError as error:
            raise PoolFullError(f"{error}; give a smaller --batch or --object-size") from None
        finally:
            _clean(bench, client, lambda: connect(args, "bench"))
    print(f"{'':8} {'median ms':>10} {'p99 ms':>10}")
    for figures in found:
        print(figures.line())
    return 0


class Bench:
    """One run. Keys are random: nobody else's are touched."""

    def __init__(self, client: PoolClient, size: int, batch: int) -> None:
        self._client = client
        self._moved = size * batch
        prefix = b"kvrelay bench " + secrets.token_bytes(8)
        self._keys = [prefix + number.to_bytes(4, "little") for number in range(batch)]
        blob = secrets.token_bytes(size)
        # every object differs from the others in its first bytes, so that one taken for another is noticed
        self._wanted = [(key[-4:] + blob)[:size] for key in self._keys]
        self._into = [memoryview(bytearray(size)) for _ in self._keys]

    def measure(self, seconds: float) -> list[Figures]:
        """Put and get alternate; then lookups. A CorruptionError ends it."""
        items = [(key, memoryview(value)) for key, value in zip(self._keys, self._wanted, strict=True)]
        puts: list[float] = []
        gets: list[float] = []
        ends = time.monotonic() + seconds
        while not puts or time.monotonic() < ends:
            puts.append(_timed(lambda: self._client.put_many(items)))
            gets.append(_timed(self._get))
            self._compare()
            if time.monotonic() < ends:
                self._client.delete(self._keys)
            _tell(f"{len(puts)} rounds, {max(0.0, ends - time.monotonic()):.0f} s left")
        looked_up = self._keys[:MAX_LOOKED_UP]
        matches = [_timed(lambda: self._client.match_prefix(looked_up)) for _ in range(LOOKUPS)]
        _tell("")
        count = len(self._keys)
        return [
            Figures("put", puts, count, self._moved),
            Figures("get", gets, count, self._moved),
            Figures("match", matches, len(looked_up), 0),
        ]

    def _get(self) -> None:
        found = self._client.get_many(self._keys, self._into)
        if found != len(self._keys):
            raise BadRequestError(
                f"{found} of {len(self._keys)} objects were still there: the pool evicts what it was just given; "
                "give a smaller --batch or --object-size"
            )

    def _compare(self) -> None:
        for view, wanted in zip(self._into, self._wanted, strict=True):
            if view != wanted:
                raise KvRelayError("the pool gave other bytes than were put: that is a bug, please report it")

    def clean(self, client: PoolClient) -> None:
        """Delete what was stored."""
        client.delete(self._keys)


def _clean(bench: Bench, client: PoolClient, connect: Callable[[], PoolClient]) -> None:
    """Leave nothing behind: over another connection when this one was interrupted, and is closed."""
    try:
        if not client.closed:
            bench.clean(client)
            return
        with connect() as another:
            bench.clean(another)
    except KvRelayError as error:
        print(f"what was stored could not be deleted: {error}", file=sys.stderr)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _object_size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--object-size {text!r}: {error}") from None
    if not 8 <= size <= 1 << 28:
        raise ConfigError(f"--object-size {text!r} is out of range: give 8 bytes to 256MiB")
    return size
