"""Hand-over tickets and proofs, as the router has them: P's objects go under a ticket, and D says what it took.

A ticket is opened before the prefill leg and ended once D's proof has been read, which is after what is timed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.client.blocking import PoolClient
from kvrelay.errors import KvRelayError, NotFoundError
from kvrelay.profiles.base import DecodeLeg
from kvrelay.router.core.legs import ClientBody, Endpoint
from kvrelay.types import OnLostKv, Proof, read_note

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrelay.profiles.base import Profile

WITHIN_S = 60.0
"""What a hand-over may take, from the opening of its ticket to its proof."""
PREFILL, DECODE = "P0", "D0"
"""What `kvrelay up` calls the engines."""


class Handover:
    """One hand-over: what its legs are given, and what D said of it."""

    def __init__(self, name: str, profile: Profile, pool: PoolClient | None) -> None:
        """``pool``: where its ticket is open; None for a connector that has no tickets."""
        self.name = name
        self._profile = profile
        self._pool = pool

    def prefill_params(self) -> dict[str, Any] | None:
        """``kv_transfer_params`` of the prefill leg, as the router sends them."""
        return _object(self._profile.prefill_params(self.name, PREFILL, ClientBody(Endpoint.COMPLETIONS, {})))

    def decode_params(self, answer: bytes = b"", *, overlapped: bool = False) -> dict[str, Any] | None:
        """Those of the decode leg; ``answer``: the prefill leg's, unless that is under way (``overlapped``)."""
        leg = DecodeLeg(
            handover=self.name, worker=DECODE, prefill=PREFILL, policy=OnLostKv.RECOMPUTE, overlapped=overlapped
        )
        return _object(self._profile.decode_params(leg, self._profile.carry(answer)))

    def seal(self) -> None:
        """Nothing more will be announced under its ticket."""
        if self._pool is not None:
            self._pool.seal_ticket(self.name)

    def prove(self, tokens: int) -> None:
        """Raise `KvRelayError` unless D's proof, where there is one, says that it took ``tokens`` of this hand-over."""
        if self._pool is None:
            return
        notes = self._pool.collect(self.name, WITHIN_S)
        if not notes:
            raise KvRelayError(f"D has not told within {WITHIN_S:g} s what became of the hand-over")
        check_proof(notes, tokens)


def _object(raw: bytes | None) -> dict[str, Any] | None:
    return json.loads(raw) if raw else None


def check_proof(notes: Sequence[bytes], tokens: int) -> None:
    """Raise `KvRelayError` unless what D left is one proof of ``tokens`` handed over.

    What was in the pool before, or is in D's own cache, was not handed over.
    """
    try:
        told = [read_note(note) for note in notes]
    except msgspec.MsgspecError as error:
        raise KvRelayError(f"D left what is no proof: {error}") from error
    taken = [note.handed_over_tokens for note in told if isinstance(note, Proof)]
    if len(told) != 1 or taken != [tokens]:
        raise KvRelayError(f"D did not take {tokens} prompt tokens of the hand-over: {told}")


class Desk:
    """Begins hand-overs, as a router does. Not thread-safe but for `Handover.seal`."""

    def __init__(self, profile: Profile, pool: str) -> None:
        """``pool``: the address of ours; empty if the connector has no tickets."""
        self._profile = profile
        self._pool = PoolClient.connect(pool, name="desk", map_arena=False) if pool else None
        self._numbers = itertools.count()

    def close(self) -> None:
        """Disconnect: what is open ends."""
        if self._pool is not None:
            self._pool.close()

    @contextmanager
    def handover(self) -> Iterator[Handover]:
        """One more, over when this context ends."""
        name = f"bench-{next(self._numbers)}"
        if self._pool is not None:
            self._pool.open_ticket(name, WITHIN_S)
        try:
            yield Handover(name, self._profile, self._pool)
        finally:
            if self._pool is not None:
                with contextlib.suppress(NotFoundError):  # its deadline has passed
                    self._pool.end_ticket(name)
