"""Names that take a while: identities of adapters and digests of embeddings, made beside the scheduler.

The scheduler waits for one as it does for a lookup: a moment in each step, and not longer than its time-out.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from kvrelay.errors import ConfigError
from kvrelay.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.connector.adapters import Adapter, Adapters
    from kvrelay.identity.core.chunks import Extra

log = logging.getLogger(__name__)

WAIT_S = 0.0009
"""How long the scheduler may wait for names and adapters in one step, all requests together."""
BUG = "kvrelay: a bug: a request has no name, the engine goes on"
Digests: TypeAlias = "Callable[[int], Sequence[Extra]]"


class Name(Struct, frozen=True):
    """What a request's keys need beside its tokens and its tenant's salt."""

    lora: str | None
    extras: tuple[Extra, ...]


class _Pending(Struct):
    future: Future[Name]
    until: float
    adapter: Adapter | None


class _Check(Struct):
    future: Future[str]
    until: float


class Naming:
    """The names being made for one scheduler, by request. Owned by its thread."""

    def __init__(
        self, adapters: Adapters | None, *, chunk_tokens: int, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """``timeout_s``: how long a request may wait for its own."""
        self._adapters = adapters
        self._chunk_tokens = chunk_tokens
        self._timeout_s = timeout_s
        self._clock = clock
        self._pending: dict[str, _Pending] = {}
        self._checks: dict[int, _Check] = {}
        """Of adapters, by number, that are under way or were done in this step."""
        self._told: set[tuple[int, str]] = set()
        self._patience = WAIT_S
        self._thread: ThreadPoolExecutor | None = None

    def new_step(self) -> None:
        """From now on there is a step's patience again."""
        self._patience = WAIT_S
        self._checks = {number: check for number, check in self._checks.items() if not check.future.done()}

    def begin(self, request_id: str, adapter: Adapter | None, digests: Digests | None) -> None:
        """Make a request's name. ``digests``: of what is in its prompt beside tokens, by chunks of the size given."""
        future = self._started().submit(self._make, adapter, digests)
        self._pending[request_id] = _Pending(future, self._clock() + self._timeout_s, adapter)

    def _started(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvrelay names")
        return self._thread

    def _make(self, adapter: Adapter | None, digests: Digests | None) -> Name:
        lora = self._identity(adapter) if adapter is not None else None
        return Name(lora, tuple(digests(self._chunk_tokens)) if digests is not None else ())

    def _identity(self, adapter: Adapter) -> str:
        if self._adapters is None:
            raise ConfigError("this engine has no adapters")
        return self._adapters.identity(adapter)

    def check(self, adapter: Adapter) -> None:
        """Compare an adapter's files with what they were when it was named; all that ask in one step share one look."""
        if adapter.number not in self._checks:
            future = self._started().submit(self._identity, adapter)
            self._checks[adapter.number] = _Check(future, self._clock() + self._timeout_s)

    def checked(self, adapter: Adapter) -> bool | None:
        """Whether an adapter is what it was named, after `check` in this step; None: not known yet."""
        check = self._checks[adapter.number]
        began = self._clock()
        try:
            check.future.result(self._patience)
        except TimeoutError:
            if self._clock() < check.until:
                return None
            self._tell(adapter, f"not within {self._timeout_s:g} s")
            return False
        except Exception as error:
            if not isinstance(error, ConfigError | OSError):
                log.exception(BUG)
            self._tell(adapter, str(error))
            return False
        finally:
            self._patience = max(0.0, self._patience - (self._clock() - began))
        return True

    def answer(self, request_id: str) -> Name | Reason | None:
        """The name, or why there is none; None: not yet."""
        pending = self._pending[request_id]
        reason = Reason.ADAPTER if pending.adapter is not None else Reason.NO_KEYS
        began = self._clock()
        try:
            name = pending.future.result(self._patience)
        except TimeoutError:
            if self._clock() < pending.until:
                return None
            self._tell(pending.adapter, f"not within {self._timeout_s:g} s")
            del self._pending[request_id]
            return reason
        except Exception as error:
            if not isinstance(error, ConfigError | OSError):
                log.exception(BUG)
            self._tell(pending.adapter, str(error))
            del self._pending[request_id]
            return reason
        finally:
            self._patience = max(0.0, self._patience - (self._clock() - began))
        del self._pending[request_id]
        return name

    def _tell(self, adapter: Adapter | None, why: str) -> None:
        """Once for each adapter and cause: every request with it would say the same."""
        number = adapter.number if adapter is not None else 0
        if (number, why) not in self._told:
            self._told.add((number, why))
            what = f"adapter {adapter.name!r}" if adapter is not None else "a prompt's embeddings"
            log.warning("kvrelay: %s cannot be identified, its KV is neither saved nor loaded: %s", what, why)

    def end(self, request_id: str) -> None:
        """Nobody waits for a request's name any more."""
        self._pending.pop(request_id, None)

    def end_all(self) -> None:
        """Nobody waits for any."""
        self._pending.clear()

    def close(self) -> None:
        """Stop after what is under way."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
