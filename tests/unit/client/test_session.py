"""The client's session: requests get ids, replies find them, whatever a pool sends."""

from __future__ import annotations

from functools import partial

import pytest

from kvrelay.client.core.session import Ask, Call, Session, undoing
from kvrelay.errors import BadRequestError, ConflictError, KvRelayError, PoolUnavailableError, ProtocolError
from kvrelay.transport.checksum import checksum
from kvrelay.transport.payload import incoming
from kvrelay.wire import messages as m


def test_answers_find_their_calls_in_any_order() -> None:
    session = Session()
    first, first_request = session.start(Ask(m.Exists(0, [b"k"]), m.Existing))
    second, second_request = session.start(Ask(m.Stat(0), m.Stats))
    assert first_request.id != second_request.id
    assert (first.number, second.number) == (first_request.id, second_request.id)
    session.on_message(m.Stats(second_request.id, {"objects": 1}), 0)
    assert (first.finished, second.finished) == (False, True)
    session.on_message(m.Existing(first_request.id, [True]), 0)
    assert first.outcome() == m.Existing(first_request.id, [True])
    assert session.outstanding == 0


def test_objects_that_come_are_checksummed_on_the_way_where_that_can_be_done() -> None:
    session = Session(partial(incoming, sums=True))
    into = [memoryview(bytearray(3)), memoryview(bytearray(4)), memoryview(bytearray(5))]
    call, request = session.start(Ask(m.Get(0, [b"a", b"b", b"c"], bytes(24)), m.Got, targets=into))
    got = m.Got(request.id, 2, bytes(16), 0)
    landing = session.on_message(got, 7)
    assert landing is call.landing
    assert call.landing is not None
    assert call.landing.left == 7, "the third is not there"
    call.landing.fill(b"onetwos")
    session.on_payload(got)
    assert call.finished
    assert memoryview(call.landing.sums).cast("Q").tolist() == [checksum(b"one"), checksum(b"twos")]


def test_whoever_started_a_call_is_told_once() -> None:
    told: list[Call] = []
    session = Session()
    call, request = session.start(Ask(m.Stat(0), m.Stats), told.append)
    session.on_message(m.Stats(request.id, {}), 0)
    session.close(PoolUnavailableError("gone"))
    assert told == [call]


def test_a_refusal_is_raised_as_its_class() -> None:
    session = Session()
    call, request = session.start(Ask(m.OpenTicket(0, "t", 1.0)))
    session.on_message(m.Failed(request.id, "conflict", "open already"), 0)
    with pytest.raises(ConflictError, match="open already"):
        call.outcome()


def test_a_refusal_of_a_newer_pool_is_still_an_error_of_ours() -> None:
    session = Session()
    call, request = session.start(Ask(m.Stat(0), m.Stats))
    session.on_message(m.Failed(request.id, "from the future", "why"), 0)
    with pytest.raises(KvRelayError, match="why"):
        call.outcome()


def test_the_end_of_the_connection_ends_every_call_and_refuses_new_ones() -> None:
    session = Session()
    calls = [session.start(Ask(m.Stat(0), m.Stats))[0] for _ in range(3)]
    session.close(PoolUnavailableError("it died"))
    for call in calls:
        with pytest.raises(PoolUnavailableError, match="it died"):
            call.outcome()
    with pytest.raises(PoolUnavailableError, match="it died"):
        session.start(Ask(m.Stat(0), m.Stats))


def test_a_call_that_was_never_sent_is_forgotten() -> None:
    session = Session()
    _, request = session.start(Ask(m.Stat(0), m.Stats))
    error = BadRequestError("too large")
    assert session.forget(request.id, error) is error
    assert session.outstanding == 0


def test_the_answer_to_something_else_is_a_protocol_error_and_its_call_fails_with_it() -> None:
    session = Session()
    call, request = session.start(Ask(m.Stat(0), m.Stats))
    with pytest.raises(ProtocolError, match="not outstanding"):
        session.on_message(m.Done(request.id + 1), 0)
    with pytest.raises(ProtocolError, match="Stat with Done") as caught:
        session.on_message(m.Done(request.id), 0)
    session.close(caught.value)
    with pytest.raises(ProtocolError, match="Stat with Done"):
        call.outcome()


def test_bytes_go_where_they_were_asked_to_and_complete_the_call() -> None:
    session = Session()
    targets = [memoryview(bytearray(4))]
    call, request = session.start(Ask(m.Read(0, 1, [m.Range(0, 0, 1)]), m.Data, targets=targets))
    data = m.Data(request.id, b"")
    assert session.on_message(data, 4) is targets
    assert not call.finished
    session.on_payload(data)
    assert call.outcome() is data


def test_objects_that_are_not_there_have_no_bytes() -> None:
    session = Session()
    targets = [memoryview(bytearray(4)) for _ in range(3)]
    _, request = session.start(Ask(m.Get(0, [b"a", b"b", b"c"], bytes(24)), m.Got, targets=targets))
    assert session.on_message(m.Got(request.id, 2, bytes(16), 0), 8) == targets[:2]


def test_bytes_nobody_asked_for_are_a_protocol_error() -> None:
    session = Session()
    _, request = session.start(Ask(m.Stat(0), m.Stats))
    for message in (m.Data(77, b""), m.Stats(request.id, {})):
        with pytest.raises(ProtocolError, match="that were not asked for"):
            session.on_message(message, 100)


@pytest.mark.parametrize(
    ("reply", "request_"),
    [
        (m.Matched(1, 9, 0, []), m.Release(0, 9)),
        (m.Matched(1, 0, 0, []), None),
        (m.Announced(1, [m.Grant("granted", 5, 0), m.Grant("full")], ticket_live=True), m.Abort(0, [5])),
        (m.Announced(1, [m.Grant("sealed")], ticket_live=True), None),
        (m.Located(1, 9, 1, b"", b"", b""), m.Release(0, 9)),
        (m.Located(1, 0, 0, b"", b"", b""), None),
        (m.RoomGiven(1, 9, b"", b""), m.Abort(0, [9])),
        (m.RoomGiven(1, 0, b"", b""), None),
        (m.Done(1), None),
        (None, None),
    ],
)
def test_what_an_unwanted_reply_brought_can_be_given_back(reply: m.Reply | None, request_: m.Request | None) -> None:
    assert undoing(reply) == request_
