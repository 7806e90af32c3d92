"""Token ids of requests before they are routed: from the request, from memory, from a local tokenizer, from an engine.

Whatever goes wrong costs a choice by text, and a bounded moment: an engine has so long to answer, so many questions are
open at once, and when engines fail or are slow to answer nobody is asked for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.circuit import Circuit
from kvrelay.errors import ConfigError, KvRelayError
from kvrelay.router.core.kv.prompts import (
    MAX_TOKEN_IDS,
    Remembered,
    answered_ids,
    given_ids,
    packed_ids,
    question,
    text_of_completion,
)
from kvrelay.router.core.kv.settings import TokenIds
from kvrelay.router.core.policy.base import Want
from kvrelay.router.models import key_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Collection, Iterable

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.kv.settings import KvSettings
    from kvrelay.router.core.legs import ClientBody
    from kvrelay.router.core.policy.base import Policy
    from kvrelay.router.core.prompts import Prompt
    from kvrelay.router.engines import Engines
    from kvrelay.router.http.messages import Request
    from kvrelay.router.kv.metrics import KvMetrics

logger = logging.getLogger(__name__)

MAX_OPEN = 32
"""Questions at a time; further requests go by text."""
REMEMBERED_TOKENS = 4 << 20
TOKENIZER_THREADS = 2
"""A text that takes too long keeps one until it is done: others' are given up in time, begun or not."""
MAX_ANSWER_BYTES = 16 << 20
MAX_TEXT = 4 * MAX_TOKEN_IDS
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


def load_tokenizer(path: str) -> Any:
    """A `tokenizers.Tokenizer` from a model's directory or a ``tokenizer.json``.

    Raises:
        ConfigError: the package is not installed, or there is no tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"--tokenizer: the package tokenizers is not there ({error}): install kvrelay[tokenizer]"
        ) from None
    file = Path(path)
    if file.is_dir():
        file /= "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"--tokenizer {path}: there is no {file}: name a model's directory or its tokenizer.json")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the package raises bare exceptions
        raise ConfigError(f"--tokenizer {path}: {error}") from None


class TokenFinder:
    """Finds them."""

    def __init__(self, settings: KvSettings, engines: Engines, metrics: KvMetrics) -> None:
        """To be started before it is asked."""
        self._engines = engines
        self._metrics = metrics
        self._asks = settings.token_ids == TokenIds.ENGINE
        self._timeout_s = settings.tokenize_timeout_s
        self._path = settings.tokenizer
        self._tokenizer: Any = None
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._remembered = Remembered(REMEMBERED_TOKENS)
        self._circuit = Circuit(first_pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S)
        self._open = 0
        self._turn = 0

    async def start(self) -> None:
        """Load the tokenizer, where one is given.

        Raises:
            ConfigError: it cannot be had.
        """
        if self._path is not None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self._path)

    def close(self) -> None:
        """Tokenise nothing more here."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def find(
        self, body: ClientBody, prompt: Prompt, request: Request, strangers: Collection[Engine]
    ) -> tuple[array[int] | None, str]:
        """A request's token ids, and where they come from; None, and why not.

        ``strangers``: engines that do not know the request's model.
        """
        began = time.perf_counter()
        ids, source = await self._find(body, prompt, request, strangers)
        self._metrics.token_ids.labels(source).inc()
        self._metrics.tokenize_seconds.labels(source).observe(time.perf_counter() - began)
        return ids, source

    async def _find(
        self, body: ClientBody, prompt: Prompt, request: Request, strangers: Collection[Engine]
    ) -> tuple[array[int] | None, str]:
        if (given := given_ids(prompt)) is not None:
            return given, "request"
        if prompt.num_bytes > MAX_TEXT or (asked := question(body.endpoint, body.fields, prompt)) is None:
            return None, "unsupported"
        if (known := self._remembered.find(asked)) is not None:
            return known, "memory"
        ids, source = await self._locally(body)
        if source == "off" and self._asks:
            ids, source = await self._ask(asked, request, strangers)
        if ids is not None:
            self._remembered.add(asked, ids)
        return ids, source

    async def _locally(self, body: ClientBody) -> tuple[array[int] | None, str]:
        text = text_of_completion(body.endpoint, body.fields) if self._tokenizer is not None else None
        if text is None or self._tokenizer is None:
            return None, "off"
        encode = partial(self._tokenizer.encode, text[0], add_special_tokens=text[1])
        try:
            async with asyncio.timeout(self._timeout_s):
                encoded = await asyncio.get_running_loop().run_in_executor(self._threads, encode)
            ids = packed_ids(encoded.ids)
        except Exception as error:  # noqa: BLE001 - the package raises bare exceptions
            logger.debug("--tokenizer: %r", error)
            return None, "failed"
        return ids, "tokenizer" if ids is not None else "unsupported"

    async def _ask(
        self, asked: bytes, request: Request, strangers: Collection[Engine]
    ) -> tuple[array[int] | None, str]:
        engine = self._next(strangers)
        if engine is None:
            return None, "no_engine"
        if self._open >= MAX_OPEN:
            return None, "busy"
        if not self._circuit.allow(self._engines.now):
            return None, "circuit_open"
        self._open += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                status, answer = await self._engines.exchange(
                    engine,
                    "/tokenize",
                    key_of(request),
                    body=asked,
                    limit_bytes=MAX_ANSWER_BYTES,
                    timeout_s=self._timeout_s,
                )
            ids = answered_ids(answer) if status == 200 else None
        except (KvRelayError, TimeoutError) as error:
            logger.debug("%s: /tokenize: %s", engine.name, error)
            self._circuit.failed(self._engines.now)
            return None, "failed"
        except BaseException:
            self._circuit.forgotten()
            raise
        finally:
            self._open -= 1
        if status >= 500:
            self._circuit.failed(self._engines.now)
            return None, "failed"
        self._circuit.succeeded()
        return ids, "engine" if ids is not None else "refused"

    def _next(self, strangers: Collection[Engine]) -> Engine | None:
        """In turn, prefill engines as well as decode engines; none that is ill, leaves or does not know the model."""
        now = self._engines.now
        able = [
            engine for engine in self._engines.all
            if engine not in strangers and not engine.draining and not engine.health.is_resting(now)
        ]  # fmt: skip
        if not able:
            return None
        self._turn += 1
        return able[self._turn % len(able)]


def make_finder(
    settings: KvSettings, policies: Iterable[Policy], engines: Engines, metrics: KvMetrics
) -> TokenFinder | None:
    """A finder, where a policy wants token ids."""
    if not any(Want.TOKENS in policy.wants for policy in policies):
        return None
    return TokenFinder(settings, engines, metrics)
