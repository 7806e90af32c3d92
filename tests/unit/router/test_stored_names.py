"""A stored response's name tells who holds it."""

from __future__ import annotations

import uuid

from kvrelay.router.core.fleet import Engine, Role, make_engines, parse_address
from kvrelay.router.core.health import HealthSettings
from kvrelay.router.core.stored_responses import holder_of, mark_of, name_response, unknown_whereabouts


def fleet(*ports: int) -> tuple[Engine, ...]:
    addresses = [parse_address(f"http://10.0.0.1:{port}") for port in ports]
    return make_engines(Role.DECODE, addresses, HealthSettings())


def test_a_name_leads_back_to_its_engine_after_a_restart_and_in_another_order() -> None:
    before = fleet(*range(8000, 8032))
    names = [name_response(f"ho-{uuid.UUID(int=n).hex}", engine) for n, engine in enumerate(before)]
    after = fleet(*reversed(range(8000, 8032)))
    holders = [holder_of(name, after) for name in names]
    assert [holder and holder.address for holder in holders] == [engine.address for engine in before]
    assert len(set(names)) == 32


def test_names_of_others_tell_nothing() -> None:
    engines = fleet(8000, 8001)
    (gone,) = fleet(8002)
    for name in ("resp_1234567890abcdef", "mine", "", f"x{name_response('0' * 32, engines[0])}"):
        assert holder_of(name, engines) is None
    assert holder_of(name_response("0" * 32, gone), engines) is None
    assert mark_of(gone) not in {mark_of(engine) for engine in engines}


def test_the_refusal_names_who_may_hold_it() -> None:
    refused = unknown_whereabouts("resp_1", fleet(8000, 8001))
    assert refused.status == 503
    assert "D0, D1" in refused.message
