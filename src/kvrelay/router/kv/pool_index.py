"""How much of a prompt the pool holds, before anybody is asked to prefill it.

A hint, bounded in time: a pool that is away or slow, a model that may be an adapter, a prompt without token ids mean
that nothing is known. What is true is what the decode engine finds when it looks.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from kvrelay.circuit import Circuit
from kvrelay.errors import KvRelayError
from kvrelay.router.core.kv.pool_keys import names_of
from kvrelay.router.models import PATH, key_of

if TYPE_CHECKING:
    from kvrelay.router.core.policy.base import RequestView
    from kvrelay.router.engines import Engines
    from kvrelay.router.http.messages import Request
    from kvrelay.router.kv_compatibility import KvCompatibility
    from kvrelay.router.pool_link import PoolLink

logger = logging.getLogger(__name__)

TIMEOUT_S = 0.05
"""A request waits no longer for the pool's answer."""
MODELS_TIMEOUT_S, MODELS_PAUSE_S = 1.0, 1.0
"""For an engine's list of models; and between two questions for it, at least."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
OLD_S = 60.0
"""What engines said of their models is asked for again when it is so old."""


class _Card(Struct):
    id: str
    parent: str | None = None


class _Cards(Struct):
    data: list[_Card]


_decode_cards = msgspec.json.Decoder(_Cards).decode


class PoolIndex:
    """Asks the pool."""

    def __init__(self, link: PoolLink, compatibility: KvCompatibility, engines: Engines) -> None:
        """``compatibility``: whose engines' keys are asked for."""
        self._link = link
        self._compatibility = compatibility
        self._engines = engines
        self._circuit = Circuit(first_pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S)
        self._bases: frozenset[str] = frozenset()
        self._asked_at = float("-inf")

    async def held(self, view: RequestView, request: Request) -> int:
        """Tokens of a prompt that are whole in the pool, from the first on; 0 where nothing is known."""
        naming, now = self._compatibility.naming, self._engines.now
        if naming is None or not view.tokens or not self._circuit.ready(now):
            return 0
        if not await self._is_base(view.model, request):
            return 0
        names = names_of(naming, view.tokens, view.salt)
        if names is None or not self._circuit.allow(now):
            return 0
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await self._link.count_sealed(names.keys)
        except (KvRelayError, TimeoutError) as error:
            logger.debug("how much the pool holds of a prompt: %r", error)
            self._circuit.failed(self._engines.now)
            return 0
        except BaseException:
            self._circuit.forgotten()
            raise
        self._circuit.succeeded()
        return names.tokens(found)

    async def _is_base(self, model: str, request: Request) -> bool:
        """Whether a model is one of the engines' own, and no adapter."""
        now = self._engines.now
        if model not in self._bases or now - self._asked_at > OLD_S:
            if now - self._asked_at < MODELS_PAUSE_S:
                return model in self._bases
            self._asked_at = now
            well = (one for one in self._engines.decodes if not one.draining and not one.health.is_resting(now))
            engine = next(well, None)
            if engine is None:
                return False
            try:
                status, body = await self._engines.exchange(engine, PATH, key_of(request), timeout_s=MODELS_TIMEOUT_S)
                cards = _decode_cards(body).data if status == 200 else []
            except (KvRelayError, msgspec.MsgspecError) as error:
                logger.debug("%s: %s: %s", engine.name, PATH, error)
                return False
            self._bases = frozenset(card.id for card in cards if card.parent is None)
        return model in self._bases
