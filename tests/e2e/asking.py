"""Asking a server the same thing in four ways, and comparing what comes back token by token."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.errors import KvRelayError
from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvrelay.testing.stack import RunningStack

ANSWER_S = 180.0
DEADLINE_S = 90.0
"""Of an answer during which something is killed."""
ATTEMPTS = 10
LOGPROB_TOLERANCE = 1e-3
ROUNDING_TOLERANCE = 0.1
COMPARED_LOGPROBS = 8
MAX_TOKENS = 16
VOCABULARY = 2000


Same = Callable[["Answer", "Answer", object], None]
"""Asserts that an answer is as good as the right one, and says else what was asked."""


@dataclass
class Question:
    """One request body and where it goes."""

    path: str
    body: dict[str, Any]

    @property
    def streamed(self) -> bool:
        """Whether the answer is an event stream."""
        return bool(self.body.get("stream"))


@dataclass
class Answer:
    """What a client saw."""

    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    handover: str | None = None
    prefill: str | None = None
    decode: str | None = None
    error: str = ""
    proof: dict[str, Any] = field(default_factory=dict)
    """What the answer itself tells of its hand-over, if it was asked for."""
    events: int = 0
    seconds: float = 0.0


def tokens(count: int, *seed: object) -> list[int]:
    """A prompt of ``count`` arbitrary token ids. Another seed, another prompt: name the test in it."""
    return random.Random(repr(seed)).choices(range(10, VOCABULARY), k=count)


def completion(model: str, prompt: list[int] | str, *, stream: bool = False, **more: Any) -> Question:
    """A greedy ``/v1/completions`` request that shows its token ids and log-probabilities."""
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 2}
    return Question("/v1/completions", _streaming({**body, "return_token_ids": True, **more}, stream))


def chat(model: str, messages: Sequence[dict[str, str]], *, stream: bool = False, **more: Any) -> Question:
    """The same for ``/v1/chat/completions``."""
    body = {"model": model, "messages": list(messages), "max_tokens": MAX_TOKENS, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    return Question("/v1/chat/completions", _streaming({**body, **more}, stream))


def _streaming(body: dict[str, Any], stream: bool) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body


def ask(
    stack: RunningStack, question: Question, *, timeout_s: float = ANSWER_S, headers: dict[str, str] | None = None
) -> Answer:
    """Ask once. HTTP errors and error events are part of the answer; a broken connection raises."""
    answer = Answer()
    began = time.monotonic()
    with (
        httpx.Client(timeout=timeout_s) as client,
        client.stream("POST", f"{stack.base_url}{question.path}", json=question.body, headers=headers) as response,
    ):
        answer.status = response.status_code
        for name in ("handover", "prefill", "decode"):
            setattr(answer, name, response.headers.get(f"x-kvrelay-{name}"))
        if told := response.headers.get("x-kvrelay-proof"):
            answer.proof = json.loads(told)
        if response.status_code != 200:
            answer.error = response.read().decode()
        elif question.streamed:
            assert response.headers["content-type"].startswith("text/event-stream")
            for event in _events(response, answer):
                answer.events += 1
                _take(answer, event, "delta")
        else:
            _take(answer, json.loads(response.read()), "message")
    answer.seconds = time.monotonic() - began
    return answer


PROOF_COMMENT = ": kvrelay "


def _events(response: httpx.Response, answer: Answer) -> Iterator[dict[str, Any]]:
    """Events of a stream that ends as it should: with ``[DONE]``, or with an error; a proof may follow."""
    ended = False
    for line in response.iter_lines():
        if line == "data: [DONE]":
            ended = True
        elif line.startswith(PROOF_COMMENT):
            answer.proof = json.loads(line.removeprefix(PROOF_COMMENT))
        elif line.startswith("data: "):
            assert not ended, "an event after the end"
            event = json.loads(line.removeprefix("data: "))
            ended = "error" in event
            yield event
    assert ended, "the stream has no end"


def _take(answer: Answer, piece: dict[str, Any], part: str) -> None:
    if "error" in piece:
        answer.error = json.dumps(piece)
    if usage := piece.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
    for choice in piece.get("choices", ()):
        answer.token_ids += choice.get("token_ids") or ()
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        said = choice.get("text") if "text" in choice else (choice.get(part) or {}).get("content")
        answer.text += said or ""
        if logprobs := choice.get("logprobs"):
            if "content" in logprobs:
                answer.logprobs += [token["logprob"] for token in logprobs["content"]]
            else:
                answer.logprobs += logprobs["token_logprobs"]


def ask_all(stack: RunningStack, questions: Sequence[Question], *, at_once: int = 1) -> list[Answer]:
    """Ask all, ``at_once`` at a time; answers in the questions' order."""
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda question: ask(stack, question), questions))


