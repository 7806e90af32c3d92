"""Supervision of real processes: whatever they do, the launcher says so and leaves none behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.launch.kernel import descendants

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., Any]
    Ports = Callable[[int], list[int]]


def serve(name: str, role: str, stage: int, port: int, *more: str, grace: float = 5) -> str:
    return f"{name}:{role}:{stage}:{port}:{grace}:serve {port} {' '.join(more)}"


def pd_stack(ports: Ports) -> list[str]:
    pool, prefill, decode, router = ports(4)
    return [
        serve("pool", "pool", 0, pool),
        serve("P0", "prefill", 1, prefill),
        serve("D0", "decode", 1, decode),
        serve("router", "router", 2, router),
    ]


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def grandchildren(file: Path) -> list[int]:
    """The stubborn child and the daemon of a fake that is ready."""
    return [int(word) for word in file.read_text().split()]


def test_stages_start_in_order_and_stop_in_reverse(start_up: Start, ports: Ports) -> None:
    up = start_up(*pd_stack(ports))
    up.wait_ready()
    pids = [up.pid(name) for name in ("pool", "P0", "D0", "router")]
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert not any(map(alive, pids))
    order = [line.split("] ")[1].split(" at ")[0] for line in up.messages if " ready" in line or "stopping" in line]
    assert order[0] == "pool ready"
    assert set(order[1:3]) == {"P0 ready", "D0 ready"}
    assert order[3:] == ["router ready", "stopping router", "stopping P0, D0", "stopping pool"]


def test_ctrl_c_stops_everything_with_status_130(start_up: Start, ports: Ports) -> None:
    up = start_up(*pd_stack(ports))
    up.wait_ready()
    pids = descendants(up.process.pid)
    up.signal(signal.SIGINT)
    assert up.wait() == 130
    assert not any(map(alive, pids))


def test_sigterm_during_the_start_stops_what_runs(start_up: Start, ports: Ports) -> None:
    (port,) = ports(1)
    up = start_up(f"P0:prefill:1:{port}:5:hang")
    up.until(lambda: up.said("P0 starting"), "start of P0")
    pids = descendants(up.process.pid)
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert not any(map(alive, pids))


def test_a_child_dead_at_the_start_is_reported_at_once_with_its_last_lines(start_up: Start, ports: Ports) -> None:
    first, second = ports(2)
    up = start_up(serve("P0", "prefill", 1, first), f"D0:decode:1:{second}:5:die 3", ready_timeout=600)
    assert up.wait() == 1  # long before the deadline
    assert up.said("D0 ended with status 3; last lines of")
    assert up.said("    about to die")
    assert up.said("D0: ValueError: the fake is out of luck")
    assert up.messages[-1] == "error: D0 ended with status 3 before all was ready"


def test_a_child_killed_at_the_start_is_reported_by_its_signal(start_up: Start, ports: Ports) -> None:
    (port,) = ports(1)
    up = start_up(f"P0:prefill:1:{port}:5:hang")
    up.until(lambda: (up.run_dir / "P0.log").exists() and (up.run_dir / "P0.log").read_text(), "output of P0")
    (guard,) = [pid for pid in descendants(up.process.pid) if descendants(pid)]
    os.kill(descendants(guard).pop(), signal.SIGKILL)
    assert up.wait() == 1
    assert up.said("P0 ended with signal 9 (SIGKILL)")


def test_a_child_that_never_gets_ready_ends_the_start_at_the_deadline(start_up: Start, ports: Ports) -> None:
    first, second = ports(2)
    up = start_up(serve("P0", "prefill", 1, first), f"D0:decode:1:{second}:5:hang", ready_timeout=5)
    assert up.wait() == 1
    assert up.said("D0 is not ready; last lines of")
    assert up.said("    still thinking")
    assert "D0 is not ready after" in up.messages[-1]
    assert "--ready-timeout" in up.messages[-1]


def test_an_answer_of_another_stack_on_the_same_port_does_not_make_a_child_ready(
    start_up: Start, ports: Ports, tmp_path: Path
) -> None:
    (port,) = ports(1)
    start_up(serve("router", "router", 2, port)).wait_ready()
    second = start_up(f"router:router:2:{port}:5:hang", ready_timeout=2, run_dir=tmp_path / "second")
    assert second.wait() == 1
    assert not second.ready.is_set()
    assert not second.said("router ready")
    assert "router is not ready after" in second.messages[-1]


def test_a_child_whose_port_is_taken_ends_the_start_with_its_own_error(
    start_up: Start, ports: Ports, tmp_path: Path
) -> None:
    (port,) = ports(1)
    start_up(serve("router", "router", 2, port)).wait_ready()
    second = start_up(serve("router", "router", 2, port), run_dir=tmp_path / "second")
    assert second.wait() == 1
    assert not second.said("router ready")
    assert second.said("OSError: [Errno 98] Address already in use")
    assert second.messages[-1] == "error: router ended with status 1 before all was ready"


def test_a_child_that_shares_its_port_with_another_program_ends_the_start(
    start_up: Start, ports: Ports, tmp_path: Path
) -> None:
    (port,) = ports(1)
    start_up(serve("D0", "decode", 1, port, "--shared")).wait_ready()
    second = start_up(serve("D0", "decode", 1, port, "--shared"), run_dir=tmp_path / "second")
    assert second.wait() == 1
    assert not second.said("D0 ready")
    assert second.messages[-1].startswith(f"error: another program, too, listens on port {port}")


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(start_up: Start, ports: Ports) -> None:
    (port,) = ports(1)
    up = start_up(serve("D0", "decode", 1, port, "--ignore-term", grace=0.5))
    up.wait_ready()
    pid = up.pid("D0")
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert not alive(pid)


def test_a_second_ctrl_c_kills_without_waiting_for_the_grace(start_up: Start, ports: Ports) -> None:
    (port,) = ports(1)
    up = start_up(serve("D0", "decode", 1, port, "--ignore-term", grace=600))
    up.wait_ready()
    pid = up.pid("D0")
    up.signal(signal.SIGINT)
    up.until(lambda: up.said("stopping D0"), "the stop")
    up.signal(signal.SIGINT)
    assert up.wait() == 130
    assert not alive(pid)


def test_grandchildren_that_ignore_sigterm_or_left_the_session_are_ended_too(
    start_up: Start, ports: Ports, tmp_path: Path
) -> None:
    (port,) = ports(1)
    up = start_up(serve("D0", "decode", 1, port, "--children", str(tmp_path / "pids"), grace=1))
    up.wait_ready()
    children = grandchildren(tmp_path / "pids")
    assert all(map(alive, children))
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert not any(map(alive, children))


def test_a_suspended_child_is_continued_to_end_by_itself(start_up: Start, ports: Ports) -> None:
    (port,) = ports(1)
    up = start_up(serve("D0", "decode", 1, port, grace=600))
    up.wait_ready()
    pid = up.pid("D0")
    os.killpg(pid, signal.SIGSTOP)
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert not alive(pid)


def test_killing_the_launcher_of_suspended_processes_leaves_nothing(start_up: Start, ports: Ports) -> None:
    (port,) = ports(1)
    up = start_up(serve("D0", "decode", 1, port, grace=600))
    up.wait_ready()
    pids = descendants(up.process.pid)
    os.killpg(up.pid("D0"), signal.SIGSTOP)
    up.signal(signal.SIGKILL)
    up.until(lambda: not any(map(alive, pids)), "the end of all processes")


def test_killing_the_launcher_leaves_nothing(start_up: Start, ports: Ports, tmp_path: Path) -> None:
    (port,) = ports(1)
    up = start_up(serve("D0", "decode", 1, port, "--children", str(tmp_path / "pids"), grace=1))
    up.wait_ready()
    pids = descendants(up.process.pid)
    assert set(grandchildren(tmp_path / "pids")) < pids
    up.signal(signal.SIGKILL)
    up.until(lambda: not any(map(alive, pids)), "the end of all processes")


def test_killing_a_guard_ends_its_child_and_is_reported(start_up: Start, ports: Ports, tmp_path: Path) -> None:
    (port,) = ports(1)
    up = start_up(serve("D0", "decode", 1, port, "--children", str(tmp_path / "pids")))
    up.wait_ready()
    child, (stubborn, daemon) = up.pid("D0"), grandchildren(tmp_path / "pids")
    (guard,) = [pid for pid in descendants(up.process.pid) if child in descendants(pid)]
    os.kill(guard, signal.SIGKILL)
    assert up.wait() == 1
    assert up.said("D0 ended with signal 9 (SIGKILL)")
    assert not alive(child)
    assert not alive(stubborn)
    os.kill(daemon, signal.SIGKILL)  # it has left the session and lost its guard: nobody else can know it


def test_a_dead_prefill_engine_does_not_end_the_service(start_up: Start, ports: Ports) -> None:
    up = start_up(*pd_stack(ports))
    up.wait_ready()
    os.kill(up.pid("P0"), signal.SIGKILL)
    up.until(lambda: up.said("going on without P0"), "the verdict")
    assert up.said("P0 ended with signal 9 (SIGKILL)")
    assert up.state()["processes"]["P0"]["status"] == -9
    up.signal(signal.SIGTERM)
    assert up.wait() == 0


def test_sigusr1_starts_the_dead_again(start_up: Start, ports: Ports) -> None:
    up = start_up(*pd_stack(ports))
    up.wait_ready()
    before = {name: up.pid(name) for name in ("pool", "P0", "D0", "router")}
    for name in ("pool", "P0"):
        os.kill(before[name], signal.SIGKILL)
        up.until(lambda name=name: up.said(f"going on without {name}"), f"the verdict on {name}")
    up.signal(signal.SIGUSR1)
    up.until(lambda: up.said("all processes run"), "the revival")
    after = {name: up.pid(name) for name in before}
    assert {name for name in before if before[name] != after[name]} == {"pool", "P0"}
    assert all(map(alive, after.values()))
    up.signal(signal.SIGTERM)
    assert up.wait() == 0


def test_the_service_ends_when_no_decode_engine_is_left(start_up: Start, ports: Ports) -> None:
    up = start_up(*pd_stack(ports))
    up.wait_ready()
    pids = descendants(up.process.pid)
    os.kill(up.pid("D0"), signal.SIGKILL)
    assert up.wait() == 1
    assert up.messages[-1] == "error: D0 ended with signal 9 (SIGKILL)"
    assert not any(map(alive, pids))


def test_on_exit_wait_stays_for_a_revival_even_when_nothing_can_serve(start_up: Start, ports: Ports) -> None:
    up = start_up(*pd_stack(ports), on_exit="wait")
    up.wait_ready()
    os.kill(up.pid("D0"), signal.SIGKILL)
    up.until(lambda: up.said("going on without D0"), "the verdict")
    up.signal(signal.SIGUSR1)
    up.until(lambda: up.said("all processes run"), "the revival")
    up.signal(signal.SIGTERM)
    assert up.wait() == 0


def test_on_exit_stop_ends_the_service_at_the_first_death(start_up: Start, ports: Ports) -> None:
    up = start_up(*pd_stack(ports), on_exit="stop")
    up.wait_ready()
    os.kill(up.pid("P0"), signal.SIGKILL)
    assert up.wait() == 1
    assert up.messages[-1] == "error: P0 ended with signal 9 (SIGKILL)"
