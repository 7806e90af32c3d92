"""The guard: a tiny parent that answers for one child and for everything the child starts.

``kvrelay up`` starts every process through a guard of its own::

    kvrelay up ── guard ── python -m vllm ... ── EngineCore ── Worker
               ── guard ── kvrelay pool serve

vLLM starts processes that outlive it when it is killed, and a launcher that is itself killed with SIGKILL can clean
nothing up. The guard solves both: it is the child subreaper (PR_SET_CHILD_SUBREAPER) of its subtree, so whatever is
orphaned there becomes the guard's own child and can be found and ended; and it reads a pipe from the launcher, which
reaches its end when the launcher is gone, however it went. Should the guard itself be killed, its child goes with it
(PR_SET_PDEATHSIG) and the launcher ends what is left of the child's session.

Protocol: ``python -m kvrelay.launch.guard GRACE_S -- ARGV...``. On standard output it writes one JSON line when the
child runs, ``{"pid": 17}``, and one when it has ended, ``{"status": -9}`` (negative: killed by that signal). The guard
exits when its subtree is empty. On standard input it takes ``t`` (SIGTERM to the child, SIGKILL to all that is left
after ``GRACE_S`` seconds) and ``k`` (SIGKILL to all now); the end of the input, or SIGTERM to the guard, means ``t``.
What is suspended (SIGSTOP) is continued after SIGTERM: it could not act on it.
The child's output goes to the guard's standard error, its input is empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from kvrelay.launch import kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

RESET_FOR_CHILD = (
    signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ,
)  # fmt: skip
LEFTOVER_GRACE_S = 2.0
"""How long what the child left behind may take to end by itself after SIGTERM."""


class Guard:
    """One guard's run: start, watch, end."""

    def __init__(self, argv: list[str], grace_s: float) -> None:
        """``grace_s``: from SIGTERM to SIGKILL when asked to stop."""
        self._argv = argv
        self._grace_s = grace_s
        self._child = 0
        self._ended = False
        self._stopping = False
        self._kill_at: float | None = None
        self._wakeups, wakeup_writer = os.pipe()
        os.set_blocking(self._wakeups, False)
        os.set_blocking(wakeup_writer, False)
        signal.set_wakeup_fd(wakeup_writer)

    def run(self) -> int:
        """Guard until the subtree is empty. Returns the exit status: 0, or 127 when the child could not be started."""
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        kernel.adopt_orphans()
        self._child = self._start()
        self._tell({"pid": self._child})
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            selector.register(self._wakeups, selectors.EVENT_READ)
            while not self._reap():
                ready = {key.fd for key, _ in selector.select(self._patience())}
                if self._wakeups in ready:
                    os.read(self._wakeups, 4096)
                if sys.stdin.fileno() in ready and not self._obey(os.read(sys.stdin.fileno(), 64)):
                    selector.unregister(sys.stdin.fileno())
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    kernel.signal_each(kernel.descendants(os.getpid()), signal.SIGKILL)
        return 0

    def _start(self) -> int:
        guard = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_child(guard)
        return pid

    def _become_child(self, guard: int) -> NoReturn:
        try:
            os.setsid()
            kernel.die_with_parent(signal.SIGKILL)
            if os.getppid() != guard:  # it died before the line above
                os._exit(127)
            signal.set_wakeup_fd(-1)
            for number in RESET_FOR_CHILD:
                signal.signal(number, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(2, 1)
            os.execvp(self._argv[0], self._argv)  # noqa: S606 - starting what it is told to is its purpose
        except OSError as error:
            os.write(2, f"cannot start {self._argv[0]}: {error}\n".encode())
        os._exit(127)

    def _reap(self) -> bool:
        """Collect what has ended; whether the subtree is empty."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self._child:
                self._ended = True
                self._tell({"status": os.waitstatus_to_exitcode(status)})
                left = kernel.descendants(os.getpid())
                kernel.signal_each(left, signal.SIGTERM)
                kernel.signal_each(left, signal.SIGCONT)
                self._kill_by(LEFTOVER_GRACE_S)

    def _patience(self) -> float | None:
        if self._kill_at is None:
            return None
        # Past the deadline: processes forked while we were killing are caught by the next round.
        return max(self._kill_at - time.monotonic(), 0.05)

    def _obey(self, commands: bytes) -> bool:
        """Do what the launcher says; False at the end of its pipe."""
        if b"k" in commands:
            self._kill_by(0.0)
        elif b"t" in commands or not commands:
            self._stop()
        return bool(commands)

    def _stop(self) -> None:
        if not self._stopping and not self._ended:
            self._stopping = True
            kernel.signal_each({self._child} - {0}, signal.SIGTERM)
            kernel.signal_each(kernel.descendants(os.getpid()), signal.SIGCONT)
            self._kill_by(self._grace_s)

    def _kill_by(self, seconds: float) -> None:
        moment = time.monotonic() + seconds
        self._kill_at = moment if self._kill_at is None else min(self._kill_at, moment)

    @staticmethod
    def _tell(event: dict[str, int]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, json.dumps(event).encode() + b"\n")


def main(argv: Sequence[str]) -> int:
    """Run one guard. ``argv``: grace in seconds, ``--``, then the child's command."""
    grace, dashes, *command = argv
    if dashes != "--" or not command:
        sys.stderr.write("usage: python -m kvrelay.launch.guard GRACE_S -- ARGV...\n")
        return 2
    return Guard(command, float(grace)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
