"""What the HTTP parser lets pass and this router does not: heads whose readers could differ about where a body ends.

llhttp refuses most of what requests are smuggled with (see the tests, which go through it byte by byte). Left to us
are transfer codings other than a lone ``chunked``, codings in HTTP/1.0, which has none, ambiguous hosts, fragments, and
chunked bodies that are mostly wrapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Headers = Sequence[tuple[bytes, bytes]]

MAX_WRAPPING_BYTES = 16 << 10
"""Of a chunked body: extensions, leading zeros and trailers, beyond what sizes and line ends need."""
CHUNK_LINE_BYTES = 24
"""What a chunk's size and its line ends need at most: sixteen digits, two CRLF, and a short extension."""
_TRANSFER, _HOST, _CHUNKED = b"transfer-encoding", b"host", b"chunked"
_LONE = [_CHUNKED]
_CODING = "a Transfer-Encoding other than one 'chunked'"


def request_problem(version: str, target: bytes, headers: Headers, by_name: Mapping[bytes, bytes]) -> str:
    """Why a head the parser took is refused; nothing where it is well. ``version``: ``1.0`` or ``1.1``.

    ``by_name``: ``headers``, one of each name.
    """
    if _TRANSFER in by_name and (problem := _coding_problem(version, headers)):
        return problem
    if _HOST not in by_name:
        if version != "1.0":
            return "no Host header"
    elif len(by_name) < len(headers) and [name for name, _ in headers].count(_HOST) > 1:
        return "several Host headers"
    return "a fragment in the request's target" if b"#" in target else ""


def response_problem(version: str, status: int, reason: bytes, headers: Headers) -> str:
    """Why an engine's head the parser took is not believed; nothing where it is well."""
    if version not in {"1.0", "1.1"}:
        return f"version {version}"
    if not 100 <= status <= 999 or status == 101:
        return f"status {status}"
    if reason and not reason.isalnum() and any(byte < 0x20 and byte != 0x09 for byte in reason):
        return "control characters in its reason"
    return _coding_problem(version, headers)


def _coding_problem(version: str, headers: Headers) -> str:
    codings = [value for name, value in headers if name == _TRANSFER]
    if not codings:
        return ""
    if codings == _LONE and version != "1.0":
        return ""
    if len(codings) > 1 or codings[0].strip().lower() != _CHUNKED:
        return _CODING
    return "a Transfer-Encoding in HTTP/1.0" if version == "1.0" else ""


def is_mostly_wrapping(wire_bytes: int, body_bytes: int, num_chunks: int) -> bool:
    """Whether a chunked body takes far more bytes on the wire than its content: it would cost us and bring nothing."""
    return wire_bytes - body_bytes - num_chunks * CHUNK_LINE_BYTES > MAX_WRAPPING_BYTES
