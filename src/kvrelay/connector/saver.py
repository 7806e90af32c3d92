"""Saves one rank's KV, layer by layer, on a thread of its own while the forward pass goes on.

A step's chunks are announced as soon as the step begins; then, whenever layers of the step have been computed, their
segments are copied out of the engine's blocks and published, so that a reader can follow while the rest is computed.
Layers of few bytes are published together: see `PUBLISH_BYTES`.

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
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING

from kvrelay.client.core.operations import StagePart
from kvrelay.connector.saves import Granted, Step, Stretch
from kvrelay.errors import KvRelayError
from kvrelay.wire import limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.client.blocking import PoolClient
    from kvrelay.connector.counters import Counters
    from kvrelay.connector.link import PoolLink
    from kvrelay.connector.rank_kv import RankKv, RankLayer
    from kvrelay.connector.saves import Job
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
PUBLISH_BYTES = 2 << 20
"""Computed layers wait until they are so many bytes, or the step's last is among them, and are published together.

What it costs to publish them, an engine's core pays; a reader who follows copies as much in half a millisecond.
"""
PUBLISH_SEGMENTS = 8192
"""Nor do more segments wait: a message to the pool has a limit."""
WRITE_LEASE_S = 300.0
"""How long the pool waits for an object to be completed by a writer that is connected. A step can be long on a CPU."""


def _ticket(job: Job) -> str:
    return job.order.ticket or ""


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
        publish_bytes: int = PUBLISH_BYTES,
    ) -> None:
        """``kv``: this rank's. ``group``: under which the engine's ranks write together.

        ``publish_bytes``: how much waits, at most, to be published together.
        """
        self._publish_bytes = publish_bytes
        self._kv = kv
        self._whole = kv.whole
        self._written_groups = kv.written
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
            self._tell(step, layer)
            last = len(step.computed) == len(self._kv.layers)
            much = step.waiting_bytes >= self._publish_bytes or step.waiting_segments >= PUBLISH_SEGMENTS
            if step.waiting and (last or much):
                self._queue.put((partial(self._save, numbers=step.take()), step))

    def _tell(self, step: Step, number: int) -> None:
        group = self._kv.layers[number].group
        if group not in step.sizes:
            share = self._kv.shares[group]
            layer_bytes = share.bytes_per_layer(step.tokens, self._kv.geometry.groups[group])
            step.sizes[group] = layer_bytes, share.heads * step.chunks
        step.told(number, *step.sizes[group])

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
        if self._whole:
            return
        self._owed |= dict.fromkeys(keys, time.monotonic() + after_s)
        while len(self._owed) > MAX_OWED:
            del self._owed[next(iter(self._owed))]

    def _announce(self, step: Step) -> None:
        if not self._written_groups:
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
            jobs = [(job, self._objects(job)) for job in same]
            specs = {spec.key: spec for _, objects in jobs for _, _, spec in objects}
            if not specs:
                continue
            try:
                announced = client.announce(
                    list(specs.values()), group=self._group, lease_s=WRITE_LEASE_S, ticket=ticket or None
                )
            except KvRelayError:
                self._owe(list(specs), 0.0)
                raise
            grants = dict(zip(specs, announced.grants, strict=True))
            if not self._whole:
                for key in specs:
                    self._owed.pop(key, None)
                self._owe([key for key, grant in grants.items() if grant.state != "granted"], REFUSED_S)
            for job, objects in jobs:
                self._grant(job, objects, grants)
        for job in step.jobs:
            if not job.granted:
                job.end()

    def _abandon(self, step: Step) -> None:
        self._give_up(step, step.jobs, "interrupted")

    def _objects(self, job: Job) -> list[tuple[int, Chunk, Spec]]:
        """Every object of a job that this rank writes a share of."""
        return [
            (group, chunk, spec)
            for group in self._written_groups
            for chunk, spec in self._kv.geometry.groups[group].specs(job.order.of(group))
        ]

    def _grant(self, job: Job, objects: Sequence[tuple[int, Chunk, Spec]], grants: dict[bytes, Grant]) -> None:
        for group, chunk, spec in objects:
            grant = grants[spec.key]
            if grant.state == "granted" and grant.handle not in self._written:
                self._written[grant.handle] = None
                job.granted.setdefault(group, []).append(Granted(chunk, grant, spec))
                continue
            # Granted and written: another request holds the same chunk, and its bytes are written once.
            if group != self._counted:
                continue
            job.unsaved_tokens -= chunk.tokens
            if grant.state != "granted":
                self._counters.add(f"not_saved_{grant.state}", chunk.tokens)

    def _save(self, step: Step, numbers: Sequence[int]) -> None:
        groups = [self._kv.layers[number].group for number in numbers]
        for group in dict.fromkeys(groups):
            layers = [number for number, of in zip(numbers, groups, strict=True) if of == group]
            step.done_layers.update(layers)
            self._save_layers(step, group, [self._kv.layers[number] for number in layers])
        if len(step.done_layers) == len(self._kv.layers):
            for job in step.jobs:
                counted = () if self._counted is None else job.granted.get(self._counted, ())
                self._counters.add("saved_tokens", sum([item.chunk.tokens for item in counted]))
                job.granted = {}
                job.end()
            while len(self._written) > MAX_REMEMBERED:
                del self._written[next(iter(self._written))]

    def _save_layers(self, step: Step, group: int, layers: Sequence[RankLayer]) -> None:
        """Copy and publish layers of one group."""
        if step.client is None:
            return
        due = [job for job in step.jobs if job.granted.get(group)]
        if not due:
            return
        share, stretches = self._kv.shares[group], self._stretches(layers)
        of_job = [
            [
                StagePart(item.grant, item.spec, stretch.first, share.heads * len(stretch.layers))
                for stretch in stretches
                for item in job.granted[group]
            ]
            for job in due
        ]
        staged = iter(step.client.stage([part for parts in of_job for part in parts]))
        saved: list[tuple[StagePart, memoryview, list[int]]] = []
        for job, parts in zip(due, of_job, strict=True):
            views = list(islice(staged, len(parts)))
            sums = self._read(job, stretches, views)
            if sums is None:
                self._give_up(step, [job], "cancelled")
            else:
                saved += zip(parts, views, sums, strict=True)
        if saved:
            done = sum(self._kv.layers[other].group == group for other in step.done_layers)
            step.client.commit(
                [part for part, _, _ in saved],
                [view for _, view, _ in saved],
                sums=[sums for _, _, sums in saved],
                final=done == share.layers,
            )
            self._counters.add("saved_bytes", sum([view.nbytes for _, view, _ in saved]))

    def _stretches(self, layers: Sequence[RankLayer]) -> list[Stretch]:
        """Layers of one group, those together whose segments are neighbours and whose tokens are in the same blocks."""
        stretches: list[Stretch] = []
        end = -1
        for layer in layers:
            first = self._kv.first_segment(layer)
            if first == end and layer.table == stretches[-1].layers[0].table:
                stretches[-1].layers.append(layer)
            else:
                stretches.append(Stretch(first, [layer]))
            end = first + self._kv.share(layer).heads
        return stretches

    def _read(self, job: Job, stretches: Sequence[Stretch], views: Sequence[memoryview]) -> list[list[int]] | None:
        """Copy layers of a job's tokens out of the engine's blocks, ``views`` of each stretch one after the other.

        Returns the checksums of each view's segments; None: they are not to be read.
        """
        sums: list[list[int]] = []
        rest = iter(views)
        for stretch in stretches:
            layer, *others = stretch.layers
            for run, spans in job.runs(layer):
                targets = list(islice(rest, len(spans)))
                with self._reading:
                    if job.cancelled:
                        return None
                    read = layer.pages.save(run.blocks, spans, targets, [other.pages for other in others])
                told = memoryview(read).cast("Q").tolist()
                each = len(told) // len(spans)
                sums += [told[at : at + each] for at in range(0, len(told), each)]
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
            handles += [item.grant.handle for granted in job.granted.values() for item in granted]
            job.granted = {}
            self._end(job, reason)
        for handle in handles:
            self._written.pop(handle, None)
        if handles and step.client is not None and not step.client.closed:
            try:
                step.client.abort(handles)
            except KvRelayError as error:
                self._link.drop_if_closed(error)
