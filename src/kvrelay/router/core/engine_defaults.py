"""What an engine adds to requests by itself, asked of it beforehand: its limits, a model's defaults, its parsers.

vLLM makes a request complete with its own settings before it computes. At ``.../render`` it shows the result, and
computes nothing. A chat's tools are refused there where nothing would parse them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from kvrelay.router.core.legs import Endpoint

if TYPE_CHECKING:
    from collections.abc import Generator

MODELS = "/v1/models"
RENDER = {endpoint: f"{endpoint}/render" for endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT)}
_HARMLESS = frozenset({
    "temperature", "max_tokens", "repetition_penalty", "stop_token_ids", "top_p", "top_k", "min_p", "output_kind",
    "skip_clone", "extra_args",
})  # fmt: skip
"""What a greedy request may have by default: a repetition penalty counts prompt and answer alike. Nothing else may be
anything but empty, zero or false."""
_VLLM_MAX_TOKENS = 16
"""Where vLLM leaves the number out, it is this one."""
_MESSAGES = [{"role": "user", "content": "a"}]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_encode = msgspec.json.Encoder().encode


class Defaults(Struct, frozen=True):
    """Of one model on one engine."""

    max_model_len: int
    max_output: int | None
    """Tokens it gives at most, whatever is asked."""
    default_output: int | None
    """Tokens it gives a chat at most that asks for no number; None: the model's context."""
    changes_text: bool
    """Whether it adds anything to a greedy request that counts its answer apart from its prompt."""
    plain_chat: bool
    """Whether a chat's text is passed on as it is generated: no parser is set."""
    sampling: str
    """What it adds, to be compared."""

    def agrees(self, other: Defaults) -> bool:
        """Whether both would choose the same token."""
        return (self.sampling, self.plain_chat) == (other.sampling, other.plain_chat)


class Question(Struct, frozen=True):
    """To be asked of an engine. ``body``: empty for a GET."""

    path: str
    body: bytes = b""


class Said(Struct, frozen=True):
    """Its answer."""

    status: int
    body: bytes


class _Card(Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(Struct):
    data: list[_Card]


class _Rendered(Struct):
    token_ids: list[int]
    sampling_params: dict[str, Any]
    reasoning_parser_kwargs: dict[str, Any] | None = None

    @property
    def max_tokens(self) -> int:
        value = self.sampling_params.get("max_tokens", _VLLM_MAX_TOKENS)
        return value if isinstance(value, int) else 0


def ask_defaults(model: str) -> Generator[Question, Said, Defaults | None]:
    """Yields questions, is sent the answers; what they come to. None: an adapter, no such model, or not to be known.

    Raises:
        msgspec.MsgspecError: an answer is not as vLLM's are.
    """
    said = yield Question(MODELS)
    cards = msgspec.json.decode(said.body, type=_Cards).data if said.status == 200 else []
    length = next((card.max_model_len for card in cards if card.id == model and card.parent is None), None)
    if length is None or length < 2:
        return None
    asked = {"model": model, "temperature": 0}
    said = yield Question(RENDER[Endpoint.COMPLETIONS], _encode({**asked, "prompt": [1], "max_tokens": length}))
    if said.status != 200:
        return None
    (rendered,) = msgspec.json.decode(said.body, type=list[_Rendered])
    said = yield Question(RENDER[Endpoint.CHAT], _encode({**asked, "messages": _MESSAGES}))
    chat = msgspec.json.decode(said.body, type=_Rendered) if said.status == 200 else None
    tools = {"messages": _MESSAGES, "tools": [_TOOL], "tool_choice": "auto"}
    said = yield Question(RENDER[Endpoint.CHAT], _encode({**asked, **tools}))
    params = rendered.sampling_params
    return Defaults(
        max_model_len=length,
        max_output=_below(rendered.max_tokens, length - len(rendered.token_ids)),
        default_output=None if chat is None else _below(chat.max_tokens, length - len(chat.token_ids)),
        changes_text=any(value for name, value in params.items() if name not in _HARMLESS),
        plain_chat=chat is not None and chat.reasoning_parser_kwargs is None and said.status == 400,
        sampling=repr(sorted((name, value) for name, value in params.items() if name != "max_tokens")),
    )


def _below(limit: int, context: int) -> int | None:
    return limit if limit < context else None
