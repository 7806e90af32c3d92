"""The command line: one module a verb, each parses and calls."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from kvrelay import __version__
from kvrelay.errors import ConfigError, KvRelayError

if TYPE_CHECKING:
    from collections.abc import Sequence

VERBS = ("pool", "router", "up", "config")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="kvrelay", description="Prefill/decode disaggregation for vLLM.")
    parser.add_argument("--version", action="version", version=f"kvrelay {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        import_module(f"kvrelay.cli.{verb}").add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 1 failed while running, 2 unusable input, 130 interrupted."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except ConfigError as error:
        for problem in error.problems:
            print(f"kvrelay: error: {problem}", file=sys.stderr)
        return 2
    except KvRelayError as error:
        print(f"kvrelay: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status
