"""The command line: one module a verb, each parses and calls."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvrelay import __version__
from kvrelay.cli.flags import CommandParser
from kvrelay.cli.status import exit_status

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

VERBS = ("pool", "router", "up", "config")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = CommandParser(prog="kvrelay", description="Prefill/decode disaggregation for vLLM.")
    parser.add_argument("--version", action="version", version=f"kvrelay {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        import_module(f"kvrelay.cli.{verb}").add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 1 failed while running, 2 unusable input, 130 interrupted."""

    def run() -> int:  # with all it imports: Ctrl-C may come at any time
        args = build_parser().parse_args(argv)
        return int(args.run(args))

    return exit_status(run)
