"""vLLM's contract, asserted at every call: put `SchedulerGuard` or `WorkerGuard` in front of a connector's class.

    class Guarded(SchedulerGuard, KvRelayConnector): ...

What vLLM itself asserts, would be wedged or killed by, or documents in ``KVConnectorBase_V1``. The clauses are told in
documentation.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from kvrelay.testing.engine_shapes import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

META_BYTES = 64 << 10
"""A step's orders go through a pipe to every rank."""


def _lent(call: Callable[..., Any], *args: Any) -> Any:
    """Call with arguments that must come back as they were."""
    before = [fingerprint(arg) for arg in args]
    answer = call(*args)
    assert before == [fingerprint(arg) for arg in args], f"{call.__name__} changed what it was lent"
    return answer


class SchedulerGuard:
    """The scheduler's half."""

    def watch(self, *, troubled: bool = False) -> None:
        """Begin. ``troubled``: what the pool has may be lost at any moment."""
        self.troubled = troubled
        self.answers: dict[str, tuple[int, bool]] = {}
        """The last answer to each request that was asked for."""
        self.known: set[str] = set()
        self.loading: dict[str, int] = {}
        self.held: dict[str, int] = {}
        """What the engine waits for, each wait with a number of its own."""
        self._waits = 0
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        """Requests of which a load failed: nothing may be promised for them again."""

    def on_new_request(self, request: Any) -> None:
        """A new request, or another under an id that is free again."""
        name = request.request_id
        waited_for = {**self.loading, **self.held}
        assert name not in waited_for, "the engine still waits for a report of the last of this name"
        self.known.add(name)
        self.finished.discard(name)
        self.failed.discard(name)
        _lent(super().on_new_request, request)  # type: ignore[misc]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Asked twice: the answer may become known, but does not change by being asked for."""
        ask = super().get_num_new_matched_tokens  # type: ignore[misc]
        count, later = _lent(ask, request, num_computed_tokens)
        phase, story = self._progress(request.request_id)
        again = _lent(ask, request, num_computed_tokens)
        # What was promised may be asked of the pool anew, when its lease is old or more may have come.
        anew = phase == "claimable" and self._progress(request.request_id)[1] != story
        lost = self.troubled and not again[0]
        same = count is None or (count, later) == again
        assert anew or lost or same, f"asking changed {(count, later)} to {again}"
        count, later = again
        if count is None:
            assert not later, "nothing is known yet, not even how it would be loaded"
            return None, False
        assert count or not later, "(0, True): the engine would wait for ever"
        assert num_computed_tokens + count <= request.num_prompt_tokens or count == 0, "more than the prompt has"
        covers_all = num_computed_tokens + count >= request.num_tokens
        assert later or not count or not covers_all, "a synchronous load of everything leaves nothing to compute"
        assert not count or request.request_id not in self.failed, "promised again after a failed load: for ever"
        self.answers[request.request_id] = (count, later)
        return count, later

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks for what was promised, or for the rest."""
        name = request.request_id
        if num_external_tokens:
            count, later = self.answers.pop(name)
            assert num_external_tokens == count
            if later:
                self._wait(self.loading, name)
        _lent(super().update_state_after_alloc, request, blocks, num_external_tokens)  # type: ignore[misc]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Orders that reach other processes, and leave the schedule alone."""
        meta = _lent(super().build_connector_meta, scheduler_output)  # type: ignore[misc]
        packed = pickle.dumps(meta)
        assert len(packed) <= META_BYTES, f"{len(packed)} bytes of orders"
        return pickle.loads(packed)  # noqa: S301 - our own, of this moment

    def update_connector_output(self, connector_output: Any) -> None:
        """Reports of all ranks."""
        _lent(super().update_connector_output, connector_output)  # type: ignore[misc]
        received, sent = connector_output.finished_recving or set(), connector_output.finished_sending or set()
        assert received <= self.loading.keys(), "the engine forgot, or never heard of, this load"
        assert sent <= self.held.keys(), "the engine does not keep these blocks for us"
        for waits, ended in ((self.loading, received), (self.held, sent)):
            for name in ended:
                del waits[name]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Once a request's life."""
        return self._finish(super().request_finished, request, block_ids)  # type: ignore[misc]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Once a request's life."""
        return self._finish(super().request_finished_all_groups, request, block_ids)  # type: ignore[misc]

    def _progress(self, request_id: str) -> tuple[str, int]:
        """Where a request stands on the connector's own account, and how much has happened to it."""
        sides = getattr(getattr(self, "_scheduler", None), "sides", ())
        entry = next((one for side in sides if (one := side._ledger.entry(request_id)) is not None), None)
        return (str(entry.phase), len(entry.story)) if entry is not None else ("", 0)

    def load_failed(self, request_id: str) -> None:
        """The engine found a load incomplete."""
        self.failed.add(request_id)

    def _wait(self, waits: dict[str, int], name: str) -> None:
        self._waits += 1
        waits[name] = self._waits

    def _finish(self, call: Callable[..., Any], request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        assert name in self.known, "finished twice"
        self.known.remove(name)
        self.finished.add(name)
        self.answers.pop(name, None)
        hold, params = _lent(call, request, block_ids)
        assert not (hold and name in self.loading), "its blocks would be freed twice: for the load and for the save"
        if hold:
            self._wait(self.held, name)
        return hold, params


class WorkerGuard:
    """One rank's half."""

    def watch(self, scheduler: SchedulerGuard) -> None:
        """Begin. ``scheduler``: the engine's only one; looked at, never told."""
        self._guard = scheduler
        self._reported: set[int] = set()
        self._bound = False

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Comes before the metadata is bound."""
        assert not self._bound
        super().handle_preemptions(kv_connector_metadata)  # type: ignore[misc]

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins."""
        self._bound = True
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]

    def clear_connector_metadata(self) -> None:
        """A step has ended."""
        self._bound = False
        super().clear_connector_metadata()  # type: ignore[misc]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Names once a rank and wait of the engine, and only of requests it waits for."""
        results = _lent(super().get_transfer_results, finished_req_ids)  # type: ignore[misc]
        received, sent = set(results.finished_recving or ()), set(results.finished_sending or ())
        assert set(results.failed_recving) <= received, "a failure that is reported before its load's end"
        for kind, names, waited in (("load", received, self._guard.loading), ("save", sent, self._guard.held)):
            for name in names:
                assert name in waited, f"the end of a {kind} of {name}, which the engine does not wait for"
                assert waited[name] not in self._reported, f"the end of a {kind} of {name}, reported twice by a rank"
                self._reported.add(waited[name])
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Once read, they are gone."""
        found: set[int] = set(super().get_block_ids_with_load_errors())  # type: ignore[misc]
        assert not super().get_block_ids_with_load_errors(), "told twice"  # type: ignore[misc]
        return found

    def build_connector_worker_meta(self) -> Any:
        """What crosses to the scheduler's process."""
        meta = super().build_connector_worker_meta()  # type: ignore[misc]
        packed = pickle.dumps(meta)
        assert len(packed) <= META_BYTES, f"{len(packed)} bytes of reports"
        return pickle.loads(packed)  # noqa: S301 - our own, of this moment
