"""How the router gets over what fails: its deadlines, probes, retries and its own end. Settings only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.router.core.budget import BudgetSettings
from kvrelay.wire.limits import MAX_LEASE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


class Resilience(Struct, frozen=True, kw_only=True):
    """Times in seconds; 0 switches off what can be switched off."""

    request_timeout_s: float = 0.0
    """For a request as a whole; 0: as long as its parts may take."""
    first_byte_timeout_s: float = 0.0
    """From a decode leg's sending to a stream's first byte; 0: as long as any other silence."""
    probe_interval_s: float = 5.0
    """Between two looks at an engine's health; 0: none."""
    retry_share: float = BudgetSettings().share
    """How many requests in a hundred, as a fraction, may be sent to another engine."""
    drain_notice_s: float = 0.0
    """How long the router serves on when it is stopped, and says in its health that it will not."""

    @property
    def budget(self) -> BudgetSettings:
        """The retry budget; what a router without retries has is empty."""
        return BudgetSettings(self.retry_share) if self.retry_share else BudgetSettings(0.0, 0.0, 0.0)

    def problems(self) -> Iterator[str]:
        """What cannot be, as one line each."""
        for flag, value_s in (
            ("--request-timeout", self.request_timeout_s),
            ("--first-byte-timeout", self.first_byte_timeout_s),
            ("--probe-interval", self.probe_interval_s),
            ("--drain-notice", self.drain_notice_s),
        ):
            if not 0 <= value_s <= MAX_LEASE_S:
                yield f"{flag} {value_s:g} is out of range: give seconds from 0 up to {MAX_LEASE_S:g}"
        if not 0 <= self.retry_share <= 1:
            yield f"--retry-share {self.retry_share:g} is out of range: give a fraction from 0 to 1"
