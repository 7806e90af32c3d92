"""vLLM's OffloadingConnector: each engine keeps evicted blocks in its own host memory. Nothing is handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrelay.profiles.base import EngineSetup, Profile, with_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.launch.core.settings import UpSettings
    from kvrelay.router.core.legs import ClientBody

HOST_BYTES = 4 << 30


class Offloading(Profile):
    """Decode engines alone, each with more room for its own cache."""

    name = "offloading"
    hands_over = False

    def refusals(self, settings: UpSettings, *, cpu: bool) -> Iterator[str]:  # noqa: ARG002
        """It moves blocks out of a device's memory, and a CPU engine has none."""
        if cpu:
            yield (
                "connector offloading: vLLM 0.32 offloads from CUDA-like and XPU devices only ('CPU Offloading is "
                "currently only supported on CUDA-alike and XPU GPUs'), and these engines run on the CPU; use "
                "--connector kvrelay, whose pool keeps KV in host memory, or give a larger --kv-cache-memory"
            )

    def notes(self, settings: UpSettings) -> Iterator[str]:  # noqa: ARG002
        """No claim of a hand-over."""
        yield "connector offloading: nothing is handed over: each decode engine answers alone and reuses its own KV"
        yield "connector offloading: not run by kvrelay's own tests, which have no GPU"

    def transfer_config(self, setup: EngineSetup) -> dict[str, Any]:
        """As vLLM documents it."""
        config = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES},
        }
        return with_options(config, setup.settings.connector_options)

    def bypass(self, body: ClientBody) -> str:  # noqa: ARG002
        """Always."""
        return "no_handover"
