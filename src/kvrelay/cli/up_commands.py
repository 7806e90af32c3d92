"""What the commands that ``kvrelay up`` runs would refuse, by their own parsers and checks, before anything starts.

Engines take minutes to load, and the router comes after them: a flag it does not know would be told only then.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import TYPE_CHECKING

from kvrelay.cli import pool, router, router_file
from kvrelay.errors import ConfigError
from kvrelay.launch.core.settings import flag_of, leaves
from kvrelay.router.admin.serving import bind

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from kvrelay.launch.core.plan import Plan
    from kvrelay.launch.core.settings import UpSettings
    from kvrelay.router.config import RouterConfig

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def problems_of(plan: Plan, settings: UpSettings) -> list[str]:
    """Every reason for which the pool or the router of ``plan`` would not start, in the words of ``kvrelay up``."""
    problems: list[str] = []
    for spec in plan.processes:
        if spec.role == "pool":
            problems += (_as_given(problem, "pool", settings.pool.args) for problem in _refused_pool(spec.argv))
        elif spec.role == "router":
            problems += (_as_given(problem, "router", settings.router.args) for problem in _refused_router(spec.argv))
    return problems


def _refused_pool(argv: Sequence[str]) -> Iterable[str]:
    from kvrelay.cli.pool_serve import refusals

    args = _parse(argv)
    if isinstance(args, str):
        return [f"{args} (from --pool-args)"]
    try:
        found = refusals(pool.read_config(args))
    except ConfigError as error:
        return error.problems
    return [problem for problem in found if not problem.startswith("memory: ")]  # told of everything together


def _refused_router(argv: Sequence[str]) -> Iterable[str]:
    args = _parse(argv)
    if isinstance(args, str):
        return [f"{args} (from --router-args)"]
    try:
        config = router_file.load(args, router.settings_of)
    except ConfigError as error:
        return error.problems
    return _missing(config)


def _missing(config: RouterConfig) -> Iterator[str]:
    """What a router finds out only when it starts."""
    from kvrelay.router.access_log import writing_problem
    from kvrelay.router.kv.token_ids import load_tokenizer

    if config.admin is not None:
        try:
            bind(config.admin).stop()
        except ConfigError as error:
            yield from error.problems
    if config.observing.access_log is not None and (problem := writing_problem(config.observing.access_log)):
        yield problem
    if config.kv.tokenizer is not None:
        try:
            load_tokenizer(config.kv.tokenizer)
        except ConfigError as error:
            yield from error.problems


def _parse(argv: Sequence[str]) -> argparse.Namespace | str:
    """What a command of ours makes of its arguments; or why it would end at once."""
    from kvrelay.cli import build_parser

    words = argv[argv.index("kvrelay") + 1 :]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return build_parser().parse_args(words)
    except SystemExit:
        return said.getvalue().strip().rpartition("error: ")[2] or "it would only print its help"


def _as_given(problem: str, role: str, args: Sequence[str]) -> str:
    """With the flags of ``kvrelay up`` for those of ``role``'s command, unless they are among ``args``."""
    flags = {flag_of(path) for path in leaves()}
    words = {word.partition("=")[0] for word in args}

    def ours(match: re.Match[str]) -> str:
        flag = match[0]
        longer = f"--{role}-{flag[2:]}"
        return longer if longer in flags and flag not in flags and flag not in words else flag

    return f"{role}: {_FLAG.sub(ours, problem)}"
