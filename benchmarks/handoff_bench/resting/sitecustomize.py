"""Found first on the path of measured engines: who yields its core in a loop sleeps a moment instead.

For a second after each step a worker of vLLM looks for the next one without pause. Where each engine has cores of its
own, nobody else wants them. Here engines share two: a worker that has nothing to do would take them from the one that
is timed.
"""

import os
import time

PAUSE_S = 50e-6


def _rest() -> None:
    time.sleep(PAUSE_S)


os.sched_yield = _rest
