"""Lets idle engines rest, where several share few cores.

For a second after each step a worker of vLLM looks for the next one without pause, yielding its core in between. Where
each engine has cores of its own, nobody else wants them. Where engines share cores, the one that is asked loses them to
those that have nothing to do; and Linux 6.18 puts whoever wakes up behind all who yielded, for up to 5 s as measured.

The folder of this package comes first on the path of such engines: Python runs its ``sitecustomize.py`` at the start.
"""

from __future__ import annotations

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """This process's environment, with idle engines at rest."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
