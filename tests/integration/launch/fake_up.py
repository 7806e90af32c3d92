"""Run a plan of fake processes exactly as ``kvrelay up`` runs a real one.

fake_up.py RUN_DIR READY_TIMEOUT_S ON_EXIT NAME:ROLE:STAGE:PORT:GRACE:ARGUMENTS...
"""

# ruff: noqa: T201 - a program that talks by printing

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from kvrelay.errors import KvRelayError
from kvrelay.launch.core.plan import Plan, ProcessSpec, Readiness
from kvrelay.launch.core.settings import UpSettings
from kvrelay.launch.local import Stack
from kvrelay.launch.service import Service

FAKE = Path(__file__).with_name("fake_process.py")


def spec_of(text: str) -> ProcessSpec:
    name, role, stage, port, grace, arguments = text.split(":", 5)
    return ProcessSpec(
        name=name,
        role=role,  # type: ignore[arg-type]
        stage=int(stage),
        argv=(sys.executable, str(FAKE), *arguments.split()),
        env=dict(os.environ),
        readiness=Readiness(host="127.0.0.1", port=int(port)),
        grace_s=float(grace),
        url=f"http://127.0.0.1:{port}",
    )


async def main(run_dir: str, ready_timeout_s: str, on_exit: str, *specs: str) -> int:
    plan = Plan(processes=tuple(map(spec_of, specs)), endpoint="http://fake", pools={}, model_name="fake")
    settings = UpSettings.model_validate({"ready_timeout_s": ready_timeout_s, "on_exit": on_exit})

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    service = Service(settings, Stack(plan, Path(run_dir), report), report)
    return await service.run(lambda: print("ready", flush=True))


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(*sys.argv[1:])))
    except KvRelayError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
