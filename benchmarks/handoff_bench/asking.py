"""Requests to one engine: a prompt of token ids, and how long its first token took."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvrelay.errors import DeadlineError, KvRelayError
from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ANSWER_S = 60.0
"""Who takes longer for a request, or for the next part of its answer, has failed: others wait for their turns."""
SUSPENDED_S = 900.0
"""The same for requests that stand still while others have their turns."""
FAILURES = (KvRelayError, OSError, http.client.HTTPException)
"""What keeps one contestant from going on, and nobody else."""
FIRST_ID, LAST_ID = 10, 2_000
"""Token ids of prompts: in the vocabulary of every model that is measured, none of them special."""
DECODED = 256
"""Tokens a background request generates before the next takes its place."""
SETTLE_S = 30.0


class Engine:
    """One vLLM server. Not thread-safe: one request at a time, over a connection made before it is timed.

    A server closes a connection that has been idle for some seconds: none is kept.
    """

    def __init__(self, url: str, model: str, answer_s: float = ANSWER_S) -> None:
        self.url = url
        self._model = model
        where = urlsplit(url)
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=answer_s)

    def stream(
        self, prompt: Sequence[int], params: dict[str, Any] | None = None, *, tokens: int = 1
    ) -> tuple[float, list[int]]:
        """Seconds until the first token of a streamed answer, and the ids of its ``tokens`` tokens."""
        self._connect()
        began = time.perf_counter()
        response = self._post(prompt, params, stream=True, max_tokens=tokens)
        seconds = 0.0
        ids: list[int] = []
        for line in response:
            if line.startswith(b"data: {"):
                seconds = seconds or time.perf_counter() - began
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice.get("token_ids") or []
        return seconds, ids

    def complete(self, prompt: Sequence[int], params: dict[str, Any] | None = None, *, tokens: int = 1) -> bytes:
        """The whole answer, not streamed."""
        self._connect()
        return self._post(prompt, params, stream=False, max_tokens=tokens).read()

    def hang_up(self) -> None:
        """End the request under way, if there is one, from another thread; the engine aborts it."""
        if (sock := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> None:
        self._connection.close()
        self._connection.connect()

    def _post(
        self, prompt: Sequence[int], params: dict[str, Any] | None, *, stream: bool, max_tokens: int
    ) -> http.client.HTTPResponse:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        if response.status != 200:
            raise KvRelayError(f"{self.url} answered {response.status}: {response.read()[:300]!r}")
        return response

    def external_tokens(self) -> float:
        """Prompt tokens this engine has taken from its connector so far."""
        return Counters(self.url).total("vllm:external_prefix_cache_hits_total")

    def saved_tokens(self) -> float:
        """Tokens whose KV it has saved to our pool so far."""
        return Counters(self.url).total("kvrelay:saved_tokens_total")

    def generated_tokens(self) -> float:
        """Tokens it has generated so far."""
        return Counters(self.url).total("vllm:generation_tokens_total")

    @contextmanager
    def decoding(self, requests: int, model: str) -> Iterator[None]:
        """Keep ``requests`` others decoding meanwhile. They stand still while the engine is suspended.

        Raises:
            KvRelayError: one of them has ended.
        """
        stop = threading.Event()
        engines = [Engine(self.url, model, SUSPENDED_S) for _ in range(requests)]
        threads = [
            threading.Thread(target=_keep_decoding, args=(engine, number, stop), daemon=True)
            for number, engine in enumerate(engines)
        ]
        for thread in threads:
            thread.start()
        try:
            self._until_running(requests)
            yield
            if not all(thread.is_alive() for thread in threads):
                raise KvRelayError(f"fewer than {requests} requests were decoded at {self.url}")
        finally:
            stop.set()
            for thread, engine in zip(threads, engines, strict=True):
                _join(thread, engine)

    def _until_running(self, requests: int) -> None:
        deadline = time.monotonic() + SETTLE_S
        while Counters(self.url).running < requests:
            if time.monotonic() > deadline:
                raise DeadlineError(f"no {requests} requests are being decoded at {self.url} after {SETTLE_S:g} s")
            time.sleep(0.02)


def _keep_decoding(engine: Engine, number: int, stop: threading.Event) -> None:
    with contextlib.suppress(*FAILURES):
        while not stop.is_set():
            engine.complete(prompt_of(32, "background", number), tokens=DECODED)


def _join(thread: threading.Thread, engine: Engine) -> None:
    deadline = time.monotonic() + SETTLE_S
    while thread.is_alive() and time.monotonic() < deadline:
        engine.hang_up()
        thread.join(0.1)


def prompt_of(tokens: int, *seed: object) -> list[int]:
    """Arbitrary token ids; another seed or length, another prompt, from its first token on."""
    return random.Random(repr((tokens, *seed))).choices(range(FIRST_ID, LAST_ID), k=tokens)
