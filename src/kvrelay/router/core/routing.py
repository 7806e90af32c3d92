"""Settings of where requests go: policies, and which prompts are worth a prefill engine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import BadRequestError
from kvrelay.router.core.conditional import AUTO
from kvrelay.router.core.fleet import Role
from kvrelay.router.core.policy.registry import DEFAULT, make_policy

if TYPE_CHECKING:
    from kvrelay.router.core.policy.base import Policy

MAX_ABOVE = 1 << 24
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class RoutingSettings(Struct, frozen=True, kw_only=True):
    """As given: see `kvrelay router serve --help`."""

    policy: str = DEFAULT
    prefill_policy: str | None = None
    """``policy`` if not given."""
    decode_policy: str | None = None
    session_header: str = "x-session-id"
    disaggregate_above: str = "0"
    colocated_fallback: bool = False

    def spec(self, role: Role) -> str:
        """The policy for a role."""
        own = self.prefill_policy if role is Role.PREFILL else self.decode_policy
        return own or self.policy

    @property
    def policies(self) -> set[str]:
        """Their names, without options."""
        return {self.policy_of(role) for role in Role}

    def policy_of(self, role: Role) -> str:
        """A role's, without options."""
        return self.spec(role).partition(":")[0]

    def make_policies(self) -> dict[Role, Policy]:
        """One for each role. Raises `BadRequestError` where `routing_problems` has something to say."""
        return {role: make_policy(self.spec(role), role) for role in Role}

    @property
    def arguments(self) -> list[str]:
        """For `kvrelay router serve`: what is not the default."""
        default = RoutingSettings()
        found: list[str] = []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value != getattr(default, name):
                flag = f"--{name.replace('_', '-')}"
                found += [flag] if value is True else [flag, str(value)]
        return found

    @property
    def above(self) -> int | None:
        """The threshold given by hand; None where it is to be learnt."""
        return None if self.disaggregate_above == AUTO else int(self.disaggregate_above)

    @property
    def is_conditional(self) -> bool:
        """Whether any prompt may go to a decode engine alone."""
        return self.above != 0


def routing_problems(settings: RoutingSettings, *, hands_over: bool) -> list[str]:
    """What is wrong, each with what would be right. ``hands_over``: whether the connector does."""
    problems: list[str] = []
    for flag, spec, role in (
        ("--policy", settings.policy, Role.DECODE),
        ("--prefill-policy", settings.prefill_policy, Role.PREFILL),
        ("--decode-policy", settings.decode_policy, Role.DECODE),
    ):
        if spec is None:
            continue
        try:
            make_policy(spec, role)
        except BadRequestError as error:
            problems.append(f"{flag} {error}")
    if _HEADER.fullmatch(settings.session_header) is None:
        problems.append(f"--session-header {settings.session_header!r} is not a header's name")
    given = settings.disaggregate_above
    is_count = given.isascii() and given.isdigit() and len(given) < 20 and int(given) <= MAX_ABOVE
    if given != AUTO and not is_count:
        problems.append(
            f"--disaggregate-above {given!r} is not a number of tokens: give 0 (always) to {MAX_ABOVE}, or {AUTO}"
        )
    elif given != "0" and not hands_over:
        problems.append("--disaggregate-above has no effect with a connector that does not hand KV over: leave it out")
    if settings.colocated_fallback and not hands_over:
        problems.append(
            "--colocated-fallback has no effect with a connector that does not hand KV over, since there are no prefill"
            " engines: leave it out"
        )
    return problems
