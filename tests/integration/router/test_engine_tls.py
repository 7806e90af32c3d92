"""TLS between the router and engines: who is believed, what is shown, and that nothing goes unencrypted."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import ConfigError
from kvrelay.router.config import RouterSettings, check_settings
from kvrelay.router.core.fleet import Role, parse_address
from kvrelay.router.core.resilience import Resilience
from kvrelay.testing.certificates import Authority, Pair
from kvrelay.testing.fake_engine import raw, stream
from kvrelay.testing.pouring import Pour
from kvrelay.testing.raw_http import RawClient, get, post
from kvrelay.transport.certificates import server_context
from kvrelay.transport.tls import TlsConfig

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.router.service import RouterService
    from kvrelay.testing.raw_http import Answer

BODY = {"prompt": "a", "model": "m", "max_tokens": 2}


@pytest.fixture
async def authority(tmp_path: Path) -> Authority:
    return await asyncio.to_thread(Authority, tmp_path)


async def speaking(authority: Authority, *names: str, client_ca: Path | None = None) -> ssl.SSLContext:
    """The context of an engine whose certificate has these names."""
    pair: Pair = await asyncio.to_thread(authority.server, *names)
    return await asyncio.to_thread(server_context, pair.cert, pair.key, client_ca, minimum=ssl.TLSVersion.TLSv1_2)


async def ask(service: RouterService, **more: Any) -> Answer:
    return await post(service.port, "/v1/completions", {**BODY, **more})


async def test_everything_between_router_and_engines_goes_over_tls(
    engine: Any, router: Any, authority: Authority
) -> None:
    context = await speaking(authority, "127.0.0.1")
    prefill, decode, joining = [await engine(tls=context) for _ in range(3)]
    service = await router(
        [prefill], [decode], engine_tls=authority.trusting(), resilience=Resilience(probe_interval_s=0.01)
    )
    assert (await ask(service)).status == 200
    assert (len(prefill.requests), len(decode.requests)) == (1, 1)
    decode.script(stream([*(b"data: %d\n\n" % i for i in range(500)), b"data: [DONE]\n\n"]))
    assert b"data: 499\n\n" in (await ask(service, stream=True)).body
    assert (await post(service.port, "/tokenize", BODY)).status == 200
    assert (await get(service.port, "/v1/models")).status == 200
    health = (await get(service.port, "/health")).json
    assert [state["healthy"] for state in health["engines"]] == [True, True]
    assert health["engines"][0]["url"] == prefill.url
    joined = service.fleet.add(Role.DECODE, parse_address(joining.url))
    async with asyncio.timeout(20):
        while not joining.requests:
            assert (await ask(service)).status == 200
    assert not joined.health.failures


async def test_connections_are_kept_for_the_next_request(engine: Any, router: Any, authority: Authority) -> None:
    context = await speaking(authority, "127.0.0.1")
    prefill, decode = await engine(tls=context), await engine(tls=context)
    service = await router([prefill], [decode], engine_tls=authority.trusting())
    for number in range(10):
        assert (await ask(service, prompt="a" * 2**number, stream=bool(number % 2))).status == 200
    assert (prefill.num_accepted, decode.num_accepted) == (1, 1)


async def test_a_slow_client_holds_the_engine_back(engine: Any, router: Any, authority: Authority) -> None:
    context = await speaking(authority, "127.0.0.1")
    decode = await engine(tls=context)
    piece, count = b"x" * (64 << 10), 512
    pour = Pour(piece, count, last=None)
    decode.script(pour)
    service = await router([await engine(tls=context)], [decode], engine_tls=authority.trusting())
    async with await RawClient.open(service.port, receive_buffer=64 << 10) as client:
        client.post("/v1/completions", BODY)
        assert await pour.held_back() < 16 << 20
        assert len((await client.answer()).body) == len(piece) * count


async def test_a_prompt_of_megabytes_arrives_whole(engine: Any, router: Any, authority: Authority) -> None:
    context = await speaking(authority, "127.0.0.1")
    decode = await engine(tls=context)
    service = await router([await engine(tls=context)], [decode], engine_tls=authority.trusting())
    prompt = "0123456789abcdef" * (4 << 16)
    assert (await ask(service, prompt=prompt)).status == 200
    assert decode.requests[0].json["prompt"] == prompt


@pytest.mark.parametrize("fault", ["authority", "name", "nobody"])
async def test_an_engine_that_does_not_prove_itself_is_told_nothing(
    engine: Any, router: Any, authority: Authority, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.router")
    other = await asyncio.to_thread(Authority, tmp_path, "other")
    names = ("elsewhere.example",) if fault == "name" else ("127.0.0.1",)
    decode = await engine(tls=await speaking(other if fault == "authority" else authority, *names))
    trusting = TlsConfig() if fault == "nobody" else authority.trusting()  # the system's authorities know neither
    service = await router([decode.url.replace("127.0.0.1", "localhost")], [decode], engine_tls=trusting)
    answer = await ask(service)
    assert answer.status == 503
    assert answer.json["error"]["message"] == "D0: there is no connection to it"
    assert "its certificate is not accepted" in caplog.text
    assert "--engine-tls-ca" in caplog.text
    assert not decode.requests


async def test_the_name_in_the_certificates_can_be_another_than_the_host(
    engine: Any, router: Any, authority: Authority
) -> None:
    decode = await engine(tls=await speaking(authority, "engines.example"))
    service = await router([decode.url], [await engine()],
                           engine_tls=authority.trusting(server_name="engines.example"))  # fmt: skip
    assert (await ask(service)).status == 200
    assert len(decode.requests) == 1


async def test_an_engine_that_asks_for_a_certificate_is_shown_one(
    engine: Any, router: Any, authority: Authority
) -> None:
    client = await asyncio.to_thread(authority.client, "router")
    context = await speaking(authority, "127.0.0.1", client_ca=authority.ca)
    prefill, decode = await engine(tls=context), await engine(tls=context)
    service = await router([prefill], [decode], engine_tls=authority.trusting(client))
    assert (await ask(service)).status == 200
    assert (len(prefill.requests), len(decode.requests)) == (1, 1)
    without = await router([prefill], [decode], engine_tls=authority.trusting())
    assert (await ask(without)).status in {502, 503}
    assert (len(prefill.requests), len(decode.requests)) == (1, 1)


async def test_what_does_not_speak_tls_is_told_nothing_in_the_clear(
    router: Any, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.router")
    heard = bytearray()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(65536))
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    service = await router(
        [f"https://localhost:{port}"], [f"https://127.0.0.1:{port}"], engine_tls=authority.trusting()
    )
    answer = await ask(service)
    server.close()
    assert answer.status == 503
    assert answer.json["error"]["message"] == "D0: there is no connection to it"
    assert "it does not speak TLS" in caplog.text
    assert heard
    assert b"HTTP/1.1" not in heard.replace(b"http/1.1", b"")
    assert b"prompt" not in heard


async def test_an_answer_whose_end_only_the_connection_tells_is_not_believed(
    engine: Any, router: Any, authority: Authority
) -> None:
    context = await speaking(authority, "127.0.0.1")
    decode = await engine(tls=context)
    decode.script(raw(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"choices":[]}', close=True))
    service = await router([await engine(tls=context)], [decode], engine_tls=authority.trusting())
    assert (await ask(service)).status == 502


async def test_other_authorities_count_from_the_next_connection_on(
    engine: Any, router: Any, authority: Authority, tmp_path: Path
) -> None:
    new = await asyncio.to_thread(Authority, tmp_path, "new")
    prefill = await engine(tls=await speaking(authority, "127.0.0.1"))
    decode = await engine(tls=await speaking(new, "127.0.0.1"))
    service = await router([prefill], [decode], engine_tls=authority.trusting())
    assert (await ask(service)).status == 503
    authority.ca.write_bytes(new.ca.read_bytes() + authority.ca.read_bytes())
    await service.reload_entrance()
    assert (await ask(service)).status == 200
    authority.ca.write_text("rubbish")
    with pytest.raises(ConfigError, match="not a PEM file"):
        await service.reload_entrance()
    assert (await ask(service)).status == 200


def test_files_that_cannot_be_used_and_files_without_use_are_told() -> None:
    def problems(url: str, files: TlsConfig) -> str:
        with pytest.raises(ConfigError) as told:
            check_settings(RouterSettings(prefill=[url], decode=["http://d:1"], engine_tls=files))
        return "\n".join(told.value.problems)

    assert "--engine-tls-ca '/none' is not a PEM file" in problems("https://p:1", TlsConfig(ca="/none"))
    assert "--engine-tls-key 'k' has no effect without cert" in problems("https://p:1", TlsConfig(key="k"))
    for name in ("", ".p", "a..p", "p" * 64):
        assert f"--engine-tls-name {name!r} is not a host name" in problems("https://p:1", TlsConfig(server_name=name))
    assert "have no effect where every engine is http://" in problems("http://p:1", TlsConfig(server_name="p"))
    check_settings(RouterSettings(prefill=["https://p:1"], decode=["http://d:1"]))
