"""What a fake engine says: completions in vLLM's form, of as many tokens as were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

MODEL = "fake-model"
CREATED = 1_700_000_000
DEFAULT_TOKENS = 16


def is_chat(path: str) -> bool:
    """Whether a path is the chat endpoint's."""
    return path.endswith("/chat/completions")


def text_of(index: int) -> str:
    """The token at that place of every answer."""
    return f" t{index}"


def num_tokens(body: Mapping[str, Any]) -> int:
    """How many tokens a request asks for."""
    asked = body.get("max_completion_tokens")
    asked = body.get("max_tokens") if asked is None else asked
    return DEFAULT_TOKENS if asked is None else int(asked)


def _usage(tokens: int, choices: int) -> dict[str, int]:
    return {"prompt_tokens": 7, "completion_tokens": tokens * choices, "total_tokens": 7 + tokens * choices}


def _envelope(kind: str, request_id: str, choices: list[Any], **more: Any) -> dict[str, Any]:
    return {"id": request_id, "object": kind, "created": CREATED, "model": MODEL, "choices": choices, **more}


def whole(path: str, body: Mapping[str, Any], request_id: str, kv_transfer_params: object = None) -> bytes:
    """The answer to a request that is not streamed."""
    tokens, n = num_tokens(body), int(body.get("n") or 1)
    text = "".join(map(text_of, range(tokens)))
    said = {"message": {"role": "assistant", "content": text}} if is_chat(path) else {"text": text}
    choices = [{"index": index, "logprobs": None, "finish_reason": "length", **said} for index in range(n)]
    kind = "chat.completion" if is_chat(path) else "text_completion"
    usage = _usage(tokens, n)
    return msgspec.json.encode(_envelope(kind, request_id, choices, usage=usage, kv_transfer_params=kv_transfer_params))


def events(path: str, body: Mapping[str, Any], request_id: str) -> list[bytes]:
    """The server-sent events of a streamed answer, ``[DONE]`` last."""
    tokens, n = num_tokens(body), int(body.get("n") or 1)
    chat = is_chat(path)
    kind = "chat.completion.chunk" if chat else "text_completion"
    said: list[bytes] = []
    for place in range(tokens):
        finish = "length" if place == tokens - 1 else None
        delta = {"delta": {"role": "assistant", "content": text_of(place)}} if chat else {"text": text_of(place)}
        choices = [{"index": index, "logprobs": None, "finish_reason": finish, **delta} for index in range(n)]
        said.append(event(_envelope(kind, request_id, choices)))
    if (body.get("stream_options") or {}).get("include_usage"):
        said.append(event(_envelope(kind, request_id, [], usage=_usage(tokens, n))))
    return [*said, b"data: [DONE]\n\n"]


def event(value: object) -> bytes:
    """One event that carries JSON."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


def error(status: int, message: str) -> bytes:
    """An error body as vLLM writes it."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