def assert_same(ours: Answer, theirs: Answer, what: object) -> None:
    """Token ids, text, finish reason and usage are equal, and the first log-probabilities close."""
    assert theirs.status == 200, f"{what}: the reference failed: {theirs.error}"
    assert ours.status == 200, f"{what}: {ours.error}"
    assert not ours.error, f"{what}: {ours.error}"
    assert ours.token_ids == theirs.token_ids, what
    assert len(ours.token_ids) > 0, what
    for name in ("text", "finish_reason", "prompt_tokens"):
        assert getattr(ours, name) == getattr(theirs, name), f"{what}: {name}"
    assert len(ours.logprobs) == len(theirs.logprobs) == len(ours.token_ids), what
    first = slice(0, COMPARED_LOGPROBS)
    assert ours.logprobs[first] == pytest.approx(theirs.logprobs[first], abs=LOGPROB_TOLERANCE), what


def assert_same_but_for_rounding(ours: Answer, theirs: Answer, what: object) -> None:
    """The same for engines that compute in 16 bits, in which steps of other sizes round otherwise.

    Log-probabilities are close, and tokens equal, up to the first token that rounding has chosen.
    """
    assert (ours.status, theirs.status, ours.error) == (200, 200, ""), f"{what}: {ours.error} {theirs.error}"
    assert ours.prompt_tokens == theirs.prompt_tokens, what
    same = 0
    while same < len(theirs.token_ids) and ours.token_ids[same : same + 1] == theirs.token_ids[same : same + 1]:
        same += 1
    until = slice(0, same + 1)
    assert ours.logprobs[until] == pytest.approx(theirs.logprobs[until], abs=ROUNDING_TOLERANCE), what


def proofs(stack: RunningStack, answer: Answer) -> list[dict[str, Any]]:
    """What D's connector said about an answer's hand-over; waits for it."""
    assert answer.handover, "the answer names no hand-over"
    record = httpx.get(f"{stack.base_url}/kvrelay/handovers/{answer.handover}", timeout=20)
    assert record.status_code == 200, record.text
    found: list[dict[str, Any]] = record.json()["proofs"]
    return found


def assert_each_handed_over(stack: RunningStack, reference: RunningStack, question: Question, *, prompts: int) -> None:
    """Ask about several prompts, or for several choices: the same answer and usage, each choice taken from P.

    P computes each of the ``prompts`` once, however many choices are made of it.
    """
    done = sum(Counters(url).total("vllm:request_success_total") for url in stack.prefill_urls)
    ours, theirs = (
        httpx.post(f"{one.base_url}{question.path}", json=question.body, timeout=ANSWER_S) for one in (stack, reference)
    )
    assert (ours.status_code, theirs.status_code) == (200, 200), (ours.text, theirs.text)
    right, got = theirs.json(), ours.json()
    for what in ("index", "token_ids", "finish_reason"):
        assert [one[what] for one in got["choices"]] == [one[what] for one in right["choices"]], what
    for what in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got["usage"][what] == right["usage"][what], what
    answer = Answer(handover=ours.headers["x-kvrelay-handover"])
    count = len(right["choices"])
    told = eventually(lambda: proofs(stack, answer), lambda found: len(found) >= count, f"{count} proofs")
    assert len(told) == count
    assert all(one["recomputed_tokens"] <= 1 for one in told), told
    assert sum(one["handed_over_tokens"] for one in told), told
    now = sum(Counters(url).total("vllm:request_success_total") for url in stack.prefill_urls)
    assert now - done == prompts, "requests that P answered"


