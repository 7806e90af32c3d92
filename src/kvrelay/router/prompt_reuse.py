"""One request whose prompt is tokenised by the prefill side alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.prompt_reuse import asking_for_ids, decode_leg, may_reuse, read_ids
from kvrelay.router.models import key_of
from kvrelay.types import Tokenising

if TYPE_CHECKING:
    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.prompt_reuse import PromptIds
    from kvrelay.router.handover import Handover


def reuse_prompt(handover: Handover) -> ReusedPrompt | None:
    """What takes the token ids from one leg to the other; None where that is not asked for, or cannot be.

    A stream that begins with P's token does so by itself.
    """
    if handover.router.tokenise is not Tokenising.ONCE or handover.early is not None:
        return None
    return ReusedPrompt(handover) if handover.body.model and may_reuse(handover.body) else None


class ReusedPrompt:
    """The prompt of one request, once the prefill side has told its token ids."""

    __slots__ = ("_handover", "_ids")

    def __init__(self, handover: Handover) -> None:
        """Nothing is known yet."""
        self._handover = handover
        self._ids: PromptIds | None = None

    @staticmethod
    def asked(leg: bytes) -> bytes:
        """What the prefill engine is asked."""
        return asking_for_ids(leg)

    def take(self, answer: bytes) -> None:
        """The prefill engine has answered, with 200."""
        self._ids = read_ids(self._handover.body.endpoint, answer)

    def decode_leg(self, engine: Engine, params: bytes | None) -> bytes | None:
        """What ``engine`` is asked; None if it must make the token ids itself.

        One that would refuse the prompt as too long shall do so in its own words, and before its answer begins.
        """
        handover, ids = self._handover, self._ids
        if ids is None:
            return None
        defaults = handover.router.defaults.known(engine, handover.body.model, key_of(handover.request))
        if defaults is None or ids.count >= defaults.max_model_len:
            return None
        handover.router.metrics.prompts_reused.inc()
        return decode_leg(handover.body, params, ids)
