"""The checksum of a segment: XXH3-64."""

from __future__ import annotations

from kvrelay.transport.copying import copies

checksum = copies.checksum
"""XXH3-64 of a contiguous buffer of bytes, as an integer below 2**64."""

segment_sums = copies.segment_sums
"""``segment_sums(view, segment_bytes)``: checksum of every ``segment_bytes`` of a view of whole segments, in order."""
