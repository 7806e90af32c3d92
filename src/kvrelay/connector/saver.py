"""Saves one rank's KV, layer by layer, on a thread of its own while the forward pass goes on.

A step's chunks are announced as soon as the step begins; then, whenever a layer of the step has been computed, that
layer's segments are copied out of the engine's blocks and published, so that a reader can follow layer by layer.

An object is complete when all ranks have written their shares. A rank that will not write one owes the pool that word,
when it had no connection or no time to announce it, or was not granted it while another rank, asking later, may have
been: readers follow what the others write, and would wait for it.

The engine may take blocks away (`Saver.drain`). Blocks are read under a lock and only while their job is not
cancelled, so when `drain` returns they are not being read and never will be again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING

from kvrelay.client.core.operations import StagePart
from kvrelay.connector.pages import Span
from kvrelay.errors import KvRelayError
from kvrelay.wire import limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvrelay.client.blocking import PoolClient
    from kvrelay.connector.core.orders import SaveOrder
    from kvrelay.connector.counters import Counters
    from kvrelay.connector.layout import Run
    from kvrelay.connector.link import PoolLink
    from kvrelay.connector.rank_kv import RankKv, RankLayer
    from kvrelay.identity.core.chunks import Chunk
    from kvrelay.wire.messages import Grant, Spec

log = logging.getLogger(__name__)

CONNECT_WAIT_S = 0.05
"""How long a step's saves wait for a connection that is being made."""
MAX_REMEMBERED = 1 << 16
MAX_OWED = limits.MAX_KEYS
OWING_S = 0.05
"""How often it is looked whether what is owed can be paid."""
BUSY_S = 0.25
"""How late it is paid at most where there is always work."""
REFUSED_S = 1.0
"""How long after a refusal: another rank, of a later pipeline stage, may come to ask only then."""
WRITE_LEASE_S = 300.0
"""How long the pool waits for an object to be completed by a writer that is connected. A step can be long on a CPU."""


class Job:
    """One save order. ``ended`` is called once, when its blocks will not be read for it any more, from any thread."""

    def __init__(self, order: SaveOrder, ended: Callable[[Job], None]) -> None:
        self.order = order
        self.cancelled = False
        self.granted: dict[int, list[tuple[Chunk, Grant]]] = {}
        """Chunks of each group being written for it; the saving thread's own."""
        self.unsaved_tokens = sum(chunk.tokens for chunk in order.chunks)
        """Tokens that will be missing if it ends now; the saving thread's own, but for reading."""
        self._ended = ended
        self._once = threading.Lock()

    def end(self) -> bool:
        """It is over; whether it was not before."""
        first = self._once.acquire(blocking=False)
        if first:
            self._ended(self)
        return first

    def runs(self, layer: RankLayer) -> list[tuple[Run, list[tuple[Chunk, Grant]]]]:
        """Granted chunks of a layer's group as runs of neighbours, each with where it lies in the blocks."""
        runs: list[list[tuple[Chunk, Grant]]] = []
        for item in self.granted.get(layer.group, ()):
            if runs and runs[-1][-1][0].end == item[0].start:
                runs[-1].append(item)
            else:
                runs.append([item])
        return [(layer.run(self.order.tables, run[0][0].start, run[-1][0].end), run) for run in runs]


def _ticket(job: Job) -> str:
    return job.order.ticket or ""


