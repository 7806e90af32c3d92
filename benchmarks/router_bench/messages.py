"""The requests that are sent, and what must come back."""

from __future__ import annotations

import http.client
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PATH = "/v1/completions"
TIMEOUT_S = 20.0
_WORDS = ("the", "cache", "of", "a", "prompt", "is", "read", "once", "and", 'said "so"', "then", "naïve", "line\nbreak")


def prompt(size_bytes: int, seed: int) -> str:
    """Text that is about as long in JSON: words, with some escapes."""
    source = random.Random(seed)
    words: list[str] = []
    size = 0
    while size < size_bytes:
        words.append(source.choice(_WORDS))
        size += len(json.dumps(words[-1], ensure_ascii=False).encode()) - 1
    return " ".join(words)


def client_body(size_bytes: int, chunks: int, *, streamed: bool = True) -> bytes:
    """A client's request for completions."""
    fields = {
        "model": "mock",
        "prompt": prompt(size_bytes, seed=1),
        "max_tokens": chunks,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 17,
        "stream": streamed,
    }
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def message(port: int, body: bytes) -> bytes:
    """The whole HTTP request, as a usual client writes it."""
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: application/json\r\nAccept-Encoding: identity\r\n"
        "Authorization: Bearer sk-benchmark\r\nContent-Type: application/json\r\nUser-Agent: OpenAI/Python 2.8.1\r\n"
        f"Connection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def ask(port: int, body: bytes) -> bytes:
    """Send it once and return the answer's body.

    Raises:
        RuntimeError: the answer is no 200.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {said[:300]!r}")
    return said


@dataclass(frozen=True)
class Hop:
    """One request of the load generator: where to, the message and the body that must come back, as files."""

    port: int
    request: Path
    answer: Path

    @classmethod
    def make(cls, directory: Path, name: str, port: int, body: bytes, answer: bytes) -> Hop:
        """Write the files."""
        hop = cls(port, directory / f"{name}.request", directory / f"{name}.answer")
        hop.request.write_bytes(message(port, body))
        hop.answer.write_bytes(answer)
        return hop

    @property
    def argument(self) -> str:
        """As the load generator takes it."""
        return f"{self.port}:{self.request}:{self.answer}"
