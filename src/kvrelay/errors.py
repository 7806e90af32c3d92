"""The one error tree.

Every error says whose fault it is, whether trying again can help, the code it has on the wire and the HTTP status it
becomes. A message names the bad value and the legal ones. Corruption is an error of its own, never a miss.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class Fault(Enum):
    """Whose fault an error is: who has to change something for it to go away."""

    CALLER = "caller"
    PEER = "peer"
    US = "us"
    ENVIRONMENT = "environment"


class KvRelayError(Exception):
    """Base of every error kvrelay raises on purpose."""

    fault: ClassVar[Fault] = Fault.US
    retryable: ClassVar[bool] = False
    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500


class ConfigError(KvRelayError):
    """A flag, file or environment value that cannot work. Carries every problem found, not just the first."""

    fault = Fault.CALLER
    code = "config"
    http_status = 400

    def __init__(self, *problems: str) -> None:
        """``problems``: one line each, naming the value and the mend."""
        self.problems = problems
        super().__init__("\n".join(problems))


class BadRequestError(KvRelayError):
    """The caller asked for something malformed or impossible."""

    fault = Fault.CALLER
    code = "bad_request"
    http_status = 400


class UnauthorizedError(KvRelayError):
    """A token is missing or wrong."""

    fault = Fault.CALLER
    code = "unauthorized"
    http_status = 401


class NotFoundError(KvRelayError):
    """The named object, lease or ticket does not exist (any more)."""

    fault = Fault.CALLER
    code = "not_found"
    http_status = 404


class ConflictError(KvRelayError):
    """The request contradicts what is stored, such as other bytes or another geometry under the same key."""

    fault = Fault.CALLER
    code = "conflict"
    http_status = 409


class PoolFullError(KvRelayError):
    """No room: everything that could be evicted is leased, pinned or being written."""

    fault = Fault.ENVIRONMENT
    retryable = True
    code = "pool_full"
    http_status = 507
    WHY: ClassVar[str] = (
        "what is leased, pinned or being written stays in it, and no object can be larger than its arena"
    )
    """Why a client finds no room, as it says it where no bound of its tenant is reached."""


class DrainingError(KvRelayError):
    """The pool is being emptied: it answers readers and takes nothing new."""

    fault = Fault.ENVIRONMENT
    retryable = True
    code = "draining"
    http_status = 503


class WriterLostError(KvRelayError):
    """The object a reader waited for was aborted: its writer died, gave up, or ran past its deadline."""

    fault = Fault.PEER
    retryable = True
    code = "writer_lost"
    http_status = 503


class LeaseExpiredError(KvRelayError):
    """The lease ran out before the work under it was done: what was read under it must not be used."""

    fault = Fault.CALLER
    retryable = True
    code = "lease_expired"
    http_status = 503


class DeadlineError(KvRelayError):
    """Something did not happen within the time given for it."""

    fault = Fault.ENVIRONMENT
    retryable = True
    code = "deadline"
    http_status = 504


class CorruptionError(KvRelayError):
    """Bytes do not match their checksum. Never a miss: it is counted, logged and the object quarantined."""

    fault = Fault.ENVIRONMENT
    code = "corruption"
    http_status = 500


class ProtocolError(KvRelayError):
    """The peer sent something the protocol does not allow. The connection is closed."""

    fault = Fault.PEER
    code = "protocol"
    http_status = 502


class VersionError(KvRelayError):
    """The two ends speak no common protocol version."""

    fault = Fault.PEER
    code = "version"
    http_status = 502


class PoolUnavailableError(KvRelayError):
    """The pool cannot be reached, or the connection to it was lost."""

    fault = Fault.ENVIRONMENT
    retryable = True
    code = "unavailable"
    http_status = 503


BY_CODE: dict[str, type[KvRelayError]] = {
    cls.code: cls
    for cls in (
        KvRelayError, BadRequestError, UnauthorizedError, NotFoundError, ConflictError, PoolFullError, DrainingError,
        WriterLostError, LeaseExpiredError, DeadlineError, CorruptionError, ProtocolError, VersionError,
        PoolUnavailableError,
    )
}  # fmt: skip
"""Wire code to class. ``ConfigError`` never crosses the wire."""


def from_code(code: str, message: str) -> KvRelayError:
    """The error a peer reported, as an exception; an unknown code (a newer peer) becomes the base class."""
    return BY_CODE.get(code, KvRelayError)(message)
