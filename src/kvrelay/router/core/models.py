"""Which engine serves which model, and the list of all of them.

An engine's models are what its ``/v1/models`` said last: the model's names and those of its adapters. Of an engine that
has not said anything it is assumed that it serves whatever is asked for.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct, field

from kvrelay.router.core.fleet import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvrelay.router.core.fleet import Engine

Strangers = dict[Role, tuple["Engine", ...]]
"""By role, the engines that do not serve a model."""
NO_STRANGERS: Strangers = {Role.PREFILL: (), Role.DECODE: ()}
_FORM_FIELD = re.compile(rb'name="?model"?\r\n')
"""In ``multipart/form-data``, as audio is sent; further headers and an empty line are between it and its value."""
_FORM_VALUE = re.compile(rb"([^\r\n]{1,512})\r\n")
_EMPTY_LINE = b"\r\n\r\n"


class Card(Struct):
    """One entry of a list of models, of which only the name matters here."""

    id: str


class _List(Struct):
    data: list[Raw] = field(default_factory=list)


_decode_list = msgspec.json.Decoder(_List).decode
_decode_card = msgspec.json.Decoder(Card).decode


def read_cards(answer: bytes) -> dict[str, Raw] | None:
    """Name to entry, as it came, of an answer of ``/v1/models``; None if it is none."""
    try:
        return {_decode_card(card).id: card.copy() for card in _decode_list(answer).data}
    except (msgspec.MsgspecError, RecursionError):
        return None


def list_of(answers: Iterable[Mapping[str, Raw]]) -> bytes:
    """One answer of ``/v1/models``: every model once, as the first engine that has it describes it."""
    cards: dict[str, Raw] = {}
    for answer in answers:
        for name, card in answer.items():
            cards.setdefault(name, card)
    return msgspec.json.encode({"object": "list", "data": list(cards.values())})


def strangers(
    model: str, prefills: Sequence[Engine], decodes: Sequence[Engine], known: Mapping[Engine, frozenset[str]]
) -> Strangers | None:
    """The engines not to be asked for ``model``; None if no decode engine is known to serve it.

    Whoever is asked then gives the answer there is to give: that there is no such model.
    """
    if not any(model in known.get(engine, ()) for engine in decodes):
        return None
    return {
        role: tuple(engine for engine in engines if engine in known and model not in known[engine])
        for role, engines in ((Role.PREFILL, prefills), (Role.DECODE, decodes))
    }


def model_of_form(body: bytes) -> str:
    """The field ``model`` of a form; empty if there is none."""
    place = 0
    while (field := _FORM_FIELD.search(body, place)) is not None:
        place = body.find(_EMPTY_LINE, field.end() - 2) + len(_EMPTY_LINE)
        if place < len(_EMPTY_LINE):
            break
        if (value := _FORM_VALUE.match(body, place)) is not None:
            return value[1].decode("utf-8", "replace")
    return ""
