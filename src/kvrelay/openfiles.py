"""How many files, connections among them, this process may have open."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging


def raise_limit(log: logging.Logger) -> None:
    """Allow as many as the system lets us: many systems begin with 1,024. ``log`` is told if that fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("no more than %d files can be open at once: %s", soft, error)
