"""Where a request goes, on the shell's side: what the cores want to know of it, and what is learnt from how it went."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct

from kvrelay.router.core.conditional import Conditional, FixedThreshold, LearntThreshold, Verdict
from kvrelay.router.core.decode_cache import DecodeCache
from kvrelay.router.core.fleet import Role
from kvrelay.router.core.legs import text_of
from kvrelay.router.core.policy.base import RequestView, Want
from kvrelay.router.core.policy.prefixes import chain
from kvrelay.router.core.prompts import Prompt, TokenRates, has_media, read_prompt
from kvrelay.router.core.recovery import HOPELESS, Action
from kvrelay.router.core.routing import RoutingSettings
from kvrelay.types import OnLostKv

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.legs import ClientBody
    from kvrelay.router.core.records import Record
    from kvrelay.router.engines import Engines
    from kvrelay.router.handover import Handover
    from kvrelay.router.http.messages import Request
    from kvrelay.router.kv.pool_index import PoolIndex
    from kvrelay.router.kv.token_ids import TokenFinder
    from kvrelay.router.metrics import RouterMetrics
    from kvrelay.types import Lost, Proof

_RATES = (0.25, 16.0)
"""Bytes per token that are those of text."""
_NULL = Raw(b"null")
_SESSION_FIELDS = ("prompt_cache_key", "user")


class _Usage(Struct):
    prompt_tokens: int = 0


class _Answer(Struct):
    usage: _Usage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class Described(Struct, frozen=True):
    """A request, read once."""

    view: RequestView
    prompt: Prompt


class Routing:
    """One for a router."""

    def __init__(
        self,
        settings: RoutingSettings,
        engines: Engines,
        metrics: RouterMetrics,
        token_finder: TokenFinder | None = None,
        pool_index: PoolIndex | None = None,
    ) -> None:
        """Engines' policies are those of ``engines``. ``token_finder``: for those that want token ids."""
        self.token_finder = token_finder
        self.pool_index = pool_index
        self.colocated_fallback = settings.colocated_fallback
        self._session_header = settings.session_header.lower().encode()
        self._engines = engines
        self._metrics = metrics
        self._rates = TokenRates()
        self.conditional: Conditional | None = None
        """None: every prompt that can be is prefilled on a prefill engine."""
        if settings.is_conditional:
            above = settings.above
            threshold = LearntThreshold(random.Random()) if above is None else FixedThreshold(above)  # noqa: S311
            self.conditional = Conditional(threshold)
            metrics.disaggregate_above.set(threshold.above)
        self.held = DecodeCache()
        """What decode engines have in their caches."""
        engines.pickers[Role.DECODE].on_forgotten = self.held.forget
        wants = {want for picker in engines.pickers.values() for want in picker.policy.wants}
        self.measures = Want.LATENCY in wants
        self._wants_prefix = Want.PREFIX in wants or self.conditional is not None
        self._wants_session = Want.SESSION in wants
        self._learns = settings != RoutingSettings()

    @property
    def spare(self) -> int:
        """How many tokens are not worth a prefill engine."""
        return self.conditional.threshold.above if self.conditional is not None else 0

    # --- before ---

    def describe(self, request: Request, body: ClientBody) -> Described:
        """What is wanted of a request whose body was taken apart."""
        fields, model = body.fields, body.model
        prompt = read_prompt(fields)
        salt = text_of(fields, "cache_salt")
        tokens = prompt.exact if prompt.exact is not None else self._rates.estimate(model, prompt.num_bytes)
        prefix = chain(f"{model}\0{salt}".encode(), prompt.parts) if self._wants_prefix else ()
        session = self._session(request, fields) if self._wants_session else b""
        return Described(RequestView(tokens, session, prefix, prompt.num_bytes, model=model, salt=salt), prompt)

    def judge(self, handover: Handover) -> Verdict | None:
        """Whether a decode engine is to do it alone; None where that is no question."""
        if self.conditional is None or handover.recovery.policy is OnLostKv.STRICT:
            return None
        view, prompt, tokens = handover.described.view, handover.described.prompt, handover.described.view.num_tokens
        engines = self._engines.views(Role.DECODE, handover.strangers[Role.DECODE])
        well = [engine for engine in engines if not engine.resting and not engine.draining]
        told = self._engines.pickers[Role.DECODE].policy.cached(view)
        decode, cached = self.held.best(view, well, self.spare, told)
        if (in_pool := handover.in_pool) > cached and tokens - cached > self.spare:  # not enough where it costs nothing
            told = {engine.name: max(told.get(engine.name, 0), in_pool) for engine in well}
            decode, cached = self.held.best(view, well, self.spare, told)
        verdict = self.conditional.judge(tokens, sized=prompt.sized, cached=cached, decode=decode)
        if verdict.alone and has_media(prompt):
            verdict = self.conditional.judge(tokens, sized=False)
        self._metrics.decisions.labels("alone" if verdict.alone else "disaggregated", verdict.why).inc()
        return verdict

    def _session(self, request: Request, fields: Mapping[str, Raw]) -> bytes:
        said = request.header(self._session_header)
        if said:
            return said
        return next((bytes(fields[name]) for name in _SESSION_FIELDS if fields.get(name, _NULL) != _NULL), b"")

    # --- after ---

    def prefilled(self, described: Described, engine: Engine, answer: bytes, seconds: float) -> None:
        """A prefill engine has answered."""
        if not self._learns:
            return
        engine.load.add_ttft(seconds, self._engines.now)
        try:
            usage = _decode_answer(answer).usage
        except msgspec.MsgspecError:
            return
        if usage is not None:
            self._learn_rate(_Text.of(described), usage.prompt_tokens)

    def answering(self, handover: Handover, engine: Engine, *, streamed: bool) -> None:
        """An engine's answer to a decode leg begins: it has computed the prompt, and took its time."""
        record = handover.record
        if handover.recovery.asks_first:
            self._decided(handover, engine, "full_hit")
        if self.conditional is not None:
            self._note_held(handover, engine)
        if not streamed or not self._learns:
            return
        stamps = record.life.timestamps
        engine.load.add_ttft(stamps["migration_end"] - stamps["migration_begin"], self._engines.now)
        verdict = record.verdict
        if self.conditional is not None and verdict is not None and verdict.why != "unsized" and _went_straight(record):
            threshold = self.conditional.threshold
            rest = max(1, verdict.tokens - verdict.cached)
            threshold.measured(rest, _ttft_s(handover), self._engines.now, alone=not record.prefill)
            self._metrics.disaggregate_above.set(threshold.above)

    def asked(self, handover: Handover, engine: Engine, lost: Lost, action: Action) -> bool:
        """A decode engine that was asked first lacks some of the KV. Whether it could have been otherwise."""
        if action is Action.PREFILL:
            self._metrics.decisions.labels("disaggregated", "miss").inc()
        elif action is Action.RECOMPUTE and lost.lost not in HOPELESS:
            self._decided(handover, engine, "nearly_full_hit")
        else:
            return False
        return True

    def _decided(self, handover: Handover, engine: Engine, why: str) -> None:
        self._metrics.decisions.labels("alone", why).inc()
        handover.detour(why, engine)

    def _note_held(self, handover: Handover, engine: Engine) -> None:
        described, record = handover.described, handover.record
        thought = self.held.answered(described.view, engine.name)
        if handover.body.num_engine_requests == 1:
            lesson = _Lesson(self, _Text.of(described), engine.name, thought)
            if record.proofs:
                lesson(record.proofs[0])
            else:
                record.on_proof = lesson

    def streamed(self, record: Record, engine: Engine, num_events: int) -> None:
        """A stream of so many events has ended."""
        stamps = record.life.timestamps
        if num_events > 1:
            engine.load.add_itl((stamps["decode_end"] - stamps["decode_begin"]) / (num_events - 1), self._engines.now)

    def proven(self, text: _Text, engine: str, thought: int, proof: Proof) -> None:
        """An engine that was thought to have so many of a prompt's tokens says what it had."""
        self._learn_rate(text, proof.prompt_tokens)
        self.held.proven(engine, thought=thought, had=proof.local_tokens, now=self._engines.now)

    def _learn_rate(self, text: _Text, num_tokens: int) -> None:
        least, most = _RATES
        if text.num_bytes and num_tokens > 0 and least <= text.num_bytes / num_tokens <= most:
            self._rates.learn(text.model, text.num_bytes, num_tokens)


