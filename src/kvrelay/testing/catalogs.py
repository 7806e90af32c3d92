"""Every implementation of the pool's catalog that is there, for tests that all of them must pass."""

from __future__ import annotations

from kvrelay.native import native
from kvrelay.pool.core.catalog import Catalog

CATALOGS: dict[str, type[Catalog]] = {"pure": Catalog}
if native is not None:
    CATALOGS["native"] = native.Catalog
