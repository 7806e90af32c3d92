from __future__ import annotations

from kvrelay.circuit import Circuit, State


def failing(circuit: Circuit, times: int, now: float) -> None:
    for _ in range(times):
        assert circuit.allow(now)
        circuit.failed(now)


def test_single_failures_between_successes_change_nothing() -> None:
    circuit = Circuit(failures=3)
    for _ in range(10):
        failing(circuit, 2, now=0.0)
        circuit.succeeded()
    assert circuit.state is State.CLOSED


def test_failures_in_a_row_open_it_until_the_pause_is_over() -> None:
    circuit = Circuit(failures=3, first_pause_s=1)
    failing(circuit, 3, now=10.0)
    assert not circuit.allow(10.9)
    assert not circuit.ready(10.9)
    assert circuit.ready(11.0)


def test_after_a_pause_one_operation_is_tried_and_the_others_wait_for_it() -> None:
    circuit = Circuit(failures=1, first_pause_s=1)
    failing(circuit, 1, now=0.0)
    assert circuit.allow(1.0)
    assert not circuit.allow(1.0)
    circuit.succeeded()
    assert circuit.allow(1.0)
    assert circuit.state is State.CLOSED


def test_each_pause_is_twice_as_long_up_to_the_longest() -> None:
    circuit = Circuit(failures=1, first_pause_s=1, longest_pause_s=4)
    now = 0.0
    failing(circuit, 1, now)
    for pause in (1, 2, 4, 4):
        assert not circuit.ready(now + pause - 0.01)
        now += pause
        failing(circuit, 1, now)
    now += 4
    assert circuit.allow(now)
    circuit.succeeded()
    failing(circuit, 1, now)
    assert circuit.ready(now + 1), "after a success it begins with the first pause"


def test_an_operation_that_began_before_it_opened_does_not_close_it() -> None:
    circuit = Circuit(failures=1)
    assert circuit.allow(0.0)
    failing(circuit, 1, now=0.0)
    circuit.succeeded()
    assert circuit.state is State.OPEN


def test_a_probe_nobody_hears_of_is_followed_by_another() -> None:
    circuit = Circuit(failures=1, first_pause_s=1)
    failing(circuit, 1, now=0.0)
    assert circuit.allow(1.0)
    circuit.forgotten()
    assert circuit.allow(1.0)


def test_what_is_replaced_begins_anew() -> None:
    circuit = Circuit(failures=1, first_pause_s=1)
    failing(circuit, 1, now=0.0)
    circuit.reset()
    failing(circuit, 1, now=0.0)
    assert circuit.ready(1.0)
