"""``kvrelay up``: start a pool, engines and a router on this machine."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cli.flags import help_of, metavar_of
from kvrelay.errors import ConfigError
from kvrelay.launch.core.config import Configuration, resolve
from kvrelay.launch.core.settings import NO_CONNECTOR, flag_of, leaves
from kvrelay.profiles.registry import PROFILES

if TYPE_CHECKING:
    from kvrelay.launch.core.plan import Plan
    from kvrelay.launch.core.settings import UpSettings

DESCRIPTION = """\
Start a KV pool, vLLM prefill and decode engines and the router on this machine, and stay until Ctrl-C.
Every setting can come from a flag, an environment variable (KVRELAY_PORT, KVRELAY_PREFILL_DTYPE, ...), a TOML file or
its default, in this order; `kvrelay config show` prints which it was. Engine settings exist for all engines (--dtype)
and for one role (--prefill-dtype, --decode-dtype). Anything else vLLM takes goes into --engine-args, --prefill-args
and --decode-args; write them with "=", as in --engine-args="--seed 1"."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``kvrelay up``."""
    parser = subparsers.add_parser(
        "up",
        help="start everything on this machine",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_settings(parser)
    parser.add_argument("--stop-with-parent", action="store_true", help="stop when the program that started this ends")
    parser.set_defaults(run=run)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` one flag a setting. Only flags that are given appear in its result."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=leaves()["model"].description)
    parser.add_argument("--config", metavar="FILE.toml", type=Path, help="read settings from a file")
    for path, field in leaves().items():
        flag = flag_of(path)
        if flag is None:
            continue
        options: dict[str, Any] = {"dest": path, "default": argparse.SUPPRESS, "help": help_of(path, field)}
        if field.annotation == bool | None:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        else:
            legal = (*PROFILES, NO_CONNECTOR) if path == "connector" else ()
            parser.add_argument(flag, metavar="N" if path.endswith(".count") else metavar_of(field, legal), **options)


def read_settings(args: argparse.Namespace) -> Configuration:
    """Resolve the settings of parsed arguments. Raises `ConfigError` with every problem."""
    flags = {path: value for path, value in vars(args).items() if path in leaves() and value is not None}
    text, file = None, args.config
    if file is not None:
        try:
            text = file.read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--config {file}: cannot be read: {error}; name an existing TOML file") from None
    return resolve(flags, os.environ, text, str(file), others=_foreign_variables())


def _foreign_variables() -> set[str]:
    """Variables of other parts of kvrelay, which `kvrelay up` leaves to the processes it starts."""
    from kvrelay.client.token import TOKEN_VARIABLE
    from kvrelay.native import PURE_VARIABLE
    from kvrelay.pool import settings as pool
    from kvrelay.router.core import admin
    from kvrelay.router.entrance.settings import ENGINE_KEY_VARIABLE

    named = {TOKEN_VARIABLE, PURE_VARIABLE, admin.TOKEN_VARIABLE, ENGINE_KEY_VARIABLE}
    return named | {name for path in pool.leaves() if (name := pool.variable_of(path)) is not None}


def run(args: argparse.Namespace) -> int:
    """Start, serve until told to stop, stop."""
    from kvrelay.launch.kernel import stop_with_parent
    from kvrelay.launch.rundir import RunDir

    settings = read_settings(args).settings
    if args.stop_with_parent:
        stop_with_parent()
    run_dir = RunDir(settings.run_dir)
    names: list[str] = []
    failed = True
    try:
        plan = _plan(settings, run_dir.path)
        names = [spec.name for spec in plan.processes]
        run_dir.make(plan.folders)
        for note in settings.profile.notes(settings) if settings.profile else ():
            _report(note)
        _report(f"logs are in {run_dir.path}")
        status = asyncio.run(_serve(settings, plan, run_dir.path))
        failed = False
    finally:
        run_dir.clean(names, keep_logs=failed and bool(names))
        if failed and names:
            _report(f"logs are kept in {run_dir.path}")
    return status


def _plan(settings: UpSettings, run_dir: Path) -> Plan:
    """What is to run. Raises `ConfigError` with everything that can be known to be wrong before anything does."""
    from kvrelay.cli import up_commands
    from kvrelay.launch import host, preflight
    from kvrelay.launch.core.plan import make_plan

    problems = preflight.problems_of(settings)
    try:
        plan = make_plan(settings, host.facts(settings, run_dir))
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    problems += up_commands.problems_of(plan, settings)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return plan


async def _serve(settings: UpSettings, plan: Plan, run_dir: Path) -> int:
    from kvrelay.launch.local import Stack
    from kvrelay.launch.service import Service, curl_line

    def announce() -> None:
        line = curl_line(plan, keys=settings.router.keys_file is not None)
        print(f"\nready: {plan.endpoint}\n\n  {line}\n\nCtrl-C stops everything.", flush=True)

    return await Service(settings, Stack(plan, run_dir, _report), _report).run(announce)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
