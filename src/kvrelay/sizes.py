"""Sizes as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power, _letter: 1024**_power}


def parse_size(text: str) -> int:
    """Bytes of a size such as ``4GiB``, ``1.5g`` or ``1000000``. Raises ValueError naming the legal forms."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("a size is a number and a unit, such as 512MiB, 4GiB or 1073741824")
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def format_size(size_bytes: int) -> str:
    """Bytes for a reader: ``4 GiB``, ``1.5 GiB``, ``512 MiB``."""
    for power, letter in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << power:
            return f"{size_bytes / (1 << power):.1f}".removesuffix(".0") + f" {letter}"
    return f"{size_bytes} B"
