"""Coverage-guided fuzzing of the frame decoder: ``make fuzz ARGS=-max_total_time=300``.

Needs the extra ``fuzz``. What must hold of every stream is in `kvrelay.testing.frame_stream`; the rest in `fuzzing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import atheris

from fuzzing import fuzz

with atheris.instrument_imports(include=["kvrelay.wire", "kvrelay.testing.frame_stream"]):
    from kvrelay.testing.frame_stream import check
    from kvrelay.wire import messages as m
    from kvrelay.wire.frames import encode

if TYPE_CHECKING:
    from kvrelay.wire.base import Message


def seeds() -> list[bytes]:
    """Valid streams."""
    u64s = (5).to_bytes(8, "little")
    messages: list[tuple[Message, bytes]] = [
        (m.Hello(1, [1], "fuzz"), b""),
        (m.Match(2, [b"a", b"bc"], 1.0, True), b""),
        (m.Announce(3, "group", [m.Spec(b"k", 64, 2, 4)], 5.0, None), b""),
        (m.Write(4, [m.Part(1, 0, [7, 8])]), b"payload!"),
        (m.Put(5, [b"key"], u64s, u64s), b"12345"),
        (m.Get(6, [b"key"], u64s), b""),
        (m.Got(7, 1, u64s, 0), b"12345"),
        (m.Stats(8, {"objects": 1}), b""),
        (m.OpenTicket(9, "ticket", 5.0), b""),
        (m.Post(10, "ticket", b"note"), b""),
    ]
    streams = [encode(message, len(payload)) + payload for message, payload in messages]
    return [*streams, b"".join(streams)]


def main() -> None:
    fuzz(check, seeds())


if __name__ == "__main__":
    main()
