"""Every object of the soak follows from its key: size, geometry and bytes. So whoever reads one can check it."""

from __future__ import annotations

import random

from kvrelay.wire import messages as m

WHOLE_KEYS = 4_000
SEGMENTED_KEYS = 600
PINS_OF_A_CLIENT = 4
LARGEST_BITS = 20
"""Whole objects have up to 1 MiB; their sizes are spread evenly over the powers of two."""


def whole_key(number: int) -> bytes:
    """The ``number``-th key of objects of one segment."""
    return b"w" + number.to_bytes(4, "big")


def segmented_key(number: int) -> bytes:
    """The ``number``-th key of objects of several segments."""
    return b"s" + number.to_bytes(4, "big")


def pinned_key(client: int, number: int) -> bytes:
    """A key that only this client writes, pins, unpins and deletes."""
    return b"p" + bytes([client, number])


def short_lived_key(client: int, nonce: bytes) -> bytes:
    """A key that only this client writes, once."""
    return b"t" + bytes([client]) + nonce


def spec_of(key: bytes) -> m.Spec:
    """Size and geometry of the object called ``key``."""
    rng = random.Random(key)
    if key[:1] == b"s":
        layers, segments = rng.randint(1, 8), rng.randint(1, 4)
        return m.Spec(key, layers * segments * rng.randint(16, 16 << 10), layers, segments)
    largest = LARGEST_BITS if key[:1] == b"w" else 14
    return m.Spec(key, int(2 ** rng.uniform(5, largest)))


def content_of(key: bytes) -> bytes:
    """All bytes of the object called ``key``; every place in it has others."""
    return random.Random(b"content " + key).randbytes(spec_of(key).size)
