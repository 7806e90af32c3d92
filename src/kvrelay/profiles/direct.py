"""kvrelay's own connector without a pool beside it: the prefill engine runs one in its own process group.

Everything else is as with the pool: KV is found by content, leased, verified and proven. What the prefill engine holds
goes with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrelay.launch.core.engine import replicas_of
from kvrelay.profiles.base import EngineSetup, Pool
from kvrelay.profiles.pooled import KvRelay
from kvrelay.types import Dispatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.launch.core.settings import UpSettings


RECONNECT_S = 0.25
"""Ranks are there before the pool, and decode engines may be: it comes late in the prefill engine's start."""


class Direct(KvRelay):
    """Each prefill engine's host memory serves any number of decode engines, which are told all its addresses."""

    name = "direct"
    pool = Pool.EMBEDDED

    def refusals(self, settings: UpSettings, *, cpu: bool) -> Iterator[str]:  # noqa: ARG002
        """What would need one pool that all engines use."""
        count, replicas = settings.prefill.count, replicas_of(settings.role("prefill"))
        alone = "; use --prefill 1, or --connector kvrelay, whose pool serves any number"
        if count > 1 and settings.pool.port:
            port = settings.pool.port
            yield f"connector direct: pool.port = {port}: {count} prefill engines cannot share a port{alone}"
        if count > 1 and settings.dispatch is Dispatch.DECODE_FIRST:
            yield (
                "connector direct: dispatch = decode-first: a decode engine that is asked before a prefill engine is "
                f"chosen does not know in which of {count} pools to look{alone}"
            )
        if count > 1 and settings.router.pool_index:
            yield (
                f"connector direct: router.pool_index: what one of {count} pools holds, a decode engine finds only "
                f"behind the prefill engine that runs it{alone}"
            )
        if replicas > 1:
            yield (
                f"connector direct: prefill.data_parallel_size = {replicas}: each replica would run a pool at the same "
                "address; use --prefill-data-parallel-size 1, or --connector kvrelay"
            )
        if settings.pool.args:
            yield (
                "connector direct: pool.args have no effect on a pool that the prefill engine runs; leave "
                "--pool-args out, or use --connector kvrelay"
            )

    def notes(self, settings: UpSettings) -> Iterator[str]:
        """Whose memory it is."""
        whose = "each" if settings.prefill.count > 1 else "the"
        yield f"connector direct: {whose} prefill engine's own pool serves the decode engines, and ends with it"

    def transfer_config(self, setup: EngineSetup) -> dict[str, Any]:
        """The prefill engine is told to run what the others connect to."""
        config = super().transfer_config(setup)
        config["kv_connector_extra_config"] = {"reconnect_s": RECONNECT_S, **config["kv_connector_extra_config"]}
        if setup.role == "prefill":
            pool = setup.settings.pool
            config["kv_connector_extra_config"] |= {
                "embedded_pool": str(pool.size),
                **({"embedded_listen": f"{setup.host}:{pool.port}"} if pool.port else {}),
            }
        return config
