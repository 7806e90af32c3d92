"""How flags are parsed, and what ``--help`` tells of a setting beside its meaning."""

from __future__ import annotations

import argparse
import difflib
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from kvrelay.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest flag for one that it does not know."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As any parser does, but nothing may be left: no parser of ours passes on what it does not know."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._nearest(rest)}")
        return known, rest

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        more = "" if message.endswith("?") else f"; see `{self.prog} --help`"
        self.exit(2, f"kvrelay: error: {message}{more}\n")

    def _nearest(self, unknown: Sequence[str]) -> str:
        flags = [flag for action in self._actions for flag in action.option_strings]
        found = [
            near
            for word in unknown
            if word.startswith("--")
            for near in difflib.get_close_matches(word.partition("=")[0], flags, n=1)
        ]
        return f"; did you mean {', '.join(dict.fromkeys(found))}?" if found else ""


def metavar_of(field: Any, legal: Sequence[str] = ()) -> str:
    """What stands for the value of a pydantic ``field``: the ``legal`` words, those of its type, or VALUE."""
    kind = field.annotation
    if kind is bool:
        legal = ("true", "false")
    elif get_origin(kind) is Literal:
        legal = get_args(kind)
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        legal = list(kind)
    return "{" + ",".join(legal) + "}" if legal else "VALUE"


def help_of(path: str, field: Any) -> str:
    """What a pydantic ``field`` means, and its default if it has one; that of a ``size`` with its unit."""
    default = field.default
    if default is None or default in ((), ""):
        return str(field.description)
    if isinstance(default, bool):
        shown = str(default).lower()
    elif path.rpartition(".")[2] == "size":
        shown = format_size(default)
    else:
        shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{field.description} ({shown})"
