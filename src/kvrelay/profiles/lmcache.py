"""LMCache's connector for vLLM: KV in LMCache's own store, found by content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrelay.profiles.base import EngineSetup, Profile, Requirement, with_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.launch.core.settings import UpSettings

STORES = ("LMCACHE_CONFIG_FILE", "LMCACHE_REMOTE_URL")


class LmCache(Profile):
    """Both sides reach the KV through a store that LMCache's own configuration names."""

    name = "lmcache"
    requires = (Requirement("lmcache", "pip install lmcache"),)

    def refusals(self, settings: UpSettings, *, cpu: bool) -> Iterator[str]:
        """Where it does nothing but cost time, and where the two sides would not meet."""
        if cpu:
            yield (
                "connector lmcache: LMCache 0.5.6 has no connector for engines on the CPU (it logs 'No supported cpu "
                "connector found', then each request waits 3 s for lookups that nobody answers); use --connector "
                "kvrelay"
            )
        for role in ("prefill", "decode"):
            if getattr(settings, role).count and not any(name in settings.role(role).env for name in STORES):
                yield (
                    f"connector lmcache: no store for {role} engines: without one that both sides reach, nothing is "
                    f"handed over; set {' or '.join(STORES)} in [engine.env]"
                )

    def notes(self, settings: UpSettings) -> Iterator[str]:  # noqa: ARG002
        """What is not known."""
        yield "connector lmcache: nothing proves a hand-over; not run by kvrelay's own tests, which have no GPU"

    def transfer_config(self, setup: EngineSetup) -> dict[str, Any]:
        """As LMCache documents it."""
        config = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        return with_options(config, setup.settings.connector_options)

    def environment(self, setup: EngineSetup) -> dict[str, str]:  # noqa: ARG002
        """Its keys are made with Python's hash: both sides need the same seed."""
        return {"PYTHONHASHSEED": "0"}
