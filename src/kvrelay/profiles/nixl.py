"""vLLM's NIXL connectors: the prefill side's blocks go straight to the decode side's, read by it or written to it.

A description of blocks serves one engine request. A batch of prompts gets only the first one's description back, and
several continuations would share one that is void after the first read: both would decode from the wrong KV, so they go
to a decode engine alone. So does what never asks for the blocks, which would stay pinned on the prefill side until its
own deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrelay.launch.core.engine import replicas_of
from kvrelay.profiles.base import EngineSetup, Profile, Requirement, params_of, reader_bypass, with_options
from kvrelay.router.core.legs import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.launch.core.settings import UpSettings
    from kvrelay.profiles.base import DecodeLeg
    from kvrelay.router.core.legs import ClientBody

KEEP_BLOCKS = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""For the prefill leg: keep the blocks for a reader to come."""
PACKAGE = Requirement("nixl", "pip install nixl")


def side_channel(setup: EngineSetup) -> dict[str, str]:
    """Where an engine's NIXL agent answers the others."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": setup.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(setup.ports[0])}


def transfer_config(connector: str, setup: EngineSetup) -> dict[str, Any]:
    """For any of the NIXL connectors."""
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        **({"kv_buffer_device": "cpu"} if setup.cpu else {}),
    }


def replicas_refused(connector: str, settings: UpSettings) -> Iterator[str]:
    """A replica's side channel takes the port after its neighbour's, which nobody has chosen."""
    for role in ("prefill", "decode"):
        if (replicas := replicas_of(settings.role(role))) > 1:
            yield (
                f"connector {connector}: {role}.data_parallel_size = {replicas}: the replicas' side channels would "
                f"take ports that may not be free; use --{role} {replicas} instead"
            )


class Nixl(Profile):
    """NixlConnector: the decode side reads (pulls)."""

    name = "nixl"
    requires = (PACKAGE,)
    num_ports = 1
    connector = "NixlConnector"

    def refusals(self, settings: UpSettings, *, cpu: bool) -> Iterator[str]:  # noqa: ARG002
        """See `replicas_refused`."""
        yield from replicas_refused(self.name, settings)

    def transfer_config(self, setup: EngineSetup) -> dict[str, Any]:
        """The same for both roles."""
        return with_options(transfer_config(self.connector, setup), setup.settings.connector_options)

    def environment(self, setup: EngineSetup) -> dict[str, str]:
        """The side channel."""
        return side_channel(setup)

    def bypass(self, body: ClientBody) -> str:
        """One engine request with one prompt whose KV is wanted is disaggregated."""
        return reader_bypass(body)

    def prefill_params(self, handover: str, worker: str, body: ClientBody) -> bytes | None:  # noqa: ARG002
        """Keep the blocks."""
        return KEEP_BLOCKS

    def carry(self, answer: bytes) -> bytes | None:
        """The description of the blocks."""
        return params_of(answer)

    def decode_params(self, leg: DecodeLeg, carried: bytes | None) -> bytes | None:  # noqa: ARG002
        """What the prefill side said."""
        return carried

    def spent(self, carried: bytes | None) -> bytes | None:  # noqa: ARG002
        """Blocks can be read once."""
        return None


class NixlPush(Nixl):
    """NixlPushConnector: the decode side says where, the prefill side writes (pushes).

    The two find each other by the request's id, so that two requests of one id would get each other's KV: the router
    makes the ids.
    """

    name = "nixl-push"
    connector = "NixlPushConnector"
    names_requests = True

    def bypass(self, body: ClientBody) -> str:
        """As `Nixl`; and a response's engine request is named by its body, which the two engines do not share."""
        return "request_id" if body.endpoint is Endpoint.RESPONSES else reader_bypass(body)
