"""What all tests stand on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Have Ctrl-C work in what tests start: a shell's background jobs ignore it, and their children with them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
