"""The configuration file of ``kvrelay router serve``: its flags' names and values, as TOML.

What a flag was given counts more than what the file says; so the file is read as other defaults. It can be read again
while the router runs: the flags stay as they were given.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.errors import ConfigError
from kvrelay.router.config import RouterConfig, RouterSettings, check_settings
from kvrelay.settings import has_zero_byte, zero_byte_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_NOT_IN_FILES = frozenset({"help", "config", "log_level"})


class FlagParser(argparse.ArgumentParser):
    """Remembers which flags were given: ``given`` of what it parsed, and ``parser``, itself."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As any parser does."""
        known, rest = super().parse_known_args(args, namespace)
        defaults = {action: action.default for action in self._actions}
        for action in self._actions:
            action.default = argparse.SUPPRESS
        try:
            given, _ = super().parse_known_args(args, argparse.Namespace())
        finally:
            for action, default in defaults.items():
                action.default = default
        known.given, known.parser = frozenset(vars(given)), self
        return known, rest


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``."""
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of these settings, read again on SIGHUP; flags count more"
    )


def load(args: argparse.Namespace, settings_of: Callable[[argparse.Namespace], RouterSettings]) -> RouterConfig:
    """The configuration of flags and file, the file read now.

    Raises:
        ConfigError: with every problem of both.
    """
    problems: list[str] = []
    if args.config is not None:
        args = _merged(args, problems)
    problems += _zero_bytes(args)
    try:
        config = check_settings(settings_of(args))
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    if problems:
        raise ConfigError(*problems)
    return config


def _zero_bytes(args: argparse.Namespace) -> Iterator[str]:
    for dest, value in vars(args).items():
        if has_zero_byte(value):
            origin = f"--{dest.replace('_', '-')}" if dest in args.given else args.config
            yield zero_byte_problem(dest, value, origin)


def _merged(args: argparse.Namespace, problems: list[str]) -> argparse.Namespace:
    file = args.config
    try:
        tree: Mapping[str, Any] = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {file} is not valid TOML: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {file} cannot be read: {error}; name an existing TOML file") from None
    actions = {
        action.dest: action
        for action in args.parser._actions
        if action.option_strings and action.dest not in _NOT_IN_FILES
    }
    merged = argparse.Namespace(**vars(args))
    for key, value in tree.items():
        action = actions.get(key)
        if action is None:
            near = difflib.get_close_matches(key, actions, n=1)
            hint = f"did you mean {near[0]}?" if near else "settings are called as flags are, such as decode_timeout"
            problems.append(f"{key} (from {file}): unknown setting; {hint}")
        elif (wrong := _problem(action, value)) is not None:
            problems.append(f"{key} = {value!r} (from {file}): {wrong}")
        elif key not in args.given:
            setattr(merged, key, float(value) if action.type is float else value)
    return merged


def _problem(action: argparse.Action, value: object) -> str | None:
    """Why a value cannot be that flag's."""
    if isinstance(action, argparse._AppendAction):
        legal = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return None if legal else 'write a list of strings, such as ["http://127.0.0.1:8100"]'
    if action.nargs == 0:
        return None if isinstance(value, bool) else "write true or false"
    if action.type in (int, float):
        kinds = (int,) if action.type is int else (int, float)
        legal = isinstance(value, kinds) and not isinstance(value, bool)
        return None if legal else "write a number" + (" without a fraction" if action.type is int else "")
    if not isinstance(value, str):
        return "write a string, in quotes"
    if action.choices is not None and value not in action.choices:
        return f"choose one of {', '.join(action.choices)}"
    return None
