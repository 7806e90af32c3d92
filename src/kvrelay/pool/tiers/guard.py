"""What stands between the pool and a tier: bandwidth caps, a circuit for a failing one, figures, and no exceptions."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from kvrelay.circuit import Circuit, State
from kvrelay.pool.tiers.core.bucket import TokenBucket
from kvrelay.pool.tiers.core.figures import Figures
from kvrelay.pool.tiers.core.tier import Loaded, Outcome, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.pool.tiers.core.tier import Item, Shape, Tier

log = logging.getLogger(__name__)

T = TypeVar("T")

LOG_EVERY_S = 30.0
"""A tier that fails says so this often, with how many failures there were since."""
TURN_BYTES = 4 << 20
"""With a bandwidth cap, what is moved between two waits."""


class Guard:
    """A tier that never raises. Methods as those of `Tier`, from any thread.

    ``name``: unique among a pool's tiers. ``read_limit``, ``write_limit``: bytes a second, None for no cap. What has
    failed several times in a row, storing or loading or looking, is paused for a while: it fails at once, and while
    loading is paused nothing is found. So a disk that takes nothing any more goes on serving.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        name: str,
        read_limit: float | None = None,
        write_limit: float | None = None,
        circuit: Callable[[], Circuit] = Circuit,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.kind = tier.kind
        self._tier = tier
        self._read = TokenBucket(read_limit) if read_limit else None
        self._write = TokenBucket(write_limit) if write_limit else None
        self._circuits = {kind: circuit() for kind in ("store", "load", "find")}
        self._now = now
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._figures = Figures()
        self._unsaid = 0
        self._said_at = float("-inf")

    # --- the tier's methods ---

    def store(self, items: Sequence[Item]) -> list[Outcome]:
        """See `Tier.store`."""
        outcomes: list[Outcome] = []
        for turn in _turns(items, [item.data.nbytes for item in items], capped=self._write is not None):
            size = sum(item.data.nbytes for item in turn)
            if self._wait(self._write, size):
                outcomes += self._store(turn)
            else:
                outcomes += [Outcome.FAILED] * len(turn)
        return outcomes

    def _store(self, items: Sequence[Item]) -> list[Outcome]:
        begun = self._now()
        failed = [Outcome.FAILED] * len(items)
        outcomes = self._try("store", lambda: self._tier.store(items), failed)
        with self._lock:
            figures = self._figures
            figures.stores += 1
            figures.store_seconds += self._now() - begun
            for item, outcome in zip(items, outcomes, strict=True):
                figures.stored += outcome is Outcome.DONE
                figures.stored_bytes += item.data.nbytes if outcome is Outcome.DONE else 0
                figures.refused += outcome is Outcome.REFUSED
        return outcomes

    def find(self, keys: Sequence[bytes], *, prefix: bool = False) -> list[Shape | None]:
        """See `Tier.find`."""
        begun = self._now()
        nothing: list[Shape | None] = [None] * len(keys)
        with self._lock:
            if not self._circuits["load"].ready(begun):
                self._figures.skipped += 1
                self._figures.misses += len(keys)
                return nothing
        found = self._try("find", lambda: self._tier.find(keys, prefix=prefix), nothing)
        hits = sum(shape is not None for shape in found)
        with self._lock:
            self._figures.finds += 1
            self._figures.find_seconds += self._now() - begun
            self._figures.hits += hits
            self._figures.misses += len(keys) - hits
        return found

    def load(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[Loaded]:
        """See `Tier.load`."""
        loaded: list[Loaded] = []
        for turn in _turns(wanted, [into.nbytes for _, into in wanted], capped=self._read is not None):
            if self._wait(self._read, sum(into.nbytes for _, into in turn)):
                loaded += self._load(turn)
            else:
                loaded += [Loaded(Outcome.FAILED)] * len(turn)
        return loaded

    def _load(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[Loaded]:
        begun = self._now()
        failed = [Loaded(Outcome.FAILED)] * len(wanted)
        loaded = self._try("load", lambda: self._tier.load(wanted), failed)
        corrupt = sum(one.outcome is Outcome.CORRUPT for one in loaded)
        with self._lock:
            figures = self._figures
            figures.loads += 1
            figures.load_seconds += self._now() - begun
            figures.corrupt += corrupt
            for (_, into), one in zip(wanted, loaded, strict=True):
                figures.loaded += one.outcome is Outcome.DONE
                figures.loaded_bytes += into.nbytes if one.outcome is Outcome.DONE else 0
        if corrupt:
            self._complain(f"{corrupt} objects came back damaged: they are forgotten and count as absent")
        return loaded

    def delete(self, keys: Sequence[bytes]) -> int | None:
        """See `Tier.delete`; None: it may not have happened."""
        return self._try("delete", lambda: self._tier.delete(keys), None)

    def purge(self, tenant: str) -> int | None:
        """See `Tier.purge`; None: it may not have happened."""
        return self._try("purge", lambda: self._tier.purge(tenant), None)

    def usage(self) -> Usage:
        """See `Tier.usage`."""
        return self._tier.usage()

    def take_evicted(self) -> list[bytes]:
        """See `Tier.take_evicted`."""
        evicted = self._tier.take_evicted()
        with self._lock:
            self._figures.evictions += len(evicted)
        return evicted

    def hurry(self) -> None:
        """From now on nothing waits for bandwidth: it fails."""
        self._closing.set()

    def close(self) -> None:
        """See `Tier.close`."""
        self.hurry()
        try:
            self._tier.close()
        except Exception:
            log.exception("tier %s could not be closed properly", self.name)

    def figures(self) -> dict[str, int | float]:
        """The counters of `Figures`, and ``objects``, ``bytes`` and ``paused`` (0 or 1), as they are now."""
        usage = self._tier.usage()
        with self._lock:
            values: dict[str, int | float] = {name: getattr(self._figures, name) for name in Figures.__struct_fields__}
            paused = int(any(circuit.state is not State.CLOSED for circuit in self._circuits.values()))
        return {**values, "objects": usage.objects, "bytes": usage.size_bytes, "paused": paused}

    # --- what it adds ---

    def _wait(self, bucket: TokenBucket | None, size: int) -> bool:
        """Wait until ``size`` bytes may pass; False: the tier is being closed."""
        if bucket is not None:
            with self._lock:
                delay = bucket.take(size, self._now())
                self._figures.throttled_seconds += delay
            if delay:
                self._closing.wait(delay)
        return not self._closing.is_set()

    def _try(self, what: str, work: Callable[[], T], otherwise: T) -> T:
        """Do ``work`` unless that is paused; ``otherwise`` when it fails."""
        circuit = self._circuits.get(what)
        with self._lock:
            if circuit is not None and not circuit.allow(self._now()):
                self._figures.skipped += 1
                return otherwise
        try:
            result = work()
        except OSError as error:
            self._failed(circuit, f"{what}: {error}")
            return otherwise
        except Exception:
            log.exception("a bug in tier %s: %s counts as failed", self.name, what)
            self._failed(circuit, f"{what}: a bug")
            return otherwise
        failures = _failures(result)
        if failures:
            with self._lock:
                self._figures.errors += failures
            self._complain(f"{what}: the medium failed on {failures} objects")
        if circuit is not None:
            with self._lock:
                if failures and isinstance(result, list) and failures == len(result):
                    circuit.failed(self._now())
                else:
                    circuit.succeeded()
        return result

    def _failed(self, circuit: Circuit | None, why: str) -> None:
        with self._lock:
            self._figures.errors += 1
            if circuit is not None:
                circuit.failed(self._now())
        self._complain(why)

    def _complain(self, why: str) -> None:
        """Log, but not each time."""
        with self._lock:
            now = self._now()
            if now - self._said_at < LOG_EVERY_S:
                self._unsaid += 1
                return
            more, self._unsaid, self._said_at = self._unsaid, 0, now
        log.warning("tier %s (%s): %s%s", self.name, self._tier.where, why, f" ({more} more since)" if more else "")


def _failures(result: object) -> int:
    """How many objects of a result the medium failed on."""
    if not isinstance(result, list):
        return 0
    return sum(one is Outcome.FAILED or (isinstance(one, Loaded) and one.outcome is Outcome.FAILED) for one in result)


def _turns(items: Sequence[T], sizes: Sequence[int], *, capped: bool) -> list[Sequence[T]]:
    """``items``; where bandwidth is capped in runs of about `TURN_BYTES`, so that waiting and moving alternate."""
    if not capped:
        return [items]
    turns: list[Sequence[T]] = []
    first = size = 0
    for number, more in enumerate(sizes):
        if size and size + more > TURN_BYTES:
            turns.append(items[first:number])
            first, size = number, 0
        size += more
    turns.append(items[first:])
    return turns