class Step:
    """The saves of one engine step."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.announced = threading.Event()
        """The pool has answered, or will not be asked."""
        self.client: PoolClient | None = None
        self.done_layers: set[int] = set()


class Saver:
    """The saving thread of one rank."""

    def __init__(
        self,
        *,
        kv: RankKv,
        group: str,
        link: PoolLink,
        counters: Counters,
        name: str,
    ) -> None:
        """``kv``: this rank's. ``group``: under which the engine's ranks write together."""
        self._kv = kv
        self._counted = kv.written[0] if kv.written else None
        """Tokens are counted once, not for every group: for this one."""
        self._group = group
        self._link = link
        self._counters = counters
        self._queue: queue.SimpleQueue[tuple[Callable[[Step], None], Step] | None] = queue.SimpleQueue()
        self._reading = threading.Lock()
        self._written: dict[int, None] = {}
        """Handles of objects this rank writes or has written its part of, oldest first."""
        self._last: PoolClient | None = None
        self._owed: dict[bytes, float] = {}
        """Objects that other ranks may be writing, and this one has no grant for and will not write: from when on the
        pool is to be told, on the clock of `time.monotonic`."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    # --- the engine's thread ---

    def begin(self, jobs: list[Job]) -> Step:
        """A step starts: announce its chunks."""
        step = Step(jobs)
        self._queue.put((self._announce, step))
        return step

    def computed(self, step: Step, layers: Sequence[int]) -> None:
        """These layers (of this rank, from 0) hold the step's tokens now, or will when the device has come so far."""
        for layer in layers:
            self._kv.layers[layer].pages.computed()
        self._queue.put((partial(self._save, layers=layers), step))

    def interrupted(self, step: Step) -> None:
        """The forward pass ended before all its layers: what the rest of the blocks hold is not this step's KV."""
        self._queue.put((self._abandon, step))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Read no more of these jobs' blocks; when this returns, none is being read."""
        with self._reading:
            for job in jobs:
                job.cancelled = True
        for job in jobs:
            self._end(job, "cancelled")

    def close(self) -> None:
        """Stop after what was begun, at the latest when the pool's time-outs have passed."""
        self._queue.put(None)
        self._thread.join(10.0)
        self._link.close()

    # --- its own ---

    def _work(self) -> None:
        while (item := self._next()) is not None:
            work, step = item
            try:
                work(step)
            except KvRelayError as error:
                self._failed(step, error)
            except Exception:
                log.exception("kvrelay: a bug: these chunks are not saved, the engine goes on")
                self._give_up(step, step.jobs, "bug")
            finally:
                step.announced.set()

    def _next(self) -> tuple[Callable[[Step], None], Step] | None:
        """The next piece of work. What is owed is paid while there is none: a later announcement may settle it."""
        while self._owed:
            try:
                item = self._queue.get(timeout=OWING_S)
            except queue.Empty:
                self._pay()
                continue
            self._pay(BUSY_S)
            return item
        return self._queue.get()

    def _pay(self, late_s: float = 0.0) -> None:
        """Tell the pool which objects will not be completed, if there is a connection; those ``late_s`` overdue."""
        now = time.monotonic() - late_s
        owed = [key for key, due in self._owed.items() if due <= now]
        client = self._link.client() if owed else None
        if client is None:
            return
        for key in owed:
            del self._owed[key]
        try:
            client.disclaim(owed, group=self._group)
        except KvRelayError as error:
            self._link.drop_if_closed(error)
            log.warning("kvrelay: the pool could not be told of %d objects given up: %s", len(owed), error)

    def _owe_all(self, jobs: Sequence[Job]) -> None:
        """These jobs end without having been announced here."""
        self._owe([spec.key for job in jobs for _, _, spec in self._objects(job)], 0.0)

    def _owe(self, keys: Sequence[bytes], after_s: float) -> None:
        """Nothing of these objects will be written here."""
        if self._kv.whole:
            return
        self._owed |= dict.fromkeys(keys, time.monotonic() + after_s)
        while len(self._owed) > MAX_OWED:
            del self._owed[next(iter(self._owed))]

    def _announce(self, step: Step) -> None:
        if not self._kv.written:
            self._give_up(step, step.jobs, "")
            return
        client = self._link.wait(CONNECT_WAIT_S)
        if client is None:
            step.announced.set()
            self._owe_all(step.jobs)
            self._give_up(step, step.jobs, "pool_down")
            return
        if client is not self._last:
            self._written.clear()  # another pool, other handles
            self._last = client
        step.client = client
        self._owe_all([job for job in step.jobs if job.cancelled])
        wanted = sorted((job for job in step.jobs if not job.cancelled), key=_ticket)
        for ticket, same in groupby(wanted, key=_ticket):
            jobs = list(same)
            specs = {spec.key: spec for job in jobs for _, _, spec in self._objects(job)}
            if not specs:
                continue
            try:
                announced = client.announce(
                    list(specs.values()), group=self._group, lease_s=WRITE_LEASE_S, ticket=ticket or None
                )
            except KvRelayError:
                self._owe_all(jobs)
                raise
            grants = dict(zip(specs, announced.grants, strict=True))
            for key in specs:
                self._owed.pop(key, None)
            self._owe([key for key, grant in grants.items() if grant.state != "granted"], REFUSED_S)
            for job in jobs:
                self._grant(job, grants)
        for job in step.jobs:
            if not job.granted:
                job.end()

    def _abandon(self, step: Step) -> None:
        self._give_up(step, step.jobs, "interrupted")

    def _objects(self, job: Job) -> Iterator[tuple[int, Chunk, Spec]]:
        """Every object of a job that this rank writes a share of."""
        for group in self._kv.written:
            for chunk in job.order.of(group):
                yield group, chunk, self._kv.geometry.groups[group].spec(chunk.key, chunk.tokens)

    def _grant(self, job: Job, grants: dict[bytes, Grant]) -> None:
        for group, chunk, spec in self._objects(job):
            grant = grants[spec.key]
            if grant.state == "granted" and grant.handle not in self._written:
                self._written[grant.handle] = None
                job.granted.setdefault(group, []).append((chunk, grant))
                continue
            # Granted and written: another request holds the same chunk, and its bytes are written once.
            if group != self._counted:
                continue
            job.unsaved_tokens -= chunk.tokens
            if grant.state != "granted":
                self._counters.add(f"not_saved_{grant.state}", chunk.tokens)

    def _save(self, step: Step, layers: Sequence[int]) -> None:
        for layer in layers:
            if layer not in step.done_layers:
                step.done_layers.add(layer)
                self._save_layer(step, layer)
        if len(step.done_layers) == len(self._kv.layers):
            for job in step.jobs:
                counted = () if self._counted is None else job.granted.get(self._counted, ())
                self._counters.add("saved_tokens", sum(chunk.tokens for chunk, _ in counted))
                job.granted = {}
                job.end()
            while len(self._written) > MAX_REMEMBERED:
                del self._written[next(iter(self._written))]

    def _save_layer(self, step: Step, number: int) -> None:
        layer = self._kv.layers[number]
        if step.client is None:
            return
        group, share, first = self._kv.group(layer), self._kv.share(layer), self._kv.first_segment(layer)
        due: list[tuple[Job, list[tuple[Run, list[Span]]]]] = []
        parts: list[StagePart] = []
        for job in step.jobs:
            runs = []
            for run, granted in job.runs(layer):
                origin = granted[0][0].start
                runs.append((run, [Span.whole(c.tokens, run.offset + c.start - origin) for c, _ in granted]))
                parts += [StagePart(grant, group.spec(c.key, c.tokens), first, share.heads) for c, grant in granted]
            if runs:
                due.append((job, runs))
        if not parts:
            return
        staged = iter(zip(parts, step.client.stage(parts), strict=True))
        saved: list[tuple[StagePart, memoryview, array[int]]] = []
        for job, runs in due:
            of_job = list(islice(staged, sum(len(spans) for _, spans in runs)))
            sums = self._read(job, layer, runs, [view for _, view in of_job])
            if sums is None:
                self._give_up(step, [job], "cancelled")
                continue
            for at, (part, view) in enumerate(of_job):
                saved.append((part, view, sums[at * share.heads : (at + 1) * share.heads]))
        if saved:
            done = sum(self._kv.layers[other].group == layer.group for other in step.done_layers)
            step.client.commit(
                [part for part, _, _ in saved],
                [view for _, view, _ in saved],
                sums=[sums for _, _, sums in saved],
                final=done == share.layers,
            )
            self._counters.add("saved_bytes", sum(part.size for part, _, _ in saved))

    def _read(
        self, job: Job, layer: RankLayer, runs: Sequence[tuple[Run, Sequence[Span]]], views: Sequence[memoryview]
    ) -> array[int] | None:
        """Copy a layer of a job's tokens out of the engine's blocks; the checksums. None: they are not to be read."""
        rest, sums = iter(views), array("Q")
        with self._reading:
            if job.cancelled:
                return None
            for run, spans in runs:
                sums.frombytes(layer.pages.save(run.blocks, spans, list(islice(rest, len(spans)))))
        return sums

    def _failed(self, step: Step, error: KvRelayError) -> None:
        lost = step.client is not None and step.client.closed
        if lost:
            # Only that of the step: another may have been made meanwhile, and others' objects be written on it.
            self._link.drop_if_closed(error)
        else:
            log.warning("kvrelay: chunks are not saved: %s", error)
        self._give_up(step, step.jobs, "pool_down" if lost else error.code)

    def _end(self, job: Job, reason: str) -> None:
        """A job ends before its chunks are saved; counted once, under the first reason."""
        if job.end() and reason:
            self._counters.add(f"not_saved_{reason}", job.unsaved_tokens)

    def _give_up(self, step: Step, jobs: Sequence[Job], reason: str) -> None:
        """End jobs whose chunks will not be complete; who waits for them is told."""
        handles: list[int] = []
        for job in jobs:
            handles += [grant.handle for granted in job.granted.values() for _, grant in granted]
            job.granted = {}
            self._end(job, reason)
        for handle in handles:
            self._written.pop(handle, None)
        if handles and step.client is not None and not step.client.closed:
            try:
                step.client.abort(handles)
            except KvRelayError as error:
                self._link.drop_if_closed(error)
