"""The proof of a hand-over on its way into the client's answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvrelay.router.core.request_options import PROOF
from kvrelay.router.relay import is_events
from kvrelay.router.tickets import PROOF_TIMEOUT_S

if TYPE_CHECKING:
    from kvrelay.router.handover import Handover
    from kvrelay.router.http.call import Call
    from kvrelay.router.http.messages import Headers


async def proof_header(handover: Handover, call: Call) -> Headers:
    """The proof for an answer that is no stream. Where an answer must be proven, waits for its proofs."""
    router = handover.router
    proves = handover.recovery.proves
    shown = handover.options.proof and not is_events(call.headers)
    ticket, tickets = handover.ticket, router.tickets
    if ticket is not None and tickets is not None and (shown or proves):
        tickets.settle(ticket)
        deadline = router.now() + router.timeouts.decode_s
        waiting = True
        while waiting and not ticket.proven.done():
            await asyncio.wait({ticket.proven}, timeout=PROOF_TIMEOUT_S)
            call.check()
            # Of several engine requests some may be scheduled only when others have ended.
            late = ticket.answer_ended or router.now() >= deadline
            waiting = proves and not late
            ticket.answer_ended = call.ended
    return [(PROOF, _told(handover))] if shown else []


async def proof_comment(handover: Handover) -> bytes:
    """The proof after a stream's last event, as a comment."""
    ticket = handover.ticket
    if ticket is not None and not ticket.proven.done():
        ticket.answer_ended = True
        await asyncio.wait({ticket.proven}, timeout=PROOF_TIMEOUT_S)
    return b": kvrelay %b\n\n" % _told(handover)


def _told(handover: Handover) -> bytes:
    return handover.record.told(handover.body.num_engine_requests)