PARTS = ("handed_over", "earlier", "local", "recomputed")


def proof(stack: RunningStack, answer: Answer) -> dict[str, Any]:
    """The only proof of a hand-over."""
    (only,) = eventually(lambda: proofs(stack, answer), lambda found: len(found) == 1, f"a proof of {answer.handover}")
    assert only["prompt_tokens"] == sum(only[f"{part}_tokens"] for part in PARTS), only
    return only


def ask_and_kill(
    stack: RunningStack,
    victim: str,
    when: Callable[[PoolClient], bool],
    *seed: object,
    length: int,
    pid: int | None = None,
    number: int = signal.SIGKILL,
    headers: dict[str, str] | None = None,
    through: Callable[[Question], Answer] | None = None,
) -> tuple[Question, Answer]:
    """Ask, kill ``victim`` as soon as ``when`` says so, and wait for the answer.

    A prompt that is answered before the moment was seen is followed by another. ``pid``: the process of ``victim`` to
    kill, if not the one that was started; the rest of it must follow by itself. ``number``: of the signal. ``through``:
    asks, if not the stack's own router is to be asked.
    """
    started = stack.process(victim)
    through = through or partial(ask, stack, timeout_s=DEADLINE_S, headers=headers)
    with (
        PoolClient.connect(stack.pool_address, name="test", map_arena=False) as pool,
        ThreadPoolExecutor(1) as threads,
    ):
        for attempt in range(ATTEMPTS):
            question = completion(stack.model_name, tokens(length, "fault", *seed, attempt), stream=True)
            answer = threads.submit(through, question)
            while not answer.done():
                if when(pool):
                    os.kill(pid or started, number)
                    eventually(lambda: stack.has_ended(victim, started), bool, f"end of {victim}", within_s=60.0)
                    return question, answer.result()
    pytest.fail(f"{ATTEMPTS} prompts were answered before the moment to kill {victim} was seen")


def leased(pool: PoolClient) -> bool:
    """D has found the prompt and is loading it."""
    return pool.stat()["leases"] > 0


def unsealed(pool: PoolClient) -> bool:
    """P is writing."""
    return pool.stat()["unsealed"] > 0


def assert_handed_over_whole(
    stack: RunningStack, question: Question, right: Answer, length: int, what: object, same: Same = assert_same
) -> tuple[Answer, dict[str, Any]]:
    """Ask about a new prompt of ``length`` tokens: the right answer, D computing its last token at most; with proof."""
    answer = ask(stack, question)
    same(answer, right, what)
    told = proof(stack, answer)
    assert told["prompt_tokens"] == length
    assert told["recomputed_tokens"] <= 1, (answer.prefill, answer.decode, told)
    assert told["handed_over_tokens"] >= length - 1, (answer.prefill, answer.decode, told)
    return answer, told


