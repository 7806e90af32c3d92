"""A client that goes away: within one engine step plus a second nothing runs for it, and nothing is held for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import httpx
from asking import assert_nothing_held, completion, engines_idle, eventually, held, tokens

from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Callable

    from asking import Question

    from kvrelay.testing.stack import RunningStack

STEP_TOKENS = 256
GRACE_S = 4.0
"""A second is what it takes, more is what busy cores do to this test; what was asked for would take far longer."""


def leave(stack: RunningStack, question: Question, *, when: Callable[[socket.socket], object]) -> None:
    """Send a request over a socket of its own; hang up when ``when`` returns."""
    url = httpx.URL(stack.base_url)
    body = json.dumps(question.body).encode()
    head = f"POST {question.path} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.host, url.port or 80), 60) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        when(client)


def events(count: int) -> Callable[[socket.socket], None]:
    """Return when so many events have been streamed."""

    def read(client: socket.socket) -> None:
        seen = b""
        while seen.count(b"data: ") < count:
            piece = client.recv(65536)
            assert piece, seen
            seen += piece

    return read


def step_seconds(stack: RunningStack) -> float:
    """How long P takes for one step of a long prompt, measured."""
    prompt = tokens(8 * STEP_TOKENS - 20, "leaving", int(time.monotonic() * 1000))
    began = time.monotonic()
    question = completion(stack.model_name, prompt, max_tokens=1)
    reply = httpx.post(f"{stack.prefill_urls[0]}/v1/completions", json=question.body, timeout=120)
    assert reply.status_code == 200
    return (time.monotonic() - began) / 8


def assert_soon_idle(stack: RunningStack, since: float, step_s: float) -> None:
    urls = [*stack.prefill_urls, *stack.decode_urls]
    left = since + 2 * step_s + GRACE_S - time.monotonic()  # the step it was in, however long, and the next look
    eventually(lambda: engines_idle(urls), bool, "idle engines", within_s=left)
    assert_nothing_held(stack, within_s=max(0.2, since + 2 * step_s + GRACE_S - time.monotonic()))


def test_leaving_during_the_prefill_leg_stops_p_and_never_reaches_d(stack: RunningStack) -> None:
    step_s = step_seconds(stack)
    decoded = Counters(stack.decode_urls[0]).total("vllm:request_success_total")
    question = completion(stack.model_name, tokens(2000, "leaving", 21), stream=True)

    def p_runs(_: socket.socket) -> None:
        eventually(lambda: Counters(stack.prefill_urls[0]).running, bool, "request on P")

    leave(stack, question, when=p_runs)
    assert_soon_idle(stack, time.monotonic(), step_s)
    assert Counters(stack.decode_urls[0]).total("vllm:request_success_total") == decoded


def test_leaving_between_the_legs_frees_the_hand_over_at_once(stack: RunningStack) -> None:
    """D is stopped, so that the request is on its way from P to D when the client goes."""
    finished = Counters(stack.prefill_urls[0]).total("vllm:request_success_total")
    d0 = stack.process("D0")
    os.kill(d0, signal.SIGSTOP)
    try:
        question = completion(stack.model_name, tokens(300, "leaving", 22), stream=True)

        def p_is_done(_: socket.socket) -> None:
            eventually(
                lambda: Counters(stack.prefill_urls[0]).total("vllm:request_success_total"),
                lambda total: total > finished,
                "end of the prefill",
            )
            assert held(stack)["tickets"] == 1

        leave(stack, question, when=p_is_done)
        assert_nothing_held(stack, within_s=GRACE_S)
    finally:
        os.kill(d0, signal.SIGCONT)
    eventually(lambda: engines_idle(stack.decode_urls), bool, "idle D")


def test_leaving_while_the_answer_streams_stops_d(stack: RunningStack) -> None:
    step_s = step_seconds(stack)
    question = completion(
        stack.model_name, tokens(300, "leaving", 23), stream=True, max_tokens=1500, ignore_eos=True, logprobs=None
    )
    leave(stack, question, when=events(3))
    assert_soon_idle(stack, time.monotonic(), step_s)


def test_many_clients_leaving_at_random_moments_leave_nothing_behind(stack: RunningStack) -> None:
    for n in range(10):
        question = completion(stack.model_name, tokens(100 + 150 * n, "leaving", 600 + n), stream=True, max_tokens=200)
        leave(stack, question, when=lambda _, n=n: time.sleep(0.05 * n))  # type: ignore[misc]
    urls = [*stack.prefill_urls, *stack.decode_urls]
    eventually(lambda: engines_idle(urls), bool, "idle engines")
    assert_nothing_held(stack, within_s=GRACE_S)
