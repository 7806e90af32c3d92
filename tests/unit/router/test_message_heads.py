"""What is done to headers, natively and in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.native import native
from kvrelay.router.http import messages
from kvrelay.router.http.messages import end_to_end, find, render

if TYPE_CHECKING:
    from kvrelay.router.http.messages import Headers

names = st.sampled_from([b"a", b"b", b"connection", b"content-type", b"te", b"upgrade", b""])
headers_of = st.lists(st.tuples(names, st.binary(max_size=4)), max_size=6)


@pytest.mark.skipif(native is None, reason="the native module was not built")
@given(headers_of, names, st.frozensets(names), st.frozensets(names))
def test_the_native_functions_do_what_the_plain_ones_do(
    headers: Headers, name: bytes, some: frozenset[bytes], others: frozenset[bytes]
) -> None:
    assert messages.find(headers, name) == messages._find(headers, name)
    assert messages.render(headers) == messages._render(headers)
    assert messages.without(headers, some, others) == messages._without(headers, some, others)


def test_the_first_header_of_a_name_is_found() -> None:
    headers = [(b"a", b"1"), (b"b", b""), (b"a", b"2")]
    assert find(headers, b"a") == b"1"
    assert find(headers, b"b") == b""
    assert find(headers, b"c") is None
    assert render(headers) == b"a: 1\r\nb: \r\na: 2\r\n"
    assert render([]) == b""


def test_what_is_about_one_connection_ends_there() -> None:
    headers = [(b"connection", b"X-Own, close"), (b"x-own", b"1"), (b"te", b"trailers"), (b"a", b"1"), (b"b", b"2")]
    assert end_to_end(headers) == [(b"a", b"1"), (b"b", b"2")]
    assert end_to_end([(b"connection", b"Keep-Alive"), *headers[3:]], {b"b"}) == [(b"a", b"1")]


@pytest.mark.skipif(native is None, reason="the native module was not built")
@pytest.mark.parametrize("headers", [(), [()], [(b"a",)], [("a", "b")], [[b"a", b"b"]], None])
def test_what_are_no_headers_is_refused_by_the_native_functions(headers: object) -> None:
    assert native is not None
    with pytest.raises(TypeError):
        native.render_headers(headers)
    with pytest.raises(TypeError):
        native.find_header(headers, b"a")
    with pytest.raises(TypeError):
        native.headers_without(headers, (), ())
