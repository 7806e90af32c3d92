"""What can go wrong between the router and an engine. Each becomes a status the client can act on."""

from __future__ import annotations

from kvrelay.errors import DeadlineError, Fault, KvRelayError


class EngineError(KvRelayError):
    """Base: an engine did not do its part. ``code`` is also the reason in metrics and records."""

    fault = Fault.PEER
    retryable = True
    code = "engine"
    http_status = 502

    @property
    def told(self) -> str:
        """What clients are told, who need not know where engines are; the error itself is for the log."""
        return str(self)


class EngineUnreachableError(EngineError):
    """No connection: refused, reset while connecting, no route, unknown host."""

    code = "unreachable"
    http_status = 503

    @property
    def told(self) -> str:
        """Without its address, and what is the matter there."""
        return "there is no connection to it"


class EngineLostError(EngineError):
    """The connection ended, or broke the protocol, before the answer was whole."""

    code = "connection_lost"


class EmptyAnswerError(EngineError):
    """The engine answered 200, and nothing else."""

    code = "empty_answer"


class UnfinishedStreamError(EngineError):
    """The engine ended a stream in order, and did not say that it is done."""

    code = "unfinished_stream"


class EngineSilentError(EngineError, DeadlineError):
    """The engine said nothing for as long as it was given."""

    code = "timeout"
    http_status = 504


class AnswerTooLargeError(EngineError):
    """The engine's answer is longer than the router will hold."""

    code = "answer_too_large"
