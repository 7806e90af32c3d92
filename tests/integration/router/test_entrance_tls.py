"""TLS on the router's port, and what is said where something is missing."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import ConfigError
from kvrelay.launch.core.plan import Readiness
from kvrelay.launch.readiness import is_ready
from kvrelay.router.config import RouterSettings, check_settings
from kvrelay.router.entrance.settings import EntranceConfig, EntranceSettings, exposed_without
from kvrelay.testing.certificates import Authority
from kvrelay.testing.fake_engine import stream

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.testing.certificates import Pair

WAIT_S = 20.0
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n%b"
BODY = b'{"prompt":"a","max_tokens":1}'


def trusting(authority: Authority, client: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    return context


async def ask(port: int, context: ssl.SSLContext | None, data: bytes = b"") -> bytes:
    """Everything said to one request, until the connection is closed."""
    async with asyncio.timeout(WAIT_S):
        name = "localhost" if context is not None else None
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        try:
            writer.write(data or REQUEST % (len(BODY), b"connection: close\r\n", BODY))
            return await reader.read()
        finally:
            writer.transport.abort()


def settings(pair: Pair, **more: Any) -> EntranceSettings:
    return EntranceSettings(tls_cert=str(pair.cert), tls_key=str(pair.key), **more)


async def test_clients_speak_tls_and_nothing_else(engine: Any, router: Any, tmp_path: Path) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path)
    pair = await asyncio.to_thread(authority.server, "localhost")
    decode = await engine()
    service = await router([await engine()], [decode], entrance=settings(pair))
    context = trusting(authority)
    assert (await ask(service.port, context)).startswith(b"HTTP/1.1 200 ")
    decode.script(stream([*(b"data: %d\n\n" % i for i in range(100)), b"data: [DONE]\n\n"]))
    assert (await ask(service.port, context)).endswith(b"0\r\n\r\n")
    assert (await ask(service.port, context, b"GARBAGE\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert not (await ask(service.port, None)).startswith(b"HTTP")
    with pytest.raises(ssl.SSLCertVerificationError):
        await ask(service.port, ssl.create_default_context())
    assert len(decode.requests) == 2


async def test_the_launcher_sees_whether_a_router_with_tls_serves(engine: Any, router: Any, tmp_path: Path) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path)
    pair = await asyncio.to_thread(authority.server, "router.example")
    service = await router([await engine()], [await engine()], entrance=settings(pair))
    assert await is_ready(Readiness(host="127.0.0.1", port=service.port, tls=True))
    assert not await is_ready(Readiness(host="127.0.0.1", port=service.port))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_tls_1_2_and_1_3_are_spoken(engine: Any, router: Any, tmp_path: Path, version: ssl.TLSVersion) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path)
    pair = await asyncio.to_thread(authority.server, "localhost")
    service = await router([await engine()], [await engine()], entrance=settings(pair))
    context = trusting(authority)
    context.minimum_version = context.maximum_version = version
    assert (await ask(service.port, context)).startswith(b"HTTP/1.1 200 ")


async def test_older_tls_is_refused(engine: Any, router: Any, tmp_path: Path) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path)
    pair = await asyncio.to_thread(authority.server, "localhost")
    service = await router([await engine()], [await engine()], entrance=settings(pair))
    context = trusting(authority)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await ask(service.port, context)


async def test_with_an_authority_clients_must_show_its_certificate(engine: Any, router: Any, tmp_path: Path) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path)
    pair = await asyncio.to_thread(authority.server, "localhost")
    known = await asyncio.to_thread(authority.client, "known")
    other = await asyncio.to_thread(Authority, tmp_path, "other")
    stranger = await asyncio.to_thread(other.client, "stranger")
    service = await router([await engine()], [await engine()], entrance=settings(pair, tls_client_ca=str(authority.ca)))
    assert (await ask(service.port, trusting(authority, known))).startswith(b"HTTP/1.1 200 ")
    for context in (trusting(authority), trusting(authority, stranger)):
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert not (await ask(service.port, context)).startswith(b"HTTP")


async def test_a_bad_file_of_keys_keeps_no_new_certificate_out(engine: Any, router: Any, tmp_path: Path) -> None:
    """1. The certificate is renewed, and somebody broke the file of keys. 2. The one is used, the other told of."""
    old, new = [await asyncio.to_thread(Authority, tmp_path, name) for name in ("old", "new")]
    pair, other = [await asyncio.to_thread(authority.server, "localhost") for authority in (old, new)]
    keys = tmp_path / "keys.toml"
    keys.write_text("keys = []")
    service = await router([await engine()], [await engine()], entrance=settings(pair, keys_file=str(keys)))
    keys.write_text("nonsense")
    for source, target in zip(other, pair, strict=True):
        target.write_bytes(source.read_bytes())
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        await service.reload_entrance()
    assert (await ask(service.port, trusting(new))).startswith(b"HTTP/1.1 ")


async def test_a_new_certificate_is_used_from_the_next_connection_on(engine: Any, router: Any, tmp_path: Path) -> None:
    old, new = [await asyncio.to_thread(Authority, tmp_path, name) for name in ("old", "new")]
    pair, other = [await asyncio.to_thread(authority.server, "localhost") for authority in (old, new)]
    service = await router([await engine()], [await engine()], entrance=settings(pair))
    assert (await ask(service.port, trusting(old))).startswith(b"HTTP/1.1 200 ")
    for source, target in zip(other, pair, strict=True):
        target.write_bytes(source.read_bytes())
    await service.reload_entrance()
    assert (await ask(service.port, trusting(new))).startswith(b"HTTP/1.1 200 ")
    with pytest.raises(ssl.SSLCertVerificationError):
        await ask(service.port, trusting(old))


def test_what_cannot_work_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    entrance = EntranceSettings(
        max_concurrent=-1, max_per_decode=-1, max_queued=-1, max_queue_wait_s=0.0, keys_file=str(tmp_path / "none"),
        engine_api_key_file=str(tmp_path / "empty"), forward_authorization="maybe", tls_key="key",
        cors_origins=["*", "https://a.example/path", "nonsense"],
    )  # fmt: skip
    with pytest.raises(ConfigError) as raised:
        check_settings(RouterSettings(prefill=["http://a:1"], decode=["http://b:2"], entrance=entrance))
    said = "\n".join(raised.value.problems)
    for part in ("--max-concurrent -1", "--max-per-decode -1", "--max-queued -1", "--max-queue-wait 0", "--keys-file",
                 "--engine-api-key-file", "--forward-authorization 'maybe'", "--tls-key", "a.example/path", "nonsense",
                 "--cors-origin *"):  # fmt: skip
        assert part in said
    assert len(raised.value.problems) == 11


def test_certificates_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    entrance = EntranceSettings(tls_cert=str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"--tls-cert: certificate .*none\.pem"):
        check_settings(RouterSettings(prefill=["http://a:1"], decode=["http://b:2"], entrance=entrance))


@pytest.mark.parametrize(
    ("host", "exposed"),
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("::", True),
        ("gpu.example", True),
    ],
)
def test_who_listens_for_others_without_keys_or_tls_is_told(host: str, exposed: bool) -> None:
    said = exposed_without(host, EntranceConfig())
    assert bool(said) == exposed
    assert ("--keys-file" in said) == ("--tls-cert" in said) == exposed
