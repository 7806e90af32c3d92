"""Who is asked next: what a policy sees, what it says, and what is asked of every policy.

A policy is asked once for each leg to be sent. It sees a request and those engines of one role that may be asked, as
they are at that moment, and names one of them. Engines join and leave between two calls; a policy keeps what it must
remember by name. Clock and randomness are handed in: a router and a simulator drive the same code.

`select` is how both ask: it keeps what is the same for all policies, that no draining or resting engine is chosen.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrelay.router.core.fleet import Role


class Rng(Protocol):
    """The part of `random.Random` that policies use."""

    def random(self) -> float:
        """From 0 up to, not including, 1."""

    def randrange(self, stop: int, /) -> int:
        """From 0 up to, not including, ``stop``."""


class Want(Enum):
    """What of a request a policy looks at beyond its size: the shell finds out only what is wanted."""

    SESSION = auto()
    PREFIX = auto()
    TOKENS = auto()
    LATENCY = auto()
    """Of engines: `EngineView.ttft_s` and `EngineView.itl_s`."""


class RequestView(Struct, frozen=True):
    """A request, as far as it matters to where it goes."""

    num_tokens: int = 0
    """Of the prompt, estimated for text; of a batch, all prompts together."""
    session: bytes = b""
    """What the requests of one session have in common; empty if nothing is known."""
    prefix: tuple[int, ...] = ()
    """Hashes of ever longer beginnings of the prompt (`kvrelay.router.core.policy.prefixes`), model, adapter and cache
    salt included: two requests whose first n agree have the same first n pieces."""
    num_bytes: int = 0
    """Of the text that these are of."""
    tokens: Sequence[int] = ()
    """The prompt's token ids, where they are known."""
    model: str = ""
    """As the client named it: a base model or an adapter."""
    salt: str = ""
    """The request's ``cache_salt``."""


NO_REQUEST = RequestView()
"""For what has no prompt: a request that is passed on."""


class EngineView(Struct, frozen=True):
    """One engine at one moment."""

    name: str
    role: Role
    order: int = 0
    """Rises with every engine that joins: the order of rotation."""
    resting: bool = False
    """It failed lately: others are asked first."""
    resting_until: float = 0.0
    draining: bool = False
    """It is to take no more requests."""
    in_flight: int = 0
    """Requests of ours it works on."""
    in_flight_tokens: int = 0
    """Of their prompts, estimated."""
    ttft_s: float | None = None
    """How long it lately took to answer, smoothed; None before the first answer."""
    itl_s: float | None = None
    """Lately between two tokens of a stream, smoothed."""


class Snapshot(Struct, frozen=True):
    """The engines of one role that may be asked for one leg: without those that were tried for it already."""

    now: float
    engines: tuple[EngineView, ...]


class Choice(Struct, frozen=True):
    """An engine's name, and why it: a word for the metrics, the same few for all requests."""

    engine: str
    why: str


class Policy:
    """One policy for one role. Subclasses say how to choose; the rest may stay as it is.

    All methods return at once, and within a time that grows at most linearly with the number of engines and the length
    of the prompt.
    """

    name: ClassVar[str]
    """What ``--policy`` takes."""
    wants: ClassVar[frozenset[Want]] = frozenset()

    def choose(self, request: RequestView, engines: Sequence[EngineView], now: float, rng: Rng) -> Choice:
        """One of ``engines``: at least one, by rising `EngineView.order`, none draining, all resting or none.

        May change what the policy remembers: it is called for requests that are then sent.
        """
        raise NotImplementedError

    def cached(self, request: RequestView) -> Mapping[str, int]:  # noqa: ARG002
        """How many of the prompt's first tokens engines have in their own caches, by their own word; none if missing.

        Changes nothing.
        """
        return {}

    def forget(self, engine: str) -> None:
        """The engine is gone, or has lost its cache."""


def select(policy: Policy, request: RequestView, fleet: Snapshot, rng: Rng) -> Choice | None:
    """Who is asked; None if nobody may be. When all engines rest, one whose rest ends first."""
    engines: Sequence[EngineView] = fleet.engines
    for engine in engines:
        if engine.resting or engine.draining:
            engines = _usable(engines)
            break
    return policy.choose(request, engines, fleet.now, rng) if engines else None


def _usable(engines: Sequence[EngineView]) -> list[EngineView]:
    staying = [engine for engine in engines if not engine.draining]
    well = [engine for engine in staying if not engine.resting]
    if well or not staying:
        return well
    soonest = min(engine.resting_until for engine in staying)
    return [engine for engine in staying if engine.resting_until == soonest]
