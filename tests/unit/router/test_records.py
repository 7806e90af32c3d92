"""What is remembered of hand-overs."""

from __future__ import annotations

import json

import msgspec

from kvrelay.router.core.answers import Dialect, Refusal
from kvrelay.router.core.lifecycle import Event, Lifecycle
from kvrelay.router.core.records import MAX_PROOFS, Detour, Record, RecordBook
from kvrelay.types import Proof


def test_the_oldest_give_way() -> None:
    book = RecordBook(capacity=2)
    for name in ("a", "b", "c"):
        book.add(Record(Lifecycle(name, 0.0)))
    assert book.find("a") is None
    assert book.find("b") is not None
    assert book.find("c") is not None


def test_a_record_shows_who_did_what_when() -> None:
    record = Record(Lifecycle("ho-1", 1.5), decode="D0", detours=[Detour("prefill_timeout", "P0")])
    record.life.handle(Event.DECODE_SENT, 2.5)
    view = json.loads(msgspec.json.encode(record.view()))
    assert view["handover"] == "ho-1"
    assert view["prefill"] is None
    assert view["decode"] == "D0"
    assert view["state"] == "migrating"
    assert view["detours"] == [{"reason": "prefill_timeout", "worker": "P0"}]
    assert view["timestamps"]["issued"] == 1.5
    assert view["timestamps"]["migration_begin"] == 2.5
    assert view["timestamps"]["decode_end"] is None


def test_of_a_large_batch_the_first_proofs_are_kept_and_all_are_counted() -> None:
    record = Record(Lifecycle("ho-1", 0.0))
    proof = Proof(
        handover="ho-1", request_id="r", worker="D0", engine="e", prompt_tokens=1, handed_over_tokens=0,
        local_tokens=0, recomputed_tokens=1, bytes=0, wait_ms=0.0, transfer_ms=0.0, reason="",
    )  # fmt: skip
    for _ in range(MAX_PROOFS + 10):
        record.prove(proof)
    assert (len(record.view()["proofs"]), record.view()["num_proofs"]) == (MAX_PROOFS, MAX_PROOFS + 10)


def test_a_refusal_has_the_form_openai_clients_know() -> None:
    error = json.loads(Refusal(503, "unreachable", "no engine").body)["error"]
    assert error == {"message": "no engine", "type": "server_error", "param": None, "code": "unreachable"}
    assert Refusal(404, "x", "y").event_for(Dialect.OPENAI).startswith(b'data: {"error":')
