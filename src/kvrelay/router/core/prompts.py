"""What can be told of a prompt before any engine has seen it: how long it is, and what it begins with.

Token ids are counted. Text is estimated: by bytes per token, as the engines' own counts of earlier prompts of that
model say. What cannot be estimated from the request, since it stands for something else, is *unsized*: images and other
media, embeddings, state that an engine keeps.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import TYPE_CHECKING

from msgspec import Raw, Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

PROMPT_FIELDS = ("tools", "documents", "system", "instructions", "messages", "prompt", "input")
"""In the order in which chat templates use to print them."""
_UNSIZED_FIELDS = ("prompt_embeds", "previous_response_id")
_QUOTE = ord('"')
_TOKEN_IDS = re.compile(rb"\s*\[\s*(?:\[\s*)?[0-9]")
_MEDIA = (
    b'"image_url"', b'"video_url"', b'"audio_url"', b'"input_image"', b'"input_audio"', b'"image_embeds"',
    b'"media_type"',
)  # fmt: skip
"""In a client's text the quotes would be escaped."""
_NULL = Raw(b"null")


class Prompt(Struct, frozen=True):
    """What a request's body says."""

    parts: tuple[Raw, ...]
    """What is text, or token ids, as it came."""
    num_bytes: int
    exact: int | None
    """How many tokens, where they are given."""
    sized: bool
    """Whether the rest says how long the prompt is, unless it `has_media`."""


def read_prompt(fields: Mapping[str, Raw]) -> Prompt:
    """Of a client's body, taken apart."""
    parts = tuple([fields[name] for name in PROMPT_FIELDS if name in fields and fields[name] != _NULL])
    sized = bool(parts) and not any(fields.get(name, _NULL) != _NULL for name in _UNSIZED_FIELDS)
    views = [memoryview(part) for part in parts]
    exact: int | None = None
    if len(parts) == 1 and views[0][0] != _QUOTE and _TOKEN_IDS.match(views[0]) is not None:
        exact = bytes(parts[0]).count(b",") + 1
    return Prompt(parts, sum(map(len, views)), exact, sized)


def has_media(prompt: Prompt) -> bool:
    """Whether there is something beside text in it. Reads all of it."""
    return prompt.exact is None and any(kind in text for text in map(bytes, prompt.parts) for kind in _MEDIA)


class TokenRates:
    """Bytes of a request's text per token of its prompt, by whatever ``key`` tells prompts of one kind."""

    __slots__ = ("_sums",)

    GUESS = 4.0
    """Of English text with the usual vocabularies, before anything is known."""
    GUESS_WEIGHT = 256.0
    """Tokens that the guess counts for."""
    MEMORY = 200_000.0
    """Tokens that what was learnt counts for at most."""
    MAX_KEYS = 256

    def __init__(self) -> None:
        """Nothing is learnt yet."""
        self._sums: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def estimate(self, key: str, num_bytes: int) -> int:
        """Tokens of a prompt."""
        return max(1, round(num_bytes / self.bytes_per_token(key))) if num_bytes else 0

    def bytes_per_token(self, key: str) -> float:
        """As far as is known."""
        num_bytes, num_tokens = self._sums.get(key, (self.GUESS * self.GUESS_WEIGHT, self.GUESS_WEIGHT))
        return num_bytes / num_tokens

    def learn(self, key: str, num_bytes: int, num_tokens: int) -> None:
        """An engine says how many tokens a prompt had."""
        if num_bytes <= 0 or num_tokens <= 0:
            return
        had_bytes, had_tokens = self._sums.pop(key, (self.GUESS * self.GUESS_WEIGHT, self.GUESS_WEIGHT))
        keep = min(1.0, self.MEMORY / (had_tokens + num_tokens))
        self._sums[key] = (had_bytes + num_bytes) * keep, (had_tokens + num_tokens) * keep
        if len(self._sums) > self.MAX_KEYS:
            self._sums.popitem(last=False)
