"""What can go wrong while a plan runs."""

from __future__ import annotations

import signal

from kvrelay.errors import Fault, KvRelayError


class ProcessDiedError(KvRelayError):
    """A process the service cannot do without has ended on its own."""

    fault = Fault.ENVIRONMENT
    code = "process_died"
    http_status = 503


def describe_status(status: int) -> str:
    """An exit status for a reader: ``status 1``, ``signal 9 (SIGKILL)``."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"
