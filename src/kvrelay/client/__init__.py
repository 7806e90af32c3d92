"""Talk to a pool: one sans-IO core, an asyncio and a blocking shell.

What users import is here, and looked up when it is asked for: a core that is imported alone pulls in no shell. The
errors that clients raise are in `kvrelay.errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.client.aio import AsyncPoolClient
    from kvrelay.client.blocking import PoolClient
    from kvrelay.client.blocking_link import PendingCall
    from kvrelay.client.core.blocks import Blocks
    from kvrelay.client.core.names import PrefixCount
    from kvrelay.client.core.prefix import Prefix, StagePart
    from kvrelay.client.core.puts import Puts
    from kvrelay.client.striped import AsyncStripedPoolClient, StripedPoolClient
    from kvrelay.transport.tls import TlsConfig
    from kvrelay.wire.bulk import ObjectInfo, Stored
    from kvrelay.wire.messages import Range, Spec

__all__ = [
    "AsyncPoolClient",
    "AsyncStripedPoolClient",
    "Blocks",
    "ObjectInfo",
    "PendingCall",
    "PoolClient",
    "Prefix",
    "PrefixCount",
    "Puts",
    "Range",
    "Spec",
    "StagePart",
    "Stored",
    "StripedPoolClient",
    "TlsConfig",
]

_HOMES = {
    "AsyncPoolClient": "kvrelay.client.aio",
    "AsyncStripedPoolClient": "kvrelay.client.striped",
    "Blocks": "kvrelay.client.core.blocks",
    "ObjectInfo": "kvrelay.wire.bulk",
    "PendingCall": "kvrelay.client.blocking_link",
    "PoolClient": "kvrelay.client.blocking",
    "Prefix": "kvrelay.client.core.prefix",
    "PrefixCount": "kvrelay.client.core.names",
    "Puts": "kvrelay.client.core.puts",
    "Range": "kvrelay.wire.messages",
    "Spec": "kvrelay.wire.messages",
    "StagePart": "kvrelay.client.core.prefix",
    "Stored": "kvrelay.wire.bulk",
    "StripedPoolClient": "kvrelay.client.striped",
    "TlsConfig": "kvrelay.transport.tls",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