def _ttft_s(handover: Handover) -> float:
    """From the request to the client's first byte, when a decode engine's first is there: P's may have come before."""
    stamps, answered = handover.record.life.timestamps, handover.request.seen.answered
    before_s = time.perf_counter() - answered if answered else 0.0
    return max(0.0, stamps["decode_begin"] - stamps["issued"] - before_s)


def _went_straight(record: Record) -> bool:
    """Whether the time to the first byte is that of the way chosen, and of nothing that went wrong on it."""
    verdict = record.verdict
    assert verdict is not None
    return all(detour.reason == verdict.why for detour in record.detours) and bool(record.prefill) != verdict.alone


class _Text(Struct, frozen=True):
    """What is needed to learn from a prompt, without the prompt. No bytes: nothing can be learnt."""

    model: str
    num_bytes: int

    @classmethod
    def of(cls, described: Described) -> _Text:
        prompt = described.prompt
        return cls(described.view.model, prompt.num_bytes if prompt.exact is None and prompt.sized else 0)


class _Lesson(Struct, frozen=True):
    """What is learnt when the proof of a request comes."""

    routing: Routing
    text: _Text
    engine: str
    thought: int

    def __call__(self, proof: Proof) -> None:
        self.routing.proven(self.text, self.engine, self.thought, proof)
