"""Settings by the names their users know: the keys of the configuration file, which are the flags'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kvrelay.router.core.admin import Admin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.router.config import RouterConfig

_NAMES = {
    "prefills": "prefill",
    "decodes": "decode",
    "pool_token": "pool_token_file",
    "max_body_bytes": "max_body_mib",
    "kv.events": "kv_events",
    "observing.headers.forward": "forward_header",
    "observing.headers.drop": "drop_header",
    "observing.headers.request_id": "request_id_header",
    "entrance.cors_origins": "cors_origin",
    "entrance.engine_api_key": "engine_api_key_file",
    "entrance.tls.cert": "tls_cert",
    "entrance.tls.key": "tls_key",
    "entrance.tls.client_ca": "tls_client_ca",
    "engine_tls.ca": "engine_tls_ca",
    "engine_tls.cert": "engine_tls_cert",
    "engine_tls.key": "engine_tls_key",
    "engine_tls.server_name": "engine_tls_name",
    "admin.listen": "admin_listen",
    "admin.token": "admin_token_file",
}
"""Those that are called otherwise than in a configuration, by their paths in it."""
_NONE = ("entrance.keys", "entrance.num_workers", "entrance.worker")
"""What is no setting: what the file of keys holds has a reload of its own."""


def differences(old: RouterConfig, new: RouterConfig) -> Iterator[tuple[str, str]]:
    """What differs: the field of the configuration, and the setting's name."""
    before, after = _leaves(old, ""), _leaves(new, "")
    told: set[str] = set()
    for path in {**before, **after}:
        name = name_of(path)
        if before.get(path) != after.get(path) and path not in _NONE and name not in told:
            told.add(name)
            yield path.partition(".")[0], name


def name_of(path: str) -> str:
    """What the setting at such a path of a configuration is called."""
    return _NAMES.get(path) or path.rpartition(".")[2].removesuffix("_s")


def _leaves(struct: Struct, before: str) -> dict[str, Any]:
    """Every value that is none of the configuration's own structures, by its path."""
    found: dict[str, Any] = {}
    for field in struct.__struct_fields__:
        path, value = f"{before}{field}", getattr(struct, field)
        if isinstance(value, Admin):
            found |= {f"{path}.listen": value.listen, f"{path}.token": value.token}
        elif isinstance(value, Struct) and path not in _NONE:
            found |= _leaves(value, f"{path}.")
        elif value is not None:
            found[path] = value
    return found
