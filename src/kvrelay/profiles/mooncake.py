"""vLLM's MooncakeStoreConnector: KV in a Mooncake store that the user runs, found by content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrelay.profiles.base import EngineSetup, Profile, Requirement, with_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.launch.core.settings import UpSettings

STORE = "MOONCAKE_CONFIG_PATH"


class Mooncake(Profile):
    """Both sides reach the KV through the store that Mooncake's own configuration names."""

    name = "mooncake"
    requires = (Requirement("mooncake", "pip install mooncake-transfer-engine"),)

    def refusals(self, settings: UpSettings, *, cpu: bool) -> Iterator[str]:
        """Both of vLLM's Mooncake connectors ask torch for an accelerator; the store has no default."""
        if cpu:
            yield (
                "connector mooncake: vLLM 0.32's Mooncake connectors need an accelerator (MooncakeConnector: 'Cannot "
                "access accelerator device when none is available', MooncakeStoreConnector: it saves behind a CUDA "
                "event), and these engines run on the CPU; use --connector kvrelay or nixl"
            )
        for role in ("prefill", "decode"):
            if getattr(settings, role).count and STORE not in settings.role(role).env:
                yield (
                    f"connector mooncake: no store for {role} engines: set {STORE} in [engine.env] to the file that "
                    "names Mooncake's master and metadata server"
                )

    def notes(self, settings: UpSettings) -> Iterator[str]:  # noqa: ARG002
        """What is not known."""
        yield "connector mooncake: nothing proves a hand-over; not run by kvrelay's own tests, which have no GPU"

    def transfer_config(self, setup: EngineSetup) -> dict[str, Any]:
        """As vLLM documents it."""
        config = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        return with_options(config, setup.settings.connector_options)
