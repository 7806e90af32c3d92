"""What is counted of a tier, under the names of its metrics."""

from __future__ import annotations

from msgspec import Struct


class Figures(Struct):
    """Counters since the start. Seconds are sums of the time operations took, waiting for bandwidth excluded."""

    hits: int = 0
    """Objects looked for and found."""
    misses: int = 0
    """Objects looked for and not found."""
    stored: int = 0
    stored_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    refused: int = 0
    """Objects too large to keep."""
    corrupt: int = 0
    """Objects that came back other than they were stored; they were forgotten."""
    errors: int = 0
    """Operations, or objects of them, on which the medium failed."""
    skipped: int = 0
    """Operations not tried while the tier was paused after failures."""
    evictions: int = 0
    """Objects dropped to make room."""
    stores: int = 0
    store_seconds: float = 0.0
    loads: int = 0
    load_seconds: float = 0.0
    finds: int = 0
    find_seconds: float = 0.0
    throttled_seconds: float = 0.0
    """Time spent waiting for the bandwidth cap."""
