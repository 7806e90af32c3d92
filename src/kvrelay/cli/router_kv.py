"""Flags of ``kvrelay router serve`` about what engines have in their KV caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.kv.settings import KvSettings, TokenIds

if TYPE_CHECKING:
    import argparse

_DEFAULTS = KvSettings()


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """Add them."""
    serve.add_argument(
        "--kv-events", action="append", default=[], metavar="ENGINE=ENDPOINT[,REPLAY]",
        help="where an engine publishes its KV cache events: tcp://HOST:PORT; repeat for more",
    )  # fmt: skip
    serve.add_argument(
        "--token-ids", default=_DEFAULTS.token_ids, metavar="WHO",
        help=f"who turns text into token ids for --policy kv-aware: {', '.join(TokenIds)} (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--tokenize-timeout", type=float, default=_DEFAULTS.tokenize_timeout_s, metavar="S",
        help="how long a request waits for its token ids (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--tokenizer", metavar="PATH", help="a model's directory or tokenizer.json: completions are tokenised here"
    )
    serve.add_argument(
        "--pool-index", action="store_true", help="ask the pool what it holds before a prompt goes to a prefill engine"
    )


def settings_of(args: argparse.Namespace) -> KvSettings:
    """What was given."""
    return KvSettings(
        events=tuple(args.kv_events),
        token_ids=args.token_ids,
        tokenize_timeout_s=args.tokenize_timeout,
        tokenizer=args.tokenizer,
        pool_index=args.pool_index,
    )
