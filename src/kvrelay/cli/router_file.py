"""The configuration file of ``kvrelay router serve``: its flags' names and values, as TOML.

What a flag was given counts more than what the file says; so the file is read as other defaults. It can be read again
while the router runs: the flags stay as they were given.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cli.flags import CommandParser
from kvrelay.client.token import TOKEN_VARIABLE as POOL_TOKEN_VARIABLE
from kvrelay.errors import ConfigError
from kvrelay.router.config import RouterConfig, RouterSettings, check_settings
from kvrelay.router.core.admin import TOKEN_VARIABLE as ADMIN_TOKEN_VARIABLE
from kvrelay.router.entrance.settings import ENGINE_KEY_VARIABLE
from kvrelay.settings import has_zero_byte, toml, zero_byte_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_NOT_IN_FILES = frozenset({"help", "config", "log_level"})
_SECRETS = {
    "pool_token_file": POOL_TOKEN_VARIABLE,
    "engine_api_key_file": ENGINE_KEY_VARIABLE,
    "admin_token_file": ADMIN_TOKEN_VARIABLE,
}
"""Settings that name a file, and the variable that holds its content where none is named."""
_PASSWORD = re.compile(r"^(\w+://)[^/@]*@")


class FlagParser(CommandParser):
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
    return _resolve(args, {} if args.config is None else _read(args.config), settings_of)[0]


def show(args: argparse.Namespace, settings_of: Callable[[argparse.Namespace], RouterSettings]) -> str:
    """The effective settings as TOML, each with its origin; those that are not set are comments. No secrets in it.

    Raises:
        ConfigError: with every problem of flags and file.
    """
    in_file = {} if args.config is None else _read(args.config)
    config, merged = _resolve(args, in_file, settings_of)
    lines = []
    for action in _settings(args.parser):
        dest, value = action.dest, getattr(merged, action.dest)
        origin = action.option_strings[0] if dest in args.given else args.config if dest in in_file else "default"
        if dest == "prefill_timeout" and value is None:
            value, origin = config.prefill_timeout_s, "default: three quarters of handover_timeout"
        variable = _SECRETS.get(dest, "")
        if value is None and variable in os.environ:
            lines.append(f"# {dest} is not set: the value of {variable} counts, and is not shown")
        elif value is None or (value == [] and origin == "default"):
            lines.append(f"# {dest} is not set")
        else:
            lines.append(f"{f'{dest} = {toml(_without_password(value))}':<48}  # {origin}")
    return "\n".join(lines)


def _without_password(value: object) -> object:
    return _PASSWORD.sub(r"\1***@", value) if isinstance(value, str) else value


def _zero_bytes(args: argparse.Namespace) -> Iterator[str]:
    for dest, value in vars(args).items():
        if has_zero_byte(value):
            origin = f"--{dest.replace('_', '-')}" if dest in args.given else args.config
            yield zero_byte_problem(dest, value, origin)


def _resolve(
    args: argparse.Namespace, in_file: Mapping[str, Any], settings_of: Callable[[argparse.Namespace], RouterSettings]
) -> tuple[RouterConfig, argparse.Namespace]:
    """The configuration of flags and what the file holds, and the settings it is made of."""
    problems: list[str] = []
    merged = _merged(args, in_file, problems)
    problems += _zero_bytes(merged)
    try:
        config = check_settings(settings_of(merged))
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    if problems:
        raise ConfigError(*problems)
    return config, merged


def _merged(args: argparse.Namespace, in_file: Mapping[str, Any], problems: list[str]) -> argparse.Namespace:
    file = args.config
    actions = {action.dest: action for action in _settings(args.parser)}
    merged = argparse.Namespace(**vars(args))
    for key, value in in_file.items():
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


def _read(file: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {file} is not valid TOML: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {file} cannot be read: {error}; name an existing TOML file") from None


def _settings(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Flags that are settings, and so may be in a file."""
    return [action for action in parser._actions if action.option_strings and action.dest not in _NOT_IN_FILES]


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
