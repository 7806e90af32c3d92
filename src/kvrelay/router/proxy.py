"""The disaggregated endpoints: what their requests share, and where each one begins.

The decode engine is the authority on what a request is worth: whatever the prefill leg comes to, the decode engine is
asked next, and answers as a single vLLM would. What goes another way than P then D is a *detour*, counted by reason and
kept in the hand-over's record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import BadRequestError
from kvrelay.router.core.answers import refusal
from kvrelay.router.core.legs import ClientBody, Endpoint, parse_fields
from kvrelay.router.core.lifecycle import Lifecycle
from kvrelay.router.core.records import Record
from kvrelay.router.core.request_options import read_options
from kvrelay.router.engine_defaults import EngineDefaults
from kvrelay.router.handover import Handover
from kvrelay.types import Dispatch, FirstToken, OnLostKv, Tokenising

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.profiles.base import Profile
    from kvrelay.router.core.records import RecordBook
    from kvrelay.router.engines import Engines
    from kvrelay.router.http.messages import Request
    from kvrelay.router.http.reply import Reply
    from kvrelay.router.metrics import RouterMetrics
    from kvrelay.router.models import Catalogue
    from kvrelay.router.routing import Routing
    from kvrelay.router.tickets import TicketManager


class Timeouts(Struct, frozen=True):
    """How long a request waits for what. In seconds."""

    prefill_s: float
    """One prefill leg."""
    handover_s: float
    """From the beginning to the decode leg's first byte: so long KV is kept."""
    decode_s: float
    """The longest silence of a decode engine."""
    first_byte_s: float
    """From sending a decode leg to the first byte of a stream."""


class LostKv(Struct, frozen=True):
    """What becomes of requests whose decode side cannot have the KV, unless they say themselves."""

    policy: OnLostKv = OnLostKv.RECOMPUTE
    max_reprefills: int = 1
    """How often one request's prompt may be prefilled again."""


class Disaggregator:
    """Handles the disaggregated endpoints."""

    def __init__(
        self,
        engines: Engines,
        catalogue: Catalogue,
        profile: Profile,
        tickets: TicketManager | None,
        book: RecordBook,
        metrics: RouterMetrics,
        timeouts: Timeouts,
        lost_kv: LostKv,
        routing: Routing,
        now: Callable[[], float],
        *,
        dispatch: Dispatch = Dispatch.SEQUENTIAL,
        first_token: FirstToken = FirstToken.DECODE,
        tokenise: Tokenising = Tokenising.TWICE,
    ) -> None:
        """``now``: Unix time, for the records."""
        self.dispatch = dispatch
        self.first_token = first_token
        self.tokenise = tokenise
        self.defaults = EngineDefaults(engines)
        self.lost_kv = lost_kv
        self.routing = routing
        self.engines = engines
        self.catalogue = catalogue
        self.profile = profile
        self.tickets = tickets
        self.book = book
        self.metrics = metrics
        self.timeouts = timeouts
        self.now = now

    @property
    def _told(self) -> bool:
        return self.tickets is not None and self.profile.tells_of_losses

    async def handle(self, request: Request, reply: Reply, handover: str) -> str:
        """Answer. The outcome, for the metrics."""
        try:
            body = ClientBody(Endpoint(request.path), parse_fields(request.body))
            options = read_options(request.header, self.lost_kv.policy, told=self._told, first_token=self.first_token)
        except BadRequestError as error:
            reply.refuse(refusal(error))
            return "client_error"
        record = Record(Lifecycle(handover, self.now()), policy=options.policy)
        self.book.add(record)
        seen = request.seen
        seen.record, seen.model, seen.num_choices = record, body.model, body.num_engine_requests
        return await Handover(self, request, reply, body, record, options).run()
