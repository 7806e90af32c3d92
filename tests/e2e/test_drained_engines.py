"""An engine that is told to end while it works, and may take its time, ends its hand-overs first."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from asking import ask_and_kill, assert_nothing_held, assert_same, leased, proof, unsealed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asking import Answer, Question

    from kvrelay.testing.stack import RunningStack


@pytest.mark.matrix
def test_an_engine_that_may_finish_hands_over_whole_and_leaves_nothing(
    start_stack: Callable[..., RunningStack],
    right_answers: Callable[[Path, Sequence[Question]], list[Answer]],
    tiny_model: Path,
) -> None:
    """1. P is told to end while it saves, and saves the rest. 2. D is told so while it loads, and answers."""
    stack = start_stack("--prefill", "1", "--decode", "1", "--engine-args=--shutdown-timeout 60")
    for victim, busy in (("P0", unsealed), ("D0", leased)):
        question, answer = ask_and_kill(stack, victim, busy, "drained", victim, length=1900, number=signal.SIGTERM)
        (expected,) = right_answers(tiny_model, [question])
        assert_same(answer, expected, f"after the end of {victim}")
        assert proof(stack, answer)["recomputed_tokens"] <= 1
        assert_nothing_held(stack)
        stack.revive(400.0)
