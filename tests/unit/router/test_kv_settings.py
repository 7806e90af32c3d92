"""What `kvrelay router serve` takes about KV cache events, and how a request is put to `/tokenize`."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from kvrelay.errors import BadRequestError, ConfigError, ProtocolError
from kvrelay.router.config import RouterConfig, RouterSettings, check_settings
from kvrelay.router.core.fleet import KvEndpoint, parse_address
from kvrelay.router.core.kv.prompts import Remembered, answered_ids, given_ids, question, text_of_completion
from kvrelay.router.core.kv.settings import KvSettings, parse_endpoints, parse_events, unprotected
from kvrelay.router.core.legs import Endpoint, parse_fields
from kvrelay.router.core.prompts import read_prompt
from kvrelay.router.core.routing import RoutingSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def check(*events: str, policy: str = "kv-aware", **kv: Any) -> RouterConfig:
    return check_settings(
        RouterSettings(
            prefill=["http://a:1"],
            decode=["http://b:1"],
            routing=RoutingSettings(policy=policy),
            kv=KvSettings(events=events, **kv),
        )
    )


P0, D0 = parse_address("http://a:1"), parse_address("https://b")
ENGINES = {"P0": P0, "D0": D0}


def test_an_engine_given_again_is_its_next_rank() -> None:
    assert parse_events(["D0=tcp://h:1,tcp://h:2", "P0=ipc:///run/x", "D0=tcp://[::1]:3"], ENGINES) == {
        D0: (KvEndpoint("tcp://h:1", "tcp://h:2"), KvEndpoint("tcp://[::1]:3")),
        P0: (KvEndpoint("ipc:///run/x"),),
    }
    assert [str(where) for where in parse_endpoints(["tcp://h:1,tcp://h:2", "tcp://h:3"])] == [
        "tcp://h:1,tcp://h:2", "tcp://h:3",
    ]  # fmt: skip


def test_an_engine_can_be_called_by_its_url() -> None:
    events = ["https://b:443/=tcp://h:1", "http://a:1=tcp://h:2"]
    assert parse_events(events, ENGINES) == {D0: (KvEndpoint("tcp://h:1"),), P0: (KvEndpoint("tcp://h:2"),)}


@pytest.mark.parametrize(
    "text",
    ["", "D0", "D0=", "=tcp://h:1", "D0=h:1", "D0=tcp://*:1", "D0=tcp://h:0", "D0=tcp://h:99999", "D0=udp://h:1"],
)
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="write"):
        parse_events([text], ENGINES)
    with pytest.raises(BadRequestError, match="write"):
        parse_endpoints([text])


@pytest.mark.parametrize(
    ("events", "more", "problem"),
    [
        ((), {}, "--policy kv-aware needs --kv-events"),
        (("D7=tcp://h:1",), {}, "D7=...: no engine is called so; there are P0, D0"),
        (("http://c:1=tcp://h:1",), {}, "http://c:1=...: no engine is called so"),
        (("http://=tcp://h:1",), {}, "http://=...: .* is not an engine's URL"),
        (("D0=tcp://h:1", "P0=tcp://h:1"), {}, "tcp://h:1 is given twice"),
        (("D0=tcp://h:1",), {"policy": "random"}, "has no effect without --policy kv-aware"),
        ((), {"policy": "random", "tokenizer": "/m"}, "--tokenizer has no effect without --policy kv-aware"),
        (("D0=tcp://h:1",), {"token_ids": "guess"}, "choose one of engine, off"),
        (("D0=tcp://h:1",), {"tokenize_timeout_s": 0.0}, "--tokenize-timeout 0 is out of range"),
    ],
)
def test_what_cannot_work_is_refused(events: tuple[str, ...], more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(*events, **more)


def test_what_works_is_taken() -> None:
    assert check("D0=tcp://h:1", tokenizer="/m").kv.tokenizer == "/m"


def ask(endpoint: Endpoint, **body: Any) -> tuple[Any, ...]:
    """The question, the ids that are given, and the text for a local tokenizer."""
    fields = parse_fields(msgspec.json.encode(body))
    prompt = read_prompt(fields)
    asked = question(endpoint, fields, prompt)
    return (
        None if asked is None else msgspec.json.decode(asked),
        given_ids(prompt),
        text_of_completion(endpoint, fields),
    )


def test_a_completion_is_put_as_it_came() -> None:
    asked, given, text = ask(Endpoint.COMPLETIONS, model="m", prompt="hi", max_tokens=3, add_special_tokens=False)
    assert asked == {"model": "m", "prompt": "hi", "add_special_tokens": False}
    assert (given, text) == (None, ("hi", False))


def test_a_chat_is_put_with_all_that_its_template_sees() -> None:
    more = {"tools": [{"type": "function"}], "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    asked, given, text = ask(Endpoint.CHAT, model="m", **CHAT, **more, max_tokens=3, temperature=0, stream=True)
    assert asked == {"model": "m", **CHAT, **more}
    assert given is text is None


@pytest.mark.parametrize(("prompt", "ids"), [([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([4294967295], [4294967295])])
def test_token_ids_are_taken(prompt: Any, ids: list[int]) -> None:
    assert ask(Endpoint.COMPLETIONS, prompt=prompt) == (None, array("I", ids), None)


@pytest.mark.parametrize("prompt", [[[1], [2]], [1, "a"], [1.5], [4294967296], ["a", "b"], [], None])
def test_what_is_not_one_prompt_of_token_ids_is_not(prompt: Any) -> None:
    assert ask(Endpoint.COMPLETIONS, prompt=prompt) == (None, None, None)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (
            Endpoint.CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        ),
        (Endpoint.CHAT, {**CHAT, "documents": [{}]}),
        (Endpoint.CHAT, {**CHAT, "reasoning_effort": "low"}),
        (Endpoint.COMPLETIONS, {"prompt": "hi", "truncate_prompt_tokens": 1}),
        (Endpoint.COMPLETIONS, {"prompt": "hi", "prompt_embeds": "x"}),
        (Endpoint.RESPONSES, {"input": "hi"}),
        (Endpoint.MESSAGES, CHAT),
    ],
)
def test_what_tokenize_cannot_be_told_is_not_asked(endpoint: Endpoint, body: dict[str, Any]) -> None:
    assert ask(endpoint, model="m", **body) == (None, None, None)


def test_answers_are_read_or_refused() -> None:
    assert answered_ids(b'{"count":2,"max_model_len":9,"tokens":[5,6],"token_strs":null}') == array("I", [5, 6])
    for wrong in (b"", b"[]", b'{"tokens":["a"]}', b'{"tokens":[-1]}'):
        with pytest.raises(ProtocolError, match="/tokenize answered"):
            answered_ids(wrong)


def test_what_was_used_last_is_remembered() -> None:
    remembered = Remembered(3 * (Remembered.OVERHEAD + 10))
    for number in range(3):
        remembered.add(b"%d" % number, array("I", range(10)))
    assert remembered.find(b"0") is not None
    remembered.add(b"3", array("I", range(10)))
    assert [remembered.find(b"%d" % number) is None for number in range(4)] == [False, True, False, False]
    remembered.add(b"3", array("I", range(200)))
    assert [remembered.find(b"%d" % number) is None for number in range(4)] == [True] * 4


def test_places_that_others_may_be_behind_are_named() -> None:
    here = parse_endpoints(["tcp://127.0.0.1:5557,tcp://[::1]:5558", "ipc:///run/p0", "tcp://localhost:1"])
    assert unprotected(here) == ""
    far = parse_endpoints(["tcp://10.0.0.3:5557,tcp://p0:5558", "tcp://[fd00::3]:5557,tcp://127.0.0.1:5558"])
    said = unprotected((*here, *far))
    assert "from tcp://10.0.0.3:5557, tcp://p0:5558, tcp://[fd00::3]:5557 come in the clear" in said
