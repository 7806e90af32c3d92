"""Bounds on everything a peer can announce. A frame beyond them is a protocol error before a byte is allocated."""

from __future__ import annotations

VERSIONS = (1,)
"""Protocol versions this build speaks, best first."""

HEADER_BYTES = 16
MAX_BODY_BYTES = 4 << 20
"""The message part of a frame (msgpack)."""
MAX_HELLO_BYTES = 16 << 10
"""The same, of a peer that is not known yet."""
MAX_PAYLOAD_BYTES = 1 << 30
"""The raw bytes behind a message."""
MAX_KEY_BYTES = 64
MAX_KEYS = 16_384
"""Keys, objects or parts in one message."""
MAX_SEGMENTS = 65_536
"""Segments of one object (layers x segments a layer)."""
FEW_SEGMENTS = 64
MIN_SEGMENT_BYTES = 32
"""Of the segments of an object that has more than `FEW_SEGMENTS`: what is kept of them must not outweigh them."""
MAX_SUMS = 1 << 18
"""Checksums in one message, so that a message of them always fits `MAX_BODY_BYTES`."""
MAX_OBJECT_BYTES = 1 << 30
MAX_NAME_CHARS = 256
"""Tickets, groups, engine names, tokens."""
MAX_NOTE_BYTES = 64 << 10
MAX_NOTES = 1_024
"""Notes kept for one ticket."""
MAX_NOTES_BYTES = 1 << 20
"""Bytes of the notes kept for one ticket: they travel in one message."""
MAX_TENANT_NOTES_BYTES = 64 << 20
"""Bytes of the notes kept for all tickets of one tenant, and `NOTE_COST_BYTES` a note."""
NOTE_COST_BYTES = 64
MAX_NIXL_METADATA_BYTES = 64 << 10
"""What NIXL needs to reach a pool."""
MAX_LEASE_S = 3_600.0
MAX_WAIT_S = 600.0
MAX_FACTS = 256
MAX_FACTS_BYTES = 64 << 10
"""What one engine may register."""
MAX_ENGINES_BYTES = 2 << 20
"""What all engines of one tenant together may register: it travels in one message."""
