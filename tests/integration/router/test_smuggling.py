"""Nothing is smuggled past the router: heads two readers could take differently are refused, whole or byte by byte."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from kvrelay.router.core.framing import MAX_WRAPPING_BYTES
from kvrelay.testing.fake_engine import FakeEngine, raw
from kvrelay.testing.raw_http import RawClient, get, post

Pair = tuple[FakeEngine, FakeEngine, int]
BODY = b'{"prompt":"a","max_tokens":1}'
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = LINE + b"transfer-encoding: chunked\r\n\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def head(line: bytes, body: bytes = b"") -> bytes:
    return LINE + line + b"\r\n\r\n" + body


REFUSED = {
    # lengths
    "length-plus": head(b"content-length: +3", b"abc"),
    "length-minus": head(b"content-length: -3", b"abc"),
    "length-space-inside": head(b"content-length: 3 3", b"abc"),
    "length-list": head(b"content-length: 3, 3", b"abc"),
    "length-twice-alike": head(b"content-length: 3\r\ncontent-length: 3", b"abc"),
    "length-twice": head(b"content-length: 3\r\ncontent-length: 4", b"abcd"),
    "length-twice-zero": head(b"content-length: 0\r\nContent-Length: 0"),
    "length-hex": head(b"content-length: 0x3", b"abc"),
    "length-underscore": head(b"content-length: 1_0", b"abcdefghij"),
    "length-arabic": head("content-length: ٣".encode(), b"abc"),
    "length-semicolon": head(b"content-length: 3;", b"abc"),
    "length-empty": head(b"content-length:"),
    "length-blank": head(b"content-length: "),
    "length-overflow": head(b"content-length: 18446744073709551616"),
    "length-folded": head(b"content-length:\r\n 3", b"abc"),
    "length-space-before-colon": head(b"content-length : 3", b"abc"),
    "length-tab-before-colon": head(b"content-length\t: 3", b"abc"),
    # codings
    "coding-and-length": head(b"transfer-encoding: chunked\r\n" + LENGTH[:-2], CHUNKS),
    "length-and-coding": head(LENGTH + b"transfer-encoding: chunked", CHUNKS),
    "identity": head(b"transfer-encoding: identity", BODY),
    "identity-and-length": head(b"transfer-encoding: identity\r\n" + LENGTH[:-2], BODY),
    "xchunked": head(b"transfer-encoding: xchunked", CHUNKS),
    "chunkedx": head(b"transfer-encoding: chunkedx", CHUNKS),
    "gzip": head(b"transfer-encoding: gzip", CHUNKS),
    "gzip-chunked": head(b"transfer-encoding: gzip, chunked", CHUNKS),
    "chunked-gzip": head(b"transfer-encoding: chunked, gzip", CHUNKS),
    "chunked-identity": head(b"transfer-encoding: chunked, identity", CHUNKS),
    "chunked-chunked": head(b"transfer-encoding: chunked, chunked", CHUNKS),
    "chunked-twice": head(b"transfer-encoding: chunked\r\ntransfer-encoding: chunked", CHUNKS),
    "identity-then-chunked": head(b"transfer-encoding: identity\r\ntransfer-encoding: chunked", CHUNKS),
    "chunked-then-identity": head(b"transfer-encoding: chunked\r\ntransfer-encoding: identity", CHUNKS),
    "comma-before": head(b"transfer-encoding: ,chunked", CHUNKS),
    "comma-after": head(b"transfer-encoding: chunked,", CHUNKS),
    "coding-quoted": head(b'transfer-encoding: "chunked"', CHUNKS),
    "coding-parameter": head(b"transfer-encoding: chunked;q=1", CHUNKS),
    "coding-vertical-tab": head(b"transfer-encoding: \x0bchunked", CHUNKS),
    "coding-nul": head(b"transfer-encoding: chunked\0", CHUNKS),
    "coding-empty": head(b"transfer-encoding:", CHUNKS),
    "coding-empty-and-length": head(b"transfer-encoding:\r\n" + LENGTH[:-2], BODY),
    "coding-folded": head(b"transfer-encoding:\r\n chunked", CHUNKS),
    "coding-space-before-colon": head(b"transfer-encoding : chunked", CHUNKS),
    "coding-in-1.0": LINE.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "coding-in-1.0-kept-alive": LINE.replace(b"1.1", b"1.0")
    + b"connection: keep-alive\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS,
    # chunks
    "chunk-size-0x": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "chunk-size-minus": CHUNKED + b"-1\r\nabc\r\n0\r\n\r\n",
    "chunk-size-plus": CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n",
    "chunk-size-space": CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "chunk-size-space-before": CHUNKED + b" 3\r\nabc\r\n0\r\n\r\n",
    "chunk-size-empty": CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "chunk-size-underscore": CHUNKED + b"1_0\r\nabc\r\n0\r\n\r\n",
    "chunk-size-overflow": CHUNKED + b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    "chunk-size-bare-lf": CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "chunk-size-bare-cr": CHUNKED + b"3\rabc\r\n0\r\n\r\n",
    "chunk-data-bare-lf": CHUNKED + b"3\r\nabc\n0\r\n\r\n",
    "chunk-data-too-long": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "chunk-data-no-end": CHUNKED + b"3\r\nabc0\r\n\r\n",
    "chunk-extension-bare-lf": CHUNKED + b"3;a\nabc\r\n0\r\n\r\n",
    "chunk-extension-bare-cr": CHUNKED + b"3;a\rb\r\nabc\r\n0\r\n\r\n",
    "chunk-extension-nul": CHUNKED + b"3;a\0\r\nabc\r\n0\r\n\r\n",
    "chunk-extension-open-quote": CHUNKED + b'3;a="\r\nabc\r\n0\r\n\r\n',
    "chunk-end-bare-lf": CHUNKED + b"0\r\n\n",
    "trailer-length": CHUNKED + b"0\r\ncontent-length: 5\r\n\r\n",
    "trailer-coding": CHUNKED + b"0\r\ntransfer-encoding: gzip\r\n\r\n",
    "trailer-folded": CHUNKED + b"0\r\na: b\r\n c\r\n\r\n",
    # lines
    "line-bare-lf": b"GET /health HTTP/1.1\nhost: x\r\n\r\n",
    "header-bare-lf": head(b"a: b\nc: d"),
    "header-bare-cr": head(b"a: b\rc: d"),
    "header-two-cr": head(b"a: b\r"),
    "end-bare-lf": LINE + b"a: b\r\n\n",
    "end-bare-cr": LINE + b"\r\r\n",
    "folded": head(b"a: b\r\n c"),
    "folded-tab": head(b"a: b\r\n\tc"),
    "folded-first": b"POST /v1/completions HTTP/1.1\r\n host: x\r\n\r\n",
    "name-space": head(b"a b: c"),
    "name-empty": head(b": c"),
    "name-nul": head(b"a\0: b"),
    "name-parenthesis": head(b"a(: b"),
    "name-high": head(b"a\xff: b"),
    "no-colon": head(b"abc"),
    "value-nul": head(b"a: b\0c"),
    "value-control": head(b"a: b\x01c"),
    "value-delete": head(b"a: b\x7fc"),
    # targets, hosts, versions
    "target-nul": b"GET /a\0b HTTP/1.1\r\nhost: x\r\n\r\n",
    "target-space": b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n",
    "target-tab": b"GET /a\tb HTTP/1.1\r\nhost: x\r\n\r\n",
    "target-high": b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    "target-fragment": b"GET /health#a HTTP/1.1\r\nhost: x\r\n\r\n",
    "query-fragment": b"POST /v1/completions?a#b HTTP/1.1\r\nhost: x\r\n\r\n",
    "no-host": b"GET /health HTTP/1.1\r\n\r\n",
    "two-hosts": b"GET /health HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n",
    "version-space": b"GET /health HTTP/1.1 \r\nhost: x\r\n\r\n",
    "version-1.2": b"GET /health HTTP/1.2\r\nhost: x\r\n\r\n",
    "version-1.11": b"GET /health HTTP/1.11\r\nhost: x\r\n\r\n",
    "version-lower": b"GET /health http/1.1\r\nhost: x\r\n\r\n",
    "version-ice": b"POST /health ICE/1.0\r\nhost: x\r\n\r\n",
    "method-lower": b"get /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "method-unknown": b"SMUGGLE /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "h2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "version-0.9": b"GET /health\r\n\r\n",
    "version-0.9-said": b"GET /health HTTP/0.9\r\n\r\n",
    "connect": b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
}  # fmt: skip
OTHER_STATUS = {"version-0.9": 505, "version-0.9-said": 505, "connect": 405}


async def all_of(port: int, data: bytes, step: int) -> bytes:
    """Everything the router says to ``data``, sent ``step`` bytes at a time, until it closes."""
    async with await RawClient.open(port) as client:
        for at in range(0, len(data), step):
            client.send(data[at : at + step])
            await asyncio.sleep(0)
        return await client.rest()


@pytest.mark.parametrize("name", REFUSED)
async def test_an_ambiguous_request_is_refused_once_and_the_connection_closed(pair: Pair, name: str) -> None:
    """Behind each comes a request that must not be answered: it may be the body of the first."""
    prefill, decode, port = pair
    for step in (1 << 20, 1, 7):
        said = await all_of(port, REFUSED[name] + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", step)
        assert said.startswith(b"HTTP/1.1 %d " % OTHER_STATUS.get(name, 400)), said[:80]
        assert len(re.findall(rb"HTTP/1\.1 \d{3} ", said)) == 1
        assert b"\r\nconnection: close\r\n" in said
    assert prefill.requests == decode.requests == []
    assert (await get(port, "/health")).status == 200


TAKEN = {
    "length-zeros": LINE + b"content-length: 0%d\r\n\r\n" % len(BODY) + BODY,
    "length-blanks": LINE + b"content-length: \t%d \t\r\n\r\n" % len(BODY) + BODY,
    "coding-upper": LINE + b"Transfer-Encoding:CHUNKED \r\n\r\n" + CHUNKS,
    "coding-tab": LINE + b"transfer-encoding:\tchunked\r\n\r\n" + CHUNKS,
    "chunk-zeros": CHUNKED + b"000%x\r\n%b\r\n00\r\n\r\n" % (len(BODY), BODY),
    "chunk-extensions": CHUNKED + b'%x;a;b=c;d="e\\"f"\r\n%b\r\n0;z\r\n\r\n' % (len(BODY), BODY),
    "trailers": CHUNKED + CHUNKS[:-2] + b"host: evil\r\nauthorization: evil\r\n\r\n",
    "blank-lines-before": b"\r\n\r\n" + LINE + LENGTH + b"\r\n" + BODY,
    "absolute-form": LINE.replace(b"/v1", b"http://evil:1/v1", 1) + LENGTH + b"\r\n" + BODY,
    "upgrade": LINE + LENGTH + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n" + BODY,
    "upgrade-chunked": LINE
    + b"upgrade: websocket\r\nconnection: Upgrade\r\ntransfer-encoding: chunked\r\n\r\n"
    + CHUNKS,
    "looks-like-a-header": LINE + LENGTH + b"content_length: 1\r\nx-transfer-encoding: chunked\r\n\r\n" + BODY,
}


@pytest.mark.parametrize("name", TAKEN)
async def test_what_is_taken_reaches_engines_newly_framed(pair: Pair, name: str) -> None:
    """Two of them on one connection: the second is found where the first ends."""
    prefill, decode, port = pair
    for step in (1 << 20, 1):
        async with await RawClient.open(port) as client:
            data = TAKEN[name] * 2
            for at in range(0, len(data), step):
                client.send(data[at : at + step])
                await asyncio.sleep(0)
            assert [(await client.answer()).status for _ in range(2)] == [200, 200]
    assert len(decode.requests) == 4
    for request in prefill.requests + decode.requests:
        assert request.target == "/v1/completions"
        assert request.headers["host"] != "evil"
        assert int(request.headers["content-length"]) == len(request.body)
        assert not {"transfer-encoding", "upgrade", "connection", "authorization"} & request.headers.keys()
        assert request.json["prompt"] == "a"


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("declared", "statuses"), [(len(BODY), [200, 400]), (len(BODY) - 3, [400, 400])], ids=["garbage-behind", "cut"]
)
async def test_what_a_body_has_beyond_its_length_is_no_part_of_it_and_no_request(
    pair: Pair, declared: int, statuses: list[int], *, apart: bool
) -> None:
    """The length decides where a request ends; the rest is refused, whether it comes with the request or after it."""
    prefill, decode, port = pair
    data = LINE + b"content-length: %d\r\n\r\n" % declared + BODY + b'{"prompt":"smuggled"}'
    end = data.index(BODY) + declared
    async with await RawClient.open(port) as client:
        said: list[int] = []
        for part in (data[:end], data[end:]) if apart else (data,):
            client.send(part)
            said += [(await client.answer()).status for _ in range(1 if apart else 2)]
        assert said == statuses
        assert await client.rest() == b""
    assert all(request.json["prompt"] == "a" for request in prefill.requests + decode.requests)
    assert len(decode.requests) == statuses.count(200)


async def test_http_1_0_is_kept_alive_where_it_asks_for_it(pair: Pair) -> None:
    _, _, port = pair
    line = LINE.replace(b"1.1", b"1.0")
    async with await RawClient.open(port) as client:
        for _ in range(2):
            client.send(line + LENGTH + b"connection: keep-alive\r\n\r\n" + BODY)
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "keep-alive")
        client.send(line + LENGTH + b"\r\n" + BODY)
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "endless",
    [
        b"3;" + b"a" * 65536,
        b"0" * 65536,
        b"0\r\n" + b"a: b\r\n" * 10_000,
        b"1;aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\nx\r\n" * 5_000,
    ],
    ids=["extension", "zeros", "trailers", "little-chunks"],
)  # fmt: skip
async def test_wrapping_without_content_is_not_read_for_ever(pair: Pair, endless: bytes) -> None:
    _, _, port = pair
    async with await RawClient.open(port) as client:
        client.send(CHUNKED)
        await asyncio.sleep(0)
        for at in range(0, len(endless), 4096):
            client.send(endless[at : at + 4096])
        assert len(endless) > 2 * MAX_WRAPPING_BYTES
        answer = await client.answer()
        assert (answer.status, answer.json["error"]["code"]) == (400, "malformed_request")


async def test_a_body_in_thousands_of_little_chunks_is_put_together(pair: Pair) -> None:
    _, decode, port = pair
    body = b'{"prompt":"' + bytes(97 + i % 26 for i in range(5_000)) + b'","max_tokens":1}'
    async with await RawClient.open(port) as client:
        client.send(CHUNKED + b"".join(b"2\r\n%b\r\n" % body[i : i + 2] for i in range(0, len(body) - 1, 2)))
        client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) % 2, body[-1:]) if len(body) % 2 else b"0\r\n\r\n")
        assert (await client.answer()).status == 200
    assert decode.requests[0].json["prompt"].encode() in body


async def test_an_offer_to_upgrade_is_told_to_go_on_once(pair: Pair) -> None:
    _, _, port = pair
    async with await RawClient.open(port) as client:
        client.send(LINE + LENGTH + b"connection: upgrade\r\nupgrade: h2c\r\nexpect: 100-continue\r\n\r\n")
        assert (await client.head())[0] == 100
        client.send(BODY)
        assert (await client.answer()).status == 200


ANSWER = b"HTTP/1.1 200 OK\r\n"
UNBELIEVABLE = {
    "both": ANSWER + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    "both-other-way": ANSWER + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "lengths-alike": ANSWER + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "length-list": ANSWER + b"content-length: 3, 3\r\n\r\nabc",
    "length-plus": ANSWER + b"content-length: +3\r\n\r\nabc",
    "identity": ANSWER + b"transfer-encoding: identity\r\n\r\nabc",
    "xchunked": ANSWER + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "gzip-chunked": ANSWER + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked-gzip": ANSWER + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "two-codings": ANSWER + b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "comma": ANSWER + b"transfer-encoding: ,chunked\r\n\r\n0\r\n\r\n",
    "coding-in-1.0": b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded": ANSWER + b"a: b\r\n c\r\ncontent-length: 3\r\n\r\nabc",
    "bare-lf": b"HTTP/1.1 200 OK\ncontent-length: 3\n\nabc",
    "header-lf": ANSWER + b"a: b\nc: d\r\ncontent-length: 0\r\n\r\n",
    "header-cr": ANSWER + b"a: b\rc: d\r\ncontent-length: 0\r\n\r\n",
    "space-before-colon": ANSWER + b"content-length : 3\r\n\r\nabc",
    "nul": ANSWER + b"a: \0\r\ncontent-length: 0\r\n\r\n",
    "reason-control": b"HTTP/1.1 200 O\x01K\r\ncontent-length: 0\r\n\r\n",
    "version-0.9": b"HTTP/0.9 200 OK\r\ncontent-length: 0\r\n\r\n",
    "version-2": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "switching": b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nabc",
    "status-099": b"HTTP/1.1 099 OK\r\ncontent-length: 0\r\n\r\n",
    "interim-with-length": b"HTTP/1.1 100 C\r\ncontent-length: 3\r\n\r\nabc" + ANSWER + b"content-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", UNBELIEVABLE)
async def test_an_answer_with_doubtful_framing_is_its_engines_fault(pair: Pair, name: str) -> None:
    _, decode, port = pair
    decode.script(raw(UNBELIEVABLE[name]))
    answer = await post(port, "/v1/completions", BODY)
    assert (answer.status, answer.json["error"]["code"]) == (502, "connection_lost")
    assert (await post(port, "/v1/completions", BODY)).status == 200


async def test_an_answer_without_content_names_no_length_and_smuggles_no_second(pair: Pair) -> None:
    _, decode, port = pair
    smuggled = b"HTTP/1.1 204 None\r\ncontent-length: 40\r\n\r\n" + ANSWER + b"content-length: 0\r\n\r\n"
    decode.script(raw(smuggled))
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", BODY)
        status, headers = await client.head()
        assert status == 204
        assert not {"content-length", "transfer-encoding"} & headers.keys()
        client.post("/v1/completions", BODY)
        assert (await client.answer()).json["object"] == "text_completion"


@pytest.mark.parametrize(
    "framing", [b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
async def test_a_second_answer_that_nobody_asked_for_reaches_nobody(pair: Pair, framing: bytes) -> None:
    """1. An engine sends two answers in one piece. 2. The client gets the first, then the one to its next request."""
    _, decode, port = pair
    decode.script(raw(ANSWER + framing + ANSWER + b"content-length: 6\r\n\r\nsecond"))
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", BODY)
        assert (await client.answer()).body == b"{}"
        client.post("/v1/completions", BODY)
        assert (await client.answer()).json["object"] == "text_completion"
    assert decode.num_accepted == 2


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_an_answer_that_ends_with_its_connection_is_taken(pair: Pair, version: str) -> None:
    _, decode, port = pair
    decode.script(raw(b"HTTP/%b 200 OK\r\ncontent-type: text/plain\r\n\r\nabc" % version.encode(), close=True))
    answer = await post(port, "/v1/completions", BODY)
    assert (answer.status, answer.body) == (200, b"abc")


async def test_the_table_of_refusals_names_no_case_twice() -> None:
    values: list[Any] = list(REFUSED.values())
    assert len(set(values)) == len(values)
