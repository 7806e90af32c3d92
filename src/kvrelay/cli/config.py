"""``kvrelay config show``: the effective settings of ``kvrelay up`` and where each came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.cli.up import add_settings, read_settings
from kvrelay.launch.core.config import show

if TYPE_CHECKING:
    import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``kvrelay config``."""
    parser = subparsers.add_parser("config", help="look at settings")
    verbs = parser.add_subparsers(dest="config_verb", required=True, metavar="VERB")
    shower = verbs.add_parser("show", help="print the settings `kvrelay up` would use, and their origins")
    add_settings(shower)
    shower.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print them as TOML."""
    print(show(read_settings(args)))
    return 0
