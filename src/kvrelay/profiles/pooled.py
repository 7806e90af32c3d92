"""kvrelay's own connector, over a pool: content-addressed, so any number of engine requests may load one prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.profiles.base import EngineSetup, Pool, Profile, with_options

if TYPE_CHECKING:
    from kvrelay.profiles.base import DecodeLeg
    from kvrelay.router.core.legs import ClientBody

_encode = msgspec.json.Encoder().encode


class KvRelay(Profile):
    """The decode side finds the KV by content: nothing has to be carried."""

    name = "kvrelay"
    pool = Pool.PROCESS
    tells_of_losses = True
    overlaps = True
    continues = True

    def transfer_config(self, setup: EngineSetup) -> dict[str, Any]:
        """Prefill engines load as well as save, so that they reuse prefixes."""
        settings = setup.settings
        token_file = settings.pool.token_file
        config = {
            "kv_connector": "KvRelayConnector",
            "kv_connector_module_path": "kvrelay.connector.vllm",
            "kv_role": "kv_both" if setup.role == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                **({"pools": dict(setup.pools)} if setup.pools else {"pool": setup.pool}),
                "engine": setup.engine,
                "chunk_tokens": settings.chunk_tokens,
                **({"token_file": str(token_file)} if token_file else {}),
            },
        }
        return with_options(config, settings.connector_options)

    def prefill_params(self, handover: str, worker: str, body: ClientBody) -> bytes | None:  # noqa: ARG002
        """Names the hand-over, which is the pool ticket that the prefill side's objects go under."""
        return _encode(
            {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "kvrelay": {"handover": handover, "leg": "prefill", "worker": worker},
            }
        )

    def decode_params(self, leg: DecodeLeg, carried: bytes | None) -> bytes | None:  # noqa: ARG002
        """Also given when nobody prefilled: the decode side then still tells what it found and recomputed."""
        return _encode(
            {
                "do_remote_prefill": bool(leg.prefill),
                "do_remote_decode": False,
                "kvrelay": leg.named(),
            }
        )
