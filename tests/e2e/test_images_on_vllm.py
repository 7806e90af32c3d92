"""Prompts with images, handed over between whole vLLMs: answers are those of one, and no image is taken for another."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import pytest
from asking import ask, assert_nothing_held, assert_same, chat, proof

from kvrelay.testing.seeing_model import IMAGE_PIXELS, build_tiny_blip2

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from asking import Question

    from kvrelay.testing.stack import RunningStack

    StartStacks = Callable[[Path], AbstractContextManager[tuple[RunningStack, RunningStack]]]

WORDS = (0, 3, 12, 60, 150)
"""Of text behind the image, within a chunk and over several of P's steps."""


def seen(model: str, colour: str, words: int, *, stream: bool = False) -> Question:
    """A question about an image of one colour."""
    from PIL import Image

    png = io.BytesIO()
    Image.new("RGB", (IMAGE_PIXELS, IMAGE_PIXELS), colour).save(png, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    content: Any = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this? " + "Say more of it. " * words},
    ]
    return chat(model, [{"role": "user", "content": content}], stream=stream)


@pytest.mark.matrix
def test_an_image_is_handed_over_with_its_prompt_and_never_another_in_its_place(
    tmp_path: Path, start_stacks: StartStacks
) -> None:
    """1. An image. 2. Another, with the same text: nothing of the first is taken. 3. The first again: it is found."""
    with start_stacks(build_tiny_blip2(tmp_path / "blip2", seed=3)) as (stack, plain):
        for at, words in enumerate(WORDS):
            for colour in ("red", "blue"):
                question = seen(stack.model_name, colour, words, stream=bool(at % 2))
                answer = ask(stack, question)
                assert_same(answer, ask(plain, question), (colour, words))
                told = proof(stack, answer)
                assert told["recomputed_tokens"] <= 1, told
                if not at:
                    assert told["earlier_tokens"] == told["local_tokens"] == 0, told
        again = ask(stack, seen(stack.model_name, "red", WORDS[-1]))
        assert proof(stack, again)["local_tokens"] > 0
        assert_nothing_held(stack)
