"""What a fake engine says on ``/v1/responses`` and ``/v1/messages``, and the responses it stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvrelay.testing import fake_answers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


class Dialects:
    """Answers of one engine."""

    def __init__(self) -> None:
        """Nothing is stored."""
        self.stored: dict[str, bytes] = {}

    def whole(self, path: str, body: Mapping[str, Any], request_id: str, kv_transfer_params: object) -> bytes | None:
        """The answer to a request that is not streamed; None where it continues what is not stored here."""
        tokens = self._tokens(body)
        if path == MESSAGES:
            return msgspec.json.encode(_message(tokens, kv_transfer_params=kv_transfer_params))
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.stored:
            return None
        said = _response(body.get("request_id", f"resp_{request_id}"), tokens, kv_transfer_params)
        answer = msgspec.json.encode(said)
        if body.get("store", True):
            self.stored[said["id"]] = answer
        return answer

    def events(self, path: str, body: Mapping[str, Any], request_id: str) -> list[bytes]:
        """The server-sent events of a streamed answer."""
        tokens = self._tokens(body)
        return _message_events(tokens) if path == MESSAGES else self._response_events(body, tokens, request_id)

    def _response_events(self, body: Mapping[str, Any], tokens: int, request_id: str) -> list[bytes]:
        name = body.get("request_id", f"resp_{request_id}")
        done = _response(name, tokens, None)
        if body.get("store", True):
            self.stored[name] = msgspec.json.encode(done)
        begun = {**done, "status": "in_progress", "output": []}
        said: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
            {"type": "response.output_item.added", "output_index": 0, "item": {**done["output"][0], "content": []}},
            {"type": "response.content_part.added", "output_index": 0, "content_index": 0, "item_id": "msg_1",
             "part": {"type": "output_text", "text": "", "annotations": []}},
            *({"type": "response.output_text.delta", "delta": fake_answers.text_of(i), "item_id": "msg_1",
               "content_index": 0, "output_index": 0, "logprobs": []} for i in range(tokens)),
            {"type": "response.completed", "response": done},
        ]  # fmt: skip
        return [_event(event["type"], {**event, "sequence_number": n}) for n, event in enumerate(said)]

    @staticmethod
    def _tokens(body: Mapping[str, Any]) -> int:
        return fake_answers.num_tokens({"max_tokens": body.get("max_output_tokens") or body.get("max_tokens")})


def _text(tokens: int) -> str:
    return "".join(map(fake_answers.text_of, range(tokens)))


def _response(name: str, tokens: int, kv_transfer_params: object) -> dict[str, Any]:
    text = {"type": "output_text", "text": _text(tokens), "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    return {
        "id": name, "object": "response", "created_at": fake_answers.CREATED, "status": "completed",
        "model": fake_answers.MODEL, "output": [message],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "usage": {"input_tokens": 7, "output_tokens": tokens, "total_tokens": 7 + tokens,
                  "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}},
        "kv_transfer_params": kv_transfer_params,
    }  # fmt: skip


def _message(tokens: int, **more: object) -> dict[str, Any]:
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "model": fake_answers.MODEL, "stop_reason": "max_tokens",
        "content": [{"type": "text", "text": _text(tokens)}], "usage": {"input_tokens": 7, "output_tokens": tokens},
        **more,
    }  # fmt: skip


def _message_events(tokens: int) -> list[bytes]:
    begun = {**_message(0), "content": [], "stop_reason": None}
    said: list[dict[str, Any]] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0,
           "delta": {"type": "text_delta", "text": fake_answers.text_of(i)}} for i in range(tokens)),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": tokens}},
        {"type": "message_stop"},
    ]  # fmt: skip
    return [_event(event["type"], event) for event in said]


def _event(kind: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(value))
