"""A connector's profile: all that `kvrelay up` and the router must know of it, in one place.

To add a connector, write one module with a subclass of `Profile` and name it in `kvrelay.profiles.registry`. The
launcher asks a profile what to check, what to tell vLLM and whether to start a pool; the router asks it what to give
the two legs of a request and what to carry from the one to the other. Profiles are stateless.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from msgspec import Raw, Struct

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvrelay.launch.core.settings import UpSettings
    from kvrelay.router.core.legs import ClientBody
    from kvrelay.types import OnLostKv


class Pool(Enum):
    """Whether kvrelay's pool has a part in the hand-over, and who runs it."""

    NONE = auto()
    PROCESS = auto()
    """A process of its own, started before the engines."""
    EMBEDDED = auto()
    """The prefill engine runs it: it comes and goes with that engine."""


class Requirement(Struct, frozen=True):
    """A Python module that must be installed where the engines run."""

    module: str
    install: str
    """The command that installs it."""


class EngineSetup(Struct, frozen=True, kw_only=True):
    """What is decided of one engine before its connector is configured."""

    engine: str
    """Its name: P0, P1, ..., D0, ..."""
    role: Literal["prefill", "decode"]
    host: str
    """Where it listens."""
    cpu: bool
    ports: tuple[int, ...] = ()
    """Free ports for the connector, as many as the profile asks for."""
    pool: str = ""
    """Address of the pool, where the engine has one."""
    pools: Mapping[str, str] = {}
    """Addresses of the pools of several prefill engines, by their names, where it has those instead."""
    run_dir: str = ""
    settings: UpSettings


class DecodeLeg(Struct, frozen=True, kw_only=True):
    """One decode leg, as kvrelay's connector is told of it on its engine."""

    handover: str
    worker: str
    prefill: str
    """Who prefilled; empty if nobody did."""
    policy: OnLostKv
    """What the decode side does if it cannot have the KV."""
    attempt: int = 1
    """Which decode leg of the hand-over this is."""
    overlapped: bool = False
    """The prefill leg is still under way."""
    generated: int = 0
    """How many tokens at the end of its prompt the prefill engine generated."""

    def named(self) -> dict[str, Any]:
        """For ``kv_transfer_params["kvrelay"]``."""
        return {
            **({"overlapped": True} if self.overlapped else {}),
            **({"generated": self.generated} if self.generated else {}),
            "handover": self.handover,
            "leg": "decode",
            "prefill": self.prefill,
            "worker": self.worker,
            "policy": self.policy,
            "attempt": self.attempt,
        }


class Profile:
    """One connector. The defaults are those of a connector that hands over and needs nothing."""

    name: ClassVar[str]
    """What ``--connector`` takes."""
    pool: ClassVar[Pool] = Pool.NONE
    hands_over: ClassVar[bool] = True
    """Whether KV gets from P to D at all. If not, decode engines answer alone and no prefill engine is started."""
    hands_over_without_pool: ClassVar[bool] = False
    """Of one with a pool: whether KV gets from P to D while that is away, too."""
    requires: ClassVar[tuple[Requirement, ...]] = ()
    num_ports: ClassVar[int] = 0
    """Free ports each engine needs for it."""
    names_requests: ClassVar[bool] = False
    """Whether engines find each other's requests by their ids: the router then makes them, whatever clients send."""

    tells_of_losses: ClassVar[bool] = False
    """Whether the decode side tells when it cannot have the KV: what ``--on-lost-kv`` other than recompute needs."""

    continues: ClassVar[bool] = False
    """Whether the decode side finds a prompt's KV when it is asked for the prompt and the prefill side's first token:
    what ``--first-token prefill`` needs."""

    overlaps: ClassVar[bool] = False
    """Whether the decode side can follow a prefill that is still going on: what ``--dispatch overlapped`` needs."""

    # --- the launcher ---

    def refusals(self, settings: UpSettings, *, cpu: bool) -> Iterator[str]:  # noqa: ARG002
        """Why this deployment cannot work, and what to change; nothing if it can."""
        yield from ()

    def notes(self, settings: UpSettings) -> Iterator[str]:  # noqa: ARG002
        """What a user should know when it starts."""
        yield from ()

    def transfer_config(self, setup: EngineSetup) -> dict[str, Any]:
        """The value of vLLM's ``--kv-transfer-config``."""
        raise NotImplementedError

    def arguments(self, setup: EngineSetup) -> list[str]:  # noqa: ARG002
        """More arguments for vLLM."""
        return []

    def environment(self, setup: EngineSetup) -> dict[str, str]:  # noqa: ARG002
        """More variables for vLLM."""
        return {}

    def folders(self, settings: UpSettings, run_dir: str) -> tuple[str, ...]:  # noqa: ARG002
        """Folders the launcher makes before the start and removes at the end."""
        return ()

    # --- the router ---

    @property
    def uses_pool(self) -> bool:
        """Whether hand-overs have tickets and proofs in a kvrelay pool."""
        return self.pool is not Pool.NONE

    def bypass(self, body: ClientBody) -> str:
        """Why this request is better sent to a decode engine alone; empty if it is to be disaggregated."""
        return "prompt_logprobs" if body.reads_no_kv else ""

    def prefill_params(self, handover: str, worker: str, body: ClientBody) -> bytes | None:  # noqa: ARG002
        """JSON for the prefill leg on ``worker``, None for none."""
        return None

    def carry(self, answer: bytes) -> bytes | None:  # noqa: ARG002
        """What the decode leg needs out of the prefill leg's answer (its body); None if the answer lacks it."""
        return b""

    def decode_params(self, leg: DecodeLeg, carried: bytes | None) -> bytes | None:  # noqa: ARG002
        """JSON for a decode leg, None for none. ``carried``: what `carry` found."""
        return None

    def spent(self, carried: bytes | None) -> bytes | None:
        """What is left of ``carried`` after an engine may have begun to read it; None if the hand-over is void."""
        return carried


class _Answer(Struct):
    kv_transfer_params: Raw = Raw(b"null")


_decode_answer = msgspec.json.Decoder(_Answer).decode


def params_of(answer: bytes) -> bytes | None:
    """An answer's ``kv_transfer_params``, opaque and byte for byte; None if it has none."""
    try:
        params = bytes(_decode_answer(answer).kv_transfer_params)
    except msgspec.MsgspecError:
        return None
    return params if params.startswith(b"{") else None


def reader_bypass(body: ClientBody) -> str:
    """Why a request cannot be handed over by blocks that one engine request reads once."""
    if body.reads_no_kv:
        return "prompt_logprobs"
    if body.is_beam_search:
        return "beam_search"
    return "several_engine_requests" if body.num_engine_requests > 1 else ""


def with_options(config: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the user's ``connector_options`` in its ``kv_connector_extra_config``, if there are any."""
    if not options:
        return config
    return {**config, "kv_connector_extra_config": {**config.get("kv_connector_extra_config", {}), **options}}
