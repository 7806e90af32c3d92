"""Text made by two detokenizers, the second beginning after the first token, is one detokenizer's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 4_000
PIECES = ["▁", "▁▁", "▁▁▁", "▁the", "▁a", "a", "b", "c", ".", ",", "é", "▁é", "你", "好", "\n", "!"]
LEVELS = ["Ġthe", "Ã©", "ä½ł", "å¥½", "Ġä½", "ł!"]


def sentencepiece(*steps: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


def llama() -> Any:
    from tokenizers import decoders as d

    return sentencepiece(d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0))


def metaspace() -> Any:
    from tokenizers import decoders as d

    return sentencepiece(d.ByteFallback(), d.Metaspace(), d.Fuse())


def byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), *LEVELS]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(vocabulary)}, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def texts(tokenizer: Any, prompt: list[int], generated: list[int]) -> list[str]:
    """Each token's text as vLLM 0.32's `FastIncrementalDetokenizer` streams it after a prompt, without importing it."""
    from tokenizers.decoders import DecodeStream

    stream, said = DecodeStream(ids=prompt, skip_special_tokens=True), []
    for token in generated:
        try:
            text = stream.step(tokenizer, token)
        except Exception as error:
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            stream = DecodeStream(skip_special_tokens=True)
            text = stream.step(tokenizer, token)
        said.append(text or "")
    return said


@pytest.mark.parametrize("make", [llama, metaspace, byte_level])
def test_what_follows_the_first_token_is_the_same_text(make: Callable[[], Any]) -> None:
    tokenizer = make()
    size = tokenizer.get_vocab_size()
    whole = range(size - (len(LEVELS) if make is byte_level else len(PIECES)), size)
    rng, used = random.Random(5), 0
    for _ in range(ROUNDS):
        prompt, generated = (
            [rng.choice(whole) if rng.random() < 0.5 else rng.randrange(size) for _ in range(count)]
            for count in (rng.randint(1, 5), 6)
        )
        first, *rest = texts(tokenizer, prompt, generated)
        if not first.strip(" ") or first.endswith("\ufffd"):
            continue  # such a token is left to D
        used += 1
        assert texts(tokenizer, prompt + generated[:1], generated[1:]) == rest, (prompt, generated)
    assert used > ROUNDS / 3
