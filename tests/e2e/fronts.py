"""A second router in front of the engines of a stack: another way of the router's, without engines of its own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import httpx
from asking import ask, proof

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asking import Answer, Question

    from kvrelay.testing.stack import RunningStack


@dataclass
class Front:
    """What is asked instead of the stack's own router."""

    base_url: str

    def ask(self, question: Question) -> Answer:
        return ask(cast("RunningStack", self), question)

    def proof(self, answer: Answer) -> dict[str, Any]:
        return proof(cast("RunningStack", self), answer)

    def record(self, answer: Answer) -> dict[str, Any]:
        reply = httpx.get(f"{self.base_url}/kvrelay/handovers/{answer.handover}", timeout=30.0)
        return reply.raise_for_status().json()  # type: ignore[no-any-return]

    def reasons(self, answer: Answer) -> list[str]:
        return [detour["reason"] for detour in self.record(answer)["detours"]]


@contextmanager
def front(stack: RunningStack, *arguments: str, decode: str = "") -> Iterator[Front]:
    """Start a router and wait until it says that it serves; end it afterwards."""
    engines = ["--prefill", stack.prefill_urls[0], "--decode", decode or stack.decode_urls[0]]
    command = [sys.executable, "-m", "kvrelay", "router", "serve", "--port", "0", "--pool", stack.pool_address]
    command += ["--ticket-timeout", "10"]  # as the stack's own router: see PATIENCE
    with subprocess.Popen([*command, *engines, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("kvrelay router ready: "), ready
            yield Front(ready.split()[3])
        finally:
            process.terminate()
