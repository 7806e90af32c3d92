"""vLLM's MultiConnector over two others: NIXL hands over, kvrelay's pool keeps.

Each prompt is saved to the pool and described to NIXL. The decode side loads from the first that has something: NIXL
for what one reader reads, the pool for the rest (batches of prompts, several continuations, what a decode engine lost).
The prefill side loads earlier prefixes from the pool. The proof is the pool's connector's: it sees how many tokens were
there without being computed, and counts the bytes of its own loads only: none, when NIXL moved them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.profiles.base import EngineSetup, Pool, Profile, params_of, reader_bypass
from kvrelay.profiles.nixl import PACKAGE, replicas_refused, side_channel, transfer_config
from kvrelay.profiles.pooled import KvRelay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.launch.core.settings import UpSettings
    from kvrelay.profiles.base import DecodeLeg
    from kvrelay.router.core.legs import ClientBody

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Multi(Profile):
    """NIXL first, then the pool."""

    name = "multi"
    pool = Pool.PROCESS
    hands_over_without_pool = True
    requires = (PACKAGE,)
    num_ports = 1

    def __init__(self) -> None:
        """Made of the parts' profiles."""
        self._pooled = KvRelay()

    def refusals(self, settings: UpSettings, *, cpu: bool) -> Iterator[str]:  # noqa: ARG002
        """NIXL's."""
        yield from replicas_refused(self.name, settings)

    def transfer_config(self, setup: EngineSetup) -> dict[str, Any]:
        """``connector_options`` are those of the pool's connector."""
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "connectors": [transfer_config("NixlConnector", setup), self._pooled.transfer_config(setup)]
            },
        }

    def environment(self, setup: EngineSetup) -> dict[str, str]:
        """The side channel."""
        return side_channel(setup)

    def prefill_params(self, handover: str, worker: str, body: ClientBody) -> bytes | None:
        """Blocks are kept only where one reader will come for them; chunks are saved in any case."""
        keep = not reader_bypass(body)
        return _encode(
            {
                "do_remote_decode": keep,
                "do_remote_prefill": False,
                "kvrelay": {"handover": handover, "leg": "prefill", "worker": worker},
            }
        )

    def carry(self, answer: bytes) -> bytes | None:
        """The description of the blocks; without one the pool has it all the same."""
        return params_of(answer) or b""

    def decode_params(self, leg: DecodeLeg, carried: bytes | None) -> bytes | None:
        """NIXL's, if there are any, and the hand-over's name.

        ``do_remote_prefill`` without a description makes NIXL claim tokens it cannot load, which kills the engine.
        """
        told = _decode(carried) if carried else {"do_remote_prefill": msgspec.Raw(b"false")}
        return _encode({**told, "kvrelay": msgspec.Raw(_encode(leg.named()))})

    def spent(self, carried: bytes | None) -> bytes | None:
        """The blocks are, the pool's objects are not."""
        return None if carried is None else b""
