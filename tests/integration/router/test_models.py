"""Several models behind one router: each request to engines that serve its model, one list of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrelay.router import models
from kvrelay.testing.fake_engine import FakeEngine, fail, hang
from kvrelay.testing.raw_http import RawClient, get, post

if TYPE_CHECKING:
    import pytest


async def fleet(engine: Any, *served: str) -> list[FakeEngine]:
    """Engines that serve ``a``, or ``a,b`` for two models."""
    engines = [await engine() for _ in served]
    for one, names in zip(engines, served, strict=True):
        one.models = names.split(",")
    return engines


async def test_a_request_goes_to_engines_that_serve_its_model(engine: Any, router: Any) -> None:
    prefills, decodes = await fleet(engine, "a", "b"), await fleet(engine, "a", "b", "a,lora")
    port = (await router(prefills, decodes)).port
    for _ in range(3):
        for model, p, d in (("a", {0}, {0, 2}), ("b", {1}, {1}), ("lora", set(), {2})):
            for path in ("/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"):
                asked = [len(one.requests) for one in prefills + decodes]
                assert (await post(port, path, {"model": model, "max_tokens": 2})).status == 200
                served = [len(one.requests) - n for one, n in zip(prefills + decodes, asked, strict=True)]
                assert {index for index, n in enumerate(served[:2]) if n} == (set() if path == "/tokenize" else p)
                assert {index for index, n in enumerate(served[2:]) if n} <= d


async def test_a_model_only_d_serves_is_a_detour(engine: Any, router: Any) -> None:
    prefills, decodes = await fleet(engine, "a"), await fleet(engine, "a", "b")
    port = (await router(prefills, decodes)).port
    answer = await post(port, "/v1/completions", {"model": "b", "prompt": "x"})
    record = (await get(port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json
    assert [detour["reason"] for detour in record["detours"]] == ["other_model"]


async def test_audio_is_sent_as_a_form_and_goes_by_its_model_too(engine: Any, router: Any) -> None:
    decodes = await fleet(engine, "a", "whisper")
    port = (await router([await engine()], decodes)).port
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
    for _ in range(3):
        async with await RawClient.open(port) as client:
            client.send(
                b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\n"
                b"content-type: multipart/form-data; boundary=b\r\ncontent-length: %d\r\n\r\n%b" % (len(form), form)
            )
            answer = await client.answer()
        assert answer.headers["x-kvrelay-decode"] == "d1"


async def test_a_model_nobody_knows_is_the_engines_own_404(engine: Any, router: Any) -> None:
    decodes = await fleet(engine, "a", "b")
    for decode in decodes:
        decode.default = fail(404, "no such model")
    port = (await router([await engine()], decodes)).port
    answer = await post(port, "/v1/embeddings", {"model": "c", "input": "x"})
    assert (answer.status, answer.json["error"]["message"]) == (404, "no such model")


async def test_an_adapter_loaded_while_running_is_found(
    engine: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MISSING_S", -1.0)
    decodes = await fleet(engine, "a", "a")
    port = (await router([await engine()], decodes)).port
    await post(port, "/tokenize", {"model": "a"})
    decodes[1].models.append("new")
    for _ in range(4):
        assert (await post(port, "/tokenize", {"model": "new"})).headers["x-kvrelay-decode"] == "d1"


async def test_all_models_are_listed_once_and_a_dead_engine_does_not_matter(engine: Any, router: Any) -> None:
    prefills, decodes = await fleet(engine, "a"), await fleet(engine, "a,lora", "b", "gone")
    port = (await router(prefills, decodes)).port
    await decodes[2].stop()
    listed = (await get(port, "/v1/models")).json
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["a", "lora", "b"]


async def test_an_engine_that_does_not_tell_its_models_is_asked_for_any(
    engine: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "WAIT_S", 0.05)

    async def tell_nothing(exchange: Any) -> None:
        if exchange.request.method == "GET":
            await hang()(exchange)
        await quiet.answer_well(exchange)

    (known,) = await fleet(engine, "a")
    quiet = await engine()
    quiet.default = tell_nothing
    port = (await router([await engine()], [known, quiet])).port
    answered = {(await post(port, "/tokenize", {"model": "a"})).headers["x-kvrelay-decode"] for _ in range(4)}
    assert answered == {"d0", "d1"}


async def test_engines_are_asked_with_the_clients_key(engine: Any, router: Any) -> None:
    seen: list[str | None] = []

    async def look(exchange: Any) -> None:
        if exchange.request.target == "/v1/models":
            seen.append(exchange.request.headers.get("authorization"))
        await decodes[0].answer_well(exchange)

    decodes = await fleet(engine, "a", "a")
    for decode in decodes:
        decode.default = look
    port = (await router([await engine()], decodes)).port
    await post(port, "/tokenize", {"model": "a"}, headers="authorization: Bearer k\r\n")
    assert seen == ["Bearer k"] * 2
