"""What two servers said to the same request, compared field by field.

A stream is put together first: what one server says in two events another may say in one. Text is added up, lists are
joined, of everything else the last value counts; kinds of events count in their order, repetitions once.
"""

from __future__ import annotations

import json
import re
from typing import Any

from msgspec import Struct, field

EXCLUDED = {
    "id": "made up by each server",
    "item_id": "likewise",
    "request_id": "likewise, and the router names responses",
    "created": "the time",
    "created_at": "the time",
    "completed_at": "the time",
    "kv_transfer_params": "the connector's own",
    "system_fingerprint": "a digest of the engine's configuration, which has a connector or not",
    "permission": "ids and times of a model's card",
    "cached_tokens": "how warm an engine is",
    "cache_write_tokens": "likewise",
    "cached_tokens_per_turn": "likewise",
    "cache_read_input_tokens": "likewise",
    "sequence_number": "counts events, which may be divided otherwise",
}
"""Fields that are not compared, wherever they are, and why."""
COUNTED = re.compile(r"<dict of \d+ items>")
"""In the error of a missing field vLLM counts the body's fields: the router's own is one of them."""
TOLERANCE = 1e-3
"""Of log-probabilities: a prompt computed in other steps is summed in another order."""
_NUMBERS = frozenset({"logprob", "logprobs", "top_logprobs", "token_logprobs", "prompt_logprobs"})
"""Below these, numbers are compared with the tolerance."""
_JOINED = frozenset(
    {"text", "content", "reasoning", "reasoning_content", "refusal", "arguments", "delta", "thinking", "partial_json"}
)
_DONE = "[DONE]"


class Said(Struct, kw_only=True):
    """What a client got."""

    status: int
    content_type: str
    body: Any
    """Decoded JSON, a stream put together, or text."""
    headers: dict[str, str] = field(default_factory=dict)


def read(status: int, headers: dict[str, str], body: bytes) -> Said:
    """Take an answer apart. ``headers``: names in lower case."""
    kind = headers.get("content-type", "").partition(";")[0].strip()
    if kind == "text/event-stream":
        said: Any = assembled(body.decode())
    else:
        try:
            said = json.loads(body)
        except ValueError:
            said = body.decode("utf-8", "replace")
    return Said(status=status, content_type=kind, body=said, headers=headers)


def assembled(text: str) -> dict[str, Any]:
    """A stream of events, put together."""
    whole: dict[str, Any] = {"events": [], "done": False}
    for event in text.split("\n\n"):
        lines = [line for line in event.split("\n") if line and not line.startswith(":")]
        named = [line[7:] for line in lines if line.startswith("event: ")]
        data = "\n".join(line[6:] for line in lines if line.startswith("data: "))
        if not lines:
            continue
        if data == _DONE:
            whole["done"] = True
            continue
        kind = named[0] if named else ""
        if not whole["events"] or whole["events"][-1] != kind:
            whole["events"].append(kind)
        _join(whole.setdefault(kind or "said", {}), json.loads(data))
    return whole


def differences(ours: Said, theirs: Said) -> list[str]:
    """Every place where the two differ, as ``path: ours, theirs``; empty if they say the same."""
    found = [
        f"{name}: {one!r}, {other!r}"
        for name, one, other in (
            ("status", ours.status, theirs.status),
            ("content type", ours.content_type, theirs.content_type),
        )
        if one != other
    ]
    _compare(ours.body, theirs.body, "", near=False, found=found)
    return found


def _join(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    for name, value in piece.items():
        known = whole.get(name)
        if name == "choices" or (name == "tool_calls" and isinstance(value, list)):
            by_index = whole.setdefault(name, {})
            for item in value:
                _join(by_index.setdefault(str(item.get("index")), {}), item)
        elif isinstance(value, dict) and isinstance(known, dict):
            _join(known, value)
        elif isinstance(value, dict):
            whole[name] = {}
            _join(whole[name], value)
        elif isinstance(value, str) and isinstance(known, str) and name in _JOINED:
            whole[name] = known + value
        elif isinstance(value, list) and isinstance(known, list):
            whole[name] = [*known, *value]
        elif value is not None or name not in whole:
            whole[name] = value


def _compare(ours: Any, theirs: Any, path: str, *, near: bool, found: list[str]) -> None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in {**ours, **theirs}:
            if name in EXCLUDED:
                continue
            if name not in ours or name not in theirs:
                found.append(f"{path}.{name}: {'missing' if name not in ours else 'one too many'}")
            else:
                _compare(ours[name], theirs[name], f"{path}.{name}", near=near or name in _NUMBERS, found=found)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            _compare(one, other, f"{path}[{index}]", near=near, found=found)
    elif near and _is_number(ours) and _is_number(theirs):
        if abs(ours - theirs) > TOLERANCE:
            found.append(f"{path}: {ours}, {theirs}")
    elif isinstance(ours, str) and isinstance(theirs, str):
        if COUNTED.sub("", ours) != COUNTED.sub("", theirs):
            found.append(f"{path}: {ours[:300]!r}, {theirs[:300]!r}")
    elif ours != theirs or type(ours) is not type(theirs):
        found.append(f"{path}: {str(ours)[:300]!r}, {str(theirs)[:300]!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
