"""Which engines serve a model, and the list of all models."""

from __future__ import annotations

import json
import time

import pytest

from kvrelay.router.core.fleet import Role, make_engines, parse_address
from kvrelay.router.core.health import HealthSettings
from kvrelay.router.core.models import list_of, model_of_form, read_cards, strangers


def make(role: Role, count: int):  # type: ignore[no-untyped-def]
    return make_engines(role, [parse_address(f"http://h:{port + 1}") for port in range(count)], HealthSettings())


P, D = make(Role.PREFILL, 2), make(Role.DECODE, 3)
KNOWN = {
    P[0]: frozenset({"a"}),
    P[1]: frozenset({"b"}),
    D[0]: frozenset({"a", "lora"}),
    D[1]: frozenset({"b"}),
}
"""D2 has not said anything."""


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("a", ((P[1],), (D[1],))),
        ("b", ((P[0],), (D[0],))),
        ("lora", ((P[0], P[1]), (D[1],))),
        ("nowhere", None),
    ],
)
def test_engines_that_do_not_serve_a_model_are_not_asked(model: str, expected: object) -> None:
    found = strangers(model, P, D, KNOWN)
    assert (found and (found[Role.PREFILL], found[Role.DECODE])) == expected


def test_a_list_of_all_models_has_each_once_as_its_first_engine_describes_it() -> None:
    one = read_cards(b'{"object":"list","data":[{"id":"a","x":1.50},{"id":"b"}]}')
    two = read_cards(b'{"object":"list","data":[{"id":"b","x":2},{"id":"c"}]}')
    assert one is not None
    assert two is not None
    listed = list_of([one, {}, two])
    assert b'{"id":"a","x":1.50}' in listed
    assert json.loads(listed) == {"object": "list", "data": [{"id": "a", "x": 1.5}, {"id": "b"}, {"id": "c"}]}


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"data":[1]}', b'{"data":[{"name":"a"}]}', b'{"data":3}'])
def test_what_is_no_list_of_models_is_none(answer: bytes) -> None:
    assert read_cards(answer) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n', "whisper"),
        (b"--b\r\nContent-Disposition: form-data; name=model\r\nContent-Type: text/plain\r\n\r\nw\r\n--b--\r\n", "w"),
        (b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nmodel\r\n--b--\r\n', ""),
        (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n\r\n--b--\r\n', ""),
        (b'--b\r\nContent-Disposition: form-data; name="model"\r\n', ""),
        (b'name="model"\r\n' * 3 + b"\r\nw\r\n", "w"),
        (b"\x00\xff", ""),
    ],
)
def test_the_model_of_a_form(body: bytes, expected: str) -> None:
    assert model_of_form(body) == expected


def test_a_form_that_is_nothing_but_beginnings_is_read_in_the_time_it_takes_to_read_it() -> None:
    """Each could be looked at to the body's end, which would hold up everybody for hours."""
    began = time.process_time()
    assert model_of_form(b'name="model"\r\n' * 500_000) == ""
    assert time.process_time() - began < 5.0
