"""What callers give, taken as what it is meant to be: keys in order, pairs, whole numbers. Anything else is named."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeVar

from kvrelay.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

K = TypeVar("K")

SHOWN = 40
"""Characters shown of a value."""


def keys_of(keys: Iterable[K]) -> Sequence[K]:
    """Keys in their order; a list or tuple as it is.

    Raises:
        BadRequestError: it is a single key, or has no order, or is nothing to go through.
    """
    if isinstance(keys, list | tuple):
        return keys
    if isinstance(keys, bytes | bytearray | memoryview | str | Mapping | AbstractSet):
        raise _wrong("keys", keys, "a sequence of keys")
    try:
        return list(keys)
    except TypeError:
        raise _wrong("keys", keys, "a sequence of keys") from None


def pairs_of(items: Iterable[tuple[Any, Any]], what: str, of: str) -> tuple[list[Any], list[Any]]:
    """The first and the second parts of pairs. ``what`` was given, pairs ``of`` what.

    Raises:
        BadRequestError: it is a mapping, nothing to go through, or one is no pair.
    """
    legal = f"a sequence of pairs of {of}"
    if isinstance(items, Mapping):
        raise _wrong(what, items, f"{legal}, such as its items()")
    try:
        walked = iter(items)
    except TypeError:
        raise _wrong(what, items, legal) from None
    pairs = list(walked)
    try:
        return [first for first, _ in pairs], [second for _, second in pairs]
    except (TypeError, ValueError):
        wrong = next(index for index, pair in enumerate(pairs) if not _is_pair(pair))
        raise _wrong(f"{what}[{wrong}]", pairs[wrong], f"a pair of {of}") from None


def whole_number(value: Any, what: str) -> int:
    """An integer of any kind. BadRequestError: it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise _wrong(what, value, "a whole number") from None


def _is_pair(item: Any) -> bool:
    try:
        return len(item) == 2
    except TypeError:
        return False


def _wrong(what: str, value: object, legal: str) -> BadRequestError:
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    return BadRequestError(f"{what} = {shown} of type {type(value).__qualname__}: legal is {legal}")
