"""Asking a stack and a plain vLLM the cases of the differential suite, and what differs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx

from kvrelay.testing.differential.cases import How
from kvrelay.testing.differential.comparing import differences, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.testing.differential.cases import Case
    from kvrelay.testing.differential.comparing import Said
    from kvrelay.testing.stack import RunningStack

ANSWER_S = 120.0
AT_ONCE = 4
SLOW_POOL = "no_ticket"
"""A detour that two busy cores may cause at any time; it changes nothing of an answer."""


def said_by(stack: RunningStack, cases: Sequence[Case]) -> list[Said]:
    """What it answers to each."""
    base_url = stack.base_url
    with httpx.Client(timeout=ANSWER_S) as client, ThreadPoolExecutor(AT_ONCE) as threads:

        def ask(case: Case) -> Said:
            reply = client.request(case.spec.method, f"{base_url}{case.spec.path}", json=case.body)
            return read(reply.status_code, dict(reply.headers), reply.content)

        return list(threads.map(ask, cases))


def faults(stack: RunningStack, reference: RunningStack, cases: Sequence[Case]) -> list[str]:
    """Every case that is answered otherwise than by one vLLM, or goes another way than it should."""
    found: list[str] = []
    for case, ours, theirs in zip(cases, said_by(stack, cases), said_by(reference, cases), strict=True):
        found += [f"{case.name}: {line}" for line in differences(ours, theirs)]
        if (wrong := _wrong_way(stack, case, ours)) is not None:
            found.append(f"{case.name}: {wrong}")
    return found


def _ends_in_an_error(said: Said) -> bool:
    """Whether it is a stream that begins with status 200 and brings nothing but the refusal."""
    return isinstance(said.body, dict) and "events" in said.body and "error" in said.body.get("said", {})


def _wrong_way(stack: RunningStack, case: Case, ours: Said) -> str | None:
    how = case.spec.how
    if ours.status != 200 or how in {How.PASSED, How.OWN} or _ends_in_an_error(ours):
        return None
    prefill, handover = ours.headers.get("x-kvrelay-prefill"), ours.headers["x-kvrelay-handover"]
    record = httpx.get(f"{stack.base_url}/kvrelay/handovers/{handover}", timeout=20).json()
    reasons = [detour["reason"] for detour in record["detours"] if detour["reason"] != SLOW_POOL]
    expected = [case.spec.reason] if how is How.ALONE else []
    if reasons != expected or (prefill is None) is not (how is How.ALONE):
        return f"prefilled by {prefill}, detours {reasons} instead of {expected}"
    return None
