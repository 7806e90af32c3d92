"""Names for requests: nobody can guess one, and making one asks the kernel for nothing."""

from __future__ import annotations

import os

NAME_BYTES = 16
_BATCH = 256


class RequestIds:
    """Random names, of which many are drawn at once."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        """None drawn yet."""
        self._left: list[str] = []

    def make(self) -> str:
        """32 hexadecimal digits that were not given before."""
        if not self._left:
            drawn = os.urandom(NAME_BYTES * _BATCH).hex()
            self._left = [drawn[at : at + 2 * NAME_BYTES] for at in range(0, len(drawn), 2 * NAME_BYTES)]
        return self._left.pop()
