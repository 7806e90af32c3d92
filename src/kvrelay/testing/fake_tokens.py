"""A fake engine that knows tokens: it goes on from where token ids end, and tells what it adds to requests.

``FakeEngine.start(default=TokenEngine().behave)``. A text's tokens are its characters; what is generated after a prompt
is always the same row of tokens, so that two engines continue each other exactly as one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.testing.fake_answers import MODEL, error, event, is_chat, num_tokens, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrelay.testing.fake_engine import Exchange

GENERATED = 100_000
"""Token ids from here on are generated ones, in order."""


class TokenEngine:
    """What one engine says. Attributes may be changed at any time."""

    def __init__(self, *, created: int = 1_700_000_000) -> None:
        """``created``: the time it claims to answer at."""
        self.created = created
        self.max_model_len = 4_096
        self.max_output: int | None = None
        self.penalty: float | None = None
        """A model's own presence penalty."""
        self.parses_tools = False
        self.stops_after: int | None = None
        """How many tokens the answer has, if it is not cut."""
        self.texts: dict[int, str] = {}
        """Instead of the text of the token at that place."""
        self.usage_always = False
        self.rendered = 0
        """Requests it has shown complete."""

    async def behave(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = exchange.request
        path = request.target.partition("?")[0]
        if path.endswith("/render"):
            self.rendered += 1
            self._render(exchange, path.removesuffix("/render"), request.json)
        elif path == "/v1/models":
            card = {"id": MODEL, "parent": None, "max_model_len": self.max_model_len}
            exchange.answer(200, msgspec.json.encode({"object": "list", "data": [card]}))
        elif request.method == "POST":
            self._generate(exchange, path, request.json)
        else:
            exchange.answer(200, b"")

    def _render(self, exchange: Exchange, path: str, body: Mapping[str, Any]) -> None:
        if body.get("tools") and not self.parses_tools:
            exchange.answer(400, error(400, '"auto" tool choice requires --enable-auto-tool-choice'))
            return
        ids = _prompt(path, body)
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": self._limit(path, body, len(ids))}
        if self.penalty is not None:
            params["presence_penalty"] = self.penalty
        rendered = {"token_ids": ids, "sampling_params": params, "reasoning_parser_kwargs": None}
        exchange.answer(200, msgspec.json.encode(rendered if is_chat(path) else [rendered]))

    def _limit(self, path: str, body: Mapping[str, Any], prompt: int) -> int:
        asks = not is_chat(path) or any(body.get(name) for name in ("max_tokens", "max_completion_tokens"))
        limits = [self.max_model_len - prompt]
        limits += [num_tokens(body)] if asks else []
        limits += [self.max_output] if self.max_output is not None else []
        return min(limits)

    def _generate(self, exchange: Exchange, path: str, body: Mapping[str, Any]) -> None:
        ids = _prompt(path, body)
        limit = self._limit(path, body, len(ids))
        if limit < 1:
            exchange.answer(400, error(400, f"the prompt of {len(ids)} tokens is too long"))
            return
        first = sum(token >= GENERATED for token in ids)
        ended = self.stops_after is not None and self.stops_after <= first + limit
        places = range(first, self.stops_after if ended and self.stops_after is not None else first + limit)
        said = _Said(self, path, body, exchange.request.headers.get("x-request-id", "none"), ids)
        finish = "stop" if ended else "length"
        if not body.get("stream"):
            exchange.answer(200, said.whole(places, finish))
            return
        exchange.head(200, "text/event-stream; charset=utf-8")
        for each in said.events(places, finish):
            exchange.chunk(each)
        exchange.end()

    def text(self, place: int) -> str:
        """Of the token at that place of every answer."""
        ends = self.stops_after is not None and place == self.stops_after - 1
        return "" if ends else self.texts.get(place, text_of(place))


class _Said:
    def __init__(
        self, engine: TokenEngine, path: str, body: Mapping[str, Any], request_id: str, ids: list[int]
    ) -> None:
        self._engine = engine
        self._chat = is_chat(path)
        self._body = body
        self._ids = ids
        options = body.get("stream_options") or {}
        self._usage_last = engine.usage_always or bool(options.get("include_usage"))
        kind = (
            ("chat.completion.chunk" if body.get("stream") else "chat.completion") if self._chat else "text_completion"
        )
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{request_id}",
            "object": kind,
            "created": engine.created,
            "model": MODEL,
        }

    def whole(self, places: range, finish: str) -> bytes:
        text = "".join(map(self._engine.text, places))
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice: dict[str, Any] = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        more: dict[str, Any] = {}
        if self._body.get("return_token_ids"):
            (more if self._chat else choice)["prompt_token_ids"] = self._ids
        usage = self._usage(len(places))
        return msgspec.json.encode({**self._head, "choices": [choice], "usage": usage, **more})

    def events(self, places: range, finish: str) -> list[bytes]:
        shown = self._ids if self._body.get("return_token_ids") else None
        said: list[bytes] = []
        if self._chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            said.append(self._event([role], 0, prompt_token_ids=shown, prompt_text=None))
        for count, place in enumerate(places, 1):
            last = place == places[-1]
            text = self._engine.text(place)
            choice: dict[str, Any] = {"index": 0, **({"delta": {"content": text}} if self._chat else {"text": text})}
            choice |= {"logprobs": None, "finish_reason": finish if last else None}
            if last or not self._chat:
                choice["stop_reason"] = None
            if not self._chat:
                choice["prompt_token_ids"] = shown if count == 1 else None
            choice["token_ids"] = [GENERATED + place] if self._body.get("return_token_ids") else None
            said.append(self._event([choice], count))
        if self._usage_last:
            said.append(event({**self._head, "choices": [], "usage": self._usage(len(places))}))
        return [*said, b"data: [DONE]\n\n"]

    def _event(self, choices: list[Any], count: int, **more: Any) -> bytes:
        usage = {"usage": self._usage(count)} if self._engine.usage_always else {}
        return event({**self._head, "choices": choices, **usage, **more})

    def _usage(self, count: int) -> dict[str, int]:
        prompt = len(self._ids)
        return {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}


def _prompt(path: str, body: Mapping[str, Any]) -> list[int]:
    """The token ids of what is asked."""
    if not is_chat(path):
        prompt = body["prompt"]
        return [ord(char) for char in prompt] if isinstance(prompt, str) else list(prompt)
    reused: list[int] | None = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    return reused or [ord(char) for message in body["messages"] for char in str(message["content"])]