class Series:
    """Questions about prompts of given lengths, about prompts that share a beginning, and several at once."""

    def __init__(self, model: str, lengths: Sequence[int], *seed: object) -> None:
        """``seed``: name the test in it."""
        self._lengths = lengths
        self._single = [
            completion(model, tokens(length, *seed, length), stream=bool(n % 2)) for n, length in enumerate(lengths)
        ]
        shared = tokens(400, *seed, "shared")
        prompts = (shared, shared + tokens(60, *seed, "one"), shared + tokens(300, *seed, "two"), shared[:200])
        self._prefixes = [completion(model, prompt) for prompt in prompts]
        self._crowd = [completion(model, tokens(90 + 83 * n, *seed, "crowd", n)) for n in range(6)]

    @property
    def questions(self) -> list[Question]:
        """All of them, in the order of the answers that `check` wants."""
        return [*self._single, *self._prefixes, *self._crowd]

    def check(
        self,
        stack: RunningStack,
        right: Sequence[Answer],
        *,
        block_tokens: int,
        what: object = "",
        same: Same = assert_same,
    ) -> list[dict[str, Any]]:
        """Ask a stack: its answers must be the ``right`` ones, and each prompt handed over whole; then it is idle.

        Half of those asked at once must be whole: engines wait for a late pool a bounded moment only. All proofs.

        ``block_tokens``: of D. Its own hits end at a block's end, so of a shared beginning it may compute so many.
        ``same``: asserts that an answer is the right one.
        """
        told = []
        singles, prefixes = len(self._single), len(self._prefixes)
        for length, question, theirs in zip(self._lengths, self._single, right[:singles], strict=True):
            told.append(assert_handed_over_whole(stack, question, theirs, length, f"{what}: {length} tokens", same)[1])
        for n, (question, theirs) in enumerate(zip(self._prefixes, right[singles:][:prefixes], strict=True)):
            answer = ask(stack, question)
            same(answer, theirs, f"{what}: prefix {n}")
            told.append(proof(stack, answer))
            assert told[-1]["recomputed_tokens"] <= block_tokens, told[-1]
        answers = ask_all(stack, self._crowd, at_once=3)
        for n, (answer, theirs) in enumerate(zip(answers, right[singles + prefixes :], strict=True)):
            same(answer, theirs, f"{what}: at once, {n}")
        crowd = [proof(stack, answer) for answer in answers]
        whole = [one["handed_over_tokens"] == one["prompt_tokens"] - 1 for one in crowd]
        assert sum(whole) >= len(whole) / 2, (what, crowd)
        for url in (*stack.prefill_urls, *stack.decode_urls):
            assert Counters(url).total("kvrelay:load_failed_total") == 0, url
        assert_nothing_held(stack)
        return told + crowd


def assert_both_replicas_took_part(stack: RunningStack, told: Sequence[dict[str, Any]]) -> None:
    """Each of two data-parallel replicas of P and of D answered some; ``told``: proofs, which name those of D."""
    assert {one["engine"] for one in told} == {"D0-dp0", "D0-dp1"}
    for url in (*stack.prefill_urls, *stack.decode_urls):
        answered = [Counters(url).total("vllm:request_success_total", engine=replica) for replica in ("0", "1")]
        assert all(answered), (url, answered)


T = TypeVar("T")


def eventually(look: Callable[[], T], good: Callable[[T], bool], what: str, *, within_s: float = 20.0) -> T:
    """Look until it is good; fails with what was seen last."""
    deadline = time.monotonic() + within_s
    while True:
        seen = look()
        if good(seen):
            return seen
        if time.monotonic() > deadline:
            pytest.fail(f"no {what} within {within_s:.1f} s; last seen: {seen}")
        time.sleep(0.01)


HELD = ("leases", "tickets", "unsealed", "waiting", "lingering_bytes")


def held(stack: RunningStack) -> dict[str, int]:
    """What the pool holds for somebody: all zero when idle."""
    with PoolClient.connect(stack.pool_address, name="test", map_arena=False) as client:
        stats = client.stat()
    return {name: stats[name] for name in HELD}


def assert_nothing_held(stack: RunningStack, *, within_s: float = 20.0) -> None:
    """No lease, ticket or unsealed object is left in the pool."""
    eventually(lambda: held(stack), lambda seen: not any(seen.values()), "idle pool", within_s=within_s)


def engines_idle(urls: Iterable[str]) -> bool:
    """Whether no engine has a request."""
    return all(Counters(url).idle for url in urls)


CONNECTIONS = 12
"""At the pool when a 1P1D stack is whole: router and we; of P and D scheduler, saver, two loaders, synchronous one."""
EARLY = 4
"""More of them, once D has loaded early: `max_early_loads`."""


def assert_everybody_at_the_pool(stack: RunningStack) -> None:
    """The engines and the router have found the pool (again)."""
    whole = (2, CONNECTIONS), (2, CONNECTIONS + EARLY)
    eventually(lambda: _at_the_pool(stack), lambda seen: seen in whole, "engines at the pool", within_s=30)
    eventually(
        lambda: Counters(stack.base_url).total("kvrelay_router_pool_up"), bool, "router at the pool", within_s=30
    )


def _at_the_pool(stack: RunningStack) -> tuple[int, int]:
    """Engines that are registered, and connections."""
    try:
        with PoolClient.connect(stack.pool_address, name="test", map_arena=False) as client:
            return len(client.engines()), client.stat()["connections"]
    except KvRelayError:
        return 0, 0
