"""Where the answer begins in a streamed response.

vLLM opens a stream of ``/v1/responses`` with events that only repeat the request, before the engine has looked at it.
The first event of another kind is the first sign that the prompt has been taken.
"""

from __future__ import annotations

import re

PREAMBLE = frozenset({b"response.created", b"response.queued", b"response.in_progress"})
_EVENT = re.compile(rb"(?:^|\n)event: ?([\w.]+)\r?\n")
_MAX_LINE_BYTES = 256


class Preamble:
    """Looks for the first event behind the preamble."""

    __slots__ = ("_over", "_tail")

    def __init__(self) -> None:
        """At the stream's beginning."""
        self._tail = b""
        self._over = False

    def feed(self, data: bytes) -> bool:
        """Whether the answer has begun with ``data`` or before."""
        if not self._over:
            data = self._tail + data
            self._over = any(found[1] not in PREAMBLE for found in _EVENT.finditer(data))
            cut = data.rfind(b"\n")
            self._tail = data[cut:] if cut >= 0 and len(data) - cut <= _MAX_LINE_BYTES else b""
            if cut < 0 and len(data) <= _MAX_LINE_BYTES:
                self._tail = data
        return self._over
