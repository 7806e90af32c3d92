"""``kvrelay pool serve`` and ``kvrelay pool check``."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.pool import preflight

if TYPE_CHECKING:
    from kvrelay.pool.config import PoolConfig

log = logging.getLogger("kvrelay.pool")


def serve(config: PoolConfig) -> int:
    """Run a pool until told to stop. Exit status: 0 after SIGTERM, 130 after Ctrl-C."""
    logging.basicConfig(
        level=config.settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    findings = _findings(config)
    if errors := [str(finding) for finding in findings if finding.level == "error"]:
        raise ConfigError(*errors)
    for finding in findings:
        if finding.level == "warning":
            log.warning("%s", finding)
    import uvloop

    from kvrelay.pool.service import PoolService

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(PoolService(config, lambda line: print(line, flush=True)).run())


def refusals(config: PoolConfig) -> list[str]:
    """Why a pool could not start on this machine."""
    return [str(finding) for finding in _findings(config) if finding.level == "error"]


def check(config: PoolConfig, objects: int | None) -> int:
    """Print what was looked at, for so many ``objects``. Exit status: 1 if a pool could not start."""
    findings = _findings(config, objects)
    for finding in findings:
        print(f"{finding.level:8} {finding.name:14} {finding.told}")
        if finding.mend:
            print(f"{'':23} {finding.mend}")
    return int(any(finding.level == "error" for finding in findings))


def _findings(config: PoolConfig, objects: int | None = None) -> list[preflight.Finding]:
    return preflight.check(config, preflight.look(tiers=config.tiers), objects)
