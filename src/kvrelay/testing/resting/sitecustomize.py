"""Found first on the path of engines: who yields its core in a loop sleeps a moment instead."""

import os
import time

PAUSE_S = 50e-6


def _rest() -> None:
    time.sleep(PAUSE_S)


os.sched_yield = _rest
