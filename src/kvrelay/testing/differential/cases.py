"""What the differential suite asks: a table of parameters, and seeded requests made from it.

A `Spec` is one row of docs/api.md: a parameter of an endpoint, what the router does with a request that has it, and the
values it is tried with. Each value becomes a request with a prompt of its own, streamed and not.
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MODEL = "(model)"
"""Stands for the served model's name."""
VOCABULARY = 2000
_TEXT = (
    "return value reference object module function statement class name scope block local global import string number "
    "sequence mapping iterator generator exception handler attribute method argument keyword default expression"
)
WORDS = tuple(_TEXT.split())


class How(StrEnum):
    """What the router does."""

    BOTH = "P and D"
    ALONE = "D alone"
    PASSED = "passed on"
    OWN = "the router"


class Spec(Struct, frozen=True, kw_only=True):
    """One parameter of one endpoint."""

    path: str
    name: str
    values: tuple[Mapping[str, Any], ...]
    """Fields put over those of a plain request; `OMIT` takes one away."""
    how: How = How.BOTH
    reason: str = ""
    """The detour of `How.ALONE`."""
    streams: tuple[bool, ...] = (False, True)
    method: str = "POST"
    note: str = ""
    """For the documents."""


class Case(Struct, frozen=True, kw_only=True):
    """One request."""

    spec: Spec
    number: int
    stream: bool
    body: dict[str, Any]

    @property
    def name(self) -> str:
        """For people; unique."""
        return f"{self.spec.method} {self.spec.path} {self.spec.name} #{self.number}{' stream' * self.stream}"


class _Omit:
    """Takes a field away."""


OMIT = _Omit()


class Fresh(Struct, frozen=True):
    """A prompt made anew for every request: ``kind`` is text, ids, texts, lists or words of a message."""

    kind: str
    size: int = 60


def cases(specs: Iterable[Spec], model: str) -> list[Case]:
    """All requests; the same in every run. ``model``: the served model's name."""
    return [
        Case(spec=spec, number=number, stream=stream, body=_body(spec, number, value, model, stream=stream))
        for spec in specs
        for number, value in enumerate(spec.values)
        for stream in spec.streams
    ]


def slice_of(every: Sequence[Case]) -> list[Case]:
    """One request of each parameter, streamed and not in turn; of one that two endpoints share, on each in turn."""
    by_name: dict[str, dict[str, list[Case]]] = {}
    for case in every:
        name = case.spec.path if case.spec.how is How.PASSED else case.spec.name
        by_name.setdefault(name, {}).setdefault(case.spec.path, []).append(case)
    chosen: list[Case] = []
    for turn, of_paths in enumerate(by_name.values()):
        paths = [*of_paths]
        of_one = of_paths[paths[turn // 2 % len(paths)]]
        streamed = [case for case in of_one if case.stream is (turn % 2 == 1)]
        chosen.append((streamed or of_one)[0])
    return chosen


def words(rng: random.Random, count: int) -> str:
    """That many words of text."""
    return " ".join(rng.choices(WORDS, k=count))


def _body(spec: Spec, number: int, value: Mapping[str, Any], model: str, *, stream: bool) -> dict[str, Any]:
    rng = random.Random(f"{spec.path} {spec.name} {number} {stream}")  # noqa: S311  no secret
    body = {name: field for name, field in {**PLAIN.get(spec.path, {}), **value}.items() if field is not OMIT}
    if stream:
        body["stream"] = True
    made: dict[str, Any] = _made(body, rng, model)
    return made


def _made(value: Any, rng: random.Random, model: str) -> Any:
    if isinstance(value, Fresh):
        return _fresh(value, rng)
    if isinstance(value, dict):
        return {name: _made(field, rng, model) for name, field in value.items()}
    if isinstance(value, list):
        return [_made(field, rng, model) for field in value]
    return model if isinstance(value, str) and value == MODEL else value


def _fresh(fresh: Fresh, rng: random.Random) -> Any:
    if fresh.kind == "text":
        return words(rng, fresh.size)
    if fresh.kind == "ids":
        return rng.choices(range(10, VOCABULARY), k=fresh.size)
    sizes = (fresh.size // 2, fresh.size, fresh.size + 37)
    if fresh.kind == "texts":
        return [words(rng, size) for size in sizes]
    assert fresh.kind == "lists"
    return [rng.choices(range(10, VOCABULARY), k=size) for size in sizes]


_USER = [{"role": "user", "content": Fresh("text", 30)}]
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": Fresh("ids"), "max_tokens": 8, "temperature": 0},
    "/v1/chat/completions": {"model": MODEL, "messages": _USER, "max_tokens": 8, "temperature": 0},
    "/v1/responses": {"model": MODEL, "input": Fresh("text", 30), "max_output_tokens": 8, "temperature": 0},
    "/v1/messages": {"model": MODEL, "messages": _USER, "max_tokens": 8, "temperature": 0},
}
"""A request that asks for nothing in particular."""
