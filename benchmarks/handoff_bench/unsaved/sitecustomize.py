"""Found first on the path of a measured prefill engine: a prompt that says so is not saved, or not even known.

It says so in its ``kv_transfer_params``. So what saving costs is seen between prompts of one engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrelay.connector.calls import SchedulerCalls
from kvrelay.connector.core.ledger import Ledger
from kvrelay.testing.resting import sitecustomize as _rests  # noqa: F401

if TYPE_CHECKING:
    from kvrelay.connector.core.requests import Entry

_on_new_request, _has_unsaved = SchedulerCalls.on_new_request, Ledger.has_unsaved
_unsaved: set[str] = set()


def _begin(self: SchedulerCalls, request: Any) -> None:
    kind = (request.kv_transfer_params or {}).get("benchmark")
    if kind == "unsaved":
        _unsaved.add(request.request_id)
    if kind != "unknown":
        _on_new_request(self, request)


def _completes(self: Ledger, entry: Entry, computed: int) -> bool:
    return entry.request_id not in _unsaved and _has_unsaved(self, entry, computed)


SchedulerCalls.on_new_request = _begin  # type: ignore[method-assign]
Ledger.has_unsaved = _completes  # type: ignore[method-assign]
