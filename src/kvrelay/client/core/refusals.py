"""What is wrong with a request that could not be sent, or was refused. Looked at only then."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvrelay.errors import BadRequestError, KvRelayError
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

LEGAL = f"a key is 1 to {limits.MAX_KEY_BYTES} bytes"
_DECODER = re.compile(r"\w+: Expected (?P<why>.*) - at `\$\[(?P<place>\d+)\]`")
"""As msgspec tells of a field of a request, which is an array of its tag and its fields."""
SHOWN = 24
"""Characters shown of a value."""


def explained(request: m.Request, error: KvRelayError) -> KvRelayError:
    """What to raise for ``error``: one that names the key that is none, or the field, and its value."""
    if not isinstance(error, BadRequestError):
        return error
    return _of_keys(request) or _of_a_field(request, str(error)) or error


def _of_a_field(request: m.Request, told: str) -> BadRequestError | None:
    """What the decoder says of one field, by the field's name and value."""
    found = _DECODER.fullmatch(told)
    if found is None:
        return None
    name = request.__struct_fields__[int(found["place"]) - 1]
    return BadRequestError(f"{name} = {_shown(getattr(request, name))}: legal is {found['why']}")


def _of_keys(request: m.Request) -> BadRequestError | None:
    if isinstance(request, m.ListObjects):
        wrong = _wrong(request.prefix, least=0)
        return None if wrong is None else BadRequestError(f"{wrong} is not a prefix of keys: {LEGAL}")
    keys = list(_keys(request))
    if len(keys) > limits.MAX_KEYS:
        return BadRequestError(f"{len(keys)} keys in one request: at most {limits.MAX_KEYS} are taken")
    wrong = next((wrong for key in keys if (wrong := _wrong(key)) is not None), None)
    return None if wrong is None else BadRequestError(f"{wrong} is not a key: {LEGAL}")


def _keys(request: Any) -> Iterator[object]:
    if hasattr(request, "key"):
        yield request.key
    yield from getattr(request, "keys", ())
    if isinstance(request, m.Announce):
        yield from (spec.key for spec in request.objects)


def _wrong(key: object, least: int = 1) -> str | None:
    """A value that is no key, as it is shown; None for a key."""
    if type(key) in {bytes, bytearray, memoryview}:
        size = memoryview(key).nbytes  # type: ignore[arg-type]
        if least <= size <= limits.MAX_KEY_BYTES:
            return None
        return f"{bytes(key[:SHOWN])!r}... of {size} bytes" if size else "b''"  # type: ignore[index]
    return f"{_shown(key)} of type {type(key).__qualname__}"


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
