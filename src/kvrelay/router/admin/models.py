"""What the router's admin API takes and gives, as its OpenAPI description shows it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvrelay.admin.answers import Model

RoleName = Literal["prefill", "decode"]


class EngineView(Model):
    """One engine, as it is now."""

    name: str
    role: RoleName
    url: str
    state: str = Field(description="serving, draining (no new requests) or leaving (gone once nobody needs it)")
    resting: bool = Field(description="passed over after failures, of requests or of probes")
    down: bool = Field(description="by its probes")
    failures: int = Field(description="requests in a row that it failed")
    in_flight: int = Field(description="requests on it")
    handovers: int = Field(description="prompts it has prefilled and no decode engine has taken yet")
    configured: bool = Field(description="named by flags or the configuration, not added here")
    kv_events: list[str] = Field(description="where its ranks publish what their KV caches hold: ENDPOINT[,REPLAY]")


class Engines(Model):
    """Everybody."""

    engines: list[EngineView]


class NewEngine(Model):
    """An engine that is to join."""

    role: RoleName
    url: str = Field(description="http:// or https://HOST:PORT, maybe with a path")
    name: str = Field(default="", description="its name in headers and metrics; the next of its role if empty")
    kv_events: list[str] | None = Field(
        default=None, description="as of kv-events; what the configuration says of the URL if left out"
    )


class KvEvents(Model):
    """Where an engine publishes what its KV cache holds."""

    kv_events: list[str] = Field(description="ENDPOINT or ENDPOINT,REPLAY of each data-parallel rank in turn")


class NewRole(Model):
    """What an engine is to be asked for."""

    role: RoleName


class Reloaded(Model):
    """What a new configuration changed."""

    added: list[str] = Field(description="engines that joined")
    kept: list[str] = Field(description="engines that were leaving, or were added here, and are configured now")
    moved: list[str] = Field(description="engines that have another role")
    leaving: list[str] = Field(description="engines that are gone once nobody needs them")
    settings: list[str] = Field(description="settings that have another value")
