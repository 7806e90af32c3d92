"""Starts the engines that are measured: a plain one, and a P and a D for each contestant, through ``kvrelay up``."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from handoff_bench.asking import Engine, prompt_of
from handoff_bench.desk import Desk
from handoff_bench.legs import Legs
from handoff_bench.unsaved import FOLDER
from kvrelay.launch.host import free_ports
from kvrelay.testing.stack import RunningStack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from handoff_bench.contestants import Contestant

BLOCK_TOKENS = 32
START_S = 600.0
SETTLE_S = 0.02
"""Before engines are suspended: what they still do for an answer that was given, they do in their own turn."""


@dataclass(frozen=True)
class Sizes:
    """Memory for a model: a small KV cache, so that all of it is soon in use, and a pool for some dozens of prompts.

    ``stack_bytes``: what a P, a D and a pool of it take, as measured.
    """

    kv_bytes_per_token: int
    cache_tokens: int
    pool: str
    stack_bytes: int

    @property
    def cache(self) -> str:
        """As engines take it."""
        return f"{self.kv_bytes_per_token * self.cache_tokens >> 20}MiB"


SIZES = {
    "tiny": Sizes(2 << 10, 16 << 10, "256MiB", 3200 << 20),
    "smollm2": Sizes(45 << 10, 4 << 10, "1GiB", 6 << 30),
}


class Pair:
    """The stack of one contestant. A context manager: it is stopped on exit."""

    def __init__(self, contestant: Contestant, stack: RunningStack) -> None:
        self.contestant = contestant
        self._stack = stack
        self._desk: Desk | None = None

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        if self._desk is not None:
            self._desk.close()
        self._stack.resume()
        self._stack.stop()

    def legs(self, plain: RunningStack) -> Legs:
        """Wait until it serves; then its engines."""
        self._stack.wait_ready(START_S)
        pool = self._stack.pool_address if self.contestant.pooled else ""
        self._desk = Desk(self.contestant.profile, pool)
        return Legs(
            self.contestant,
            Engine(self._stack.prefill_urls[0], self._stack.model_name),
            Engine(self._stack.decode_urls[0], self._stack.model_name),
            Engine(plain.decode_urls[0], plain.model_name),
            self._desk,
            self._stack.model_name,
            self._stack.process("P0"),
            pool,
        )

    def rest(self) -> None:
        """Suspend it until its next turn."""
        time.sleep(SETTLE_S)
        self._stack.suspend()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """It is this one's turn meanwhile: it runs, and no other does."""
        self._stack.resume()
        try:
            yield
        finally:
            self.rest()


class Engines:
    """Starts engines of one model below a directory."""

    def __init__(self, model: Path, root: Path, longest: int, sizes: Sizes) -> None:
        self._model = model
        self._root = root
        self.longest = longest
        self._sizes = sizes
        self._flags = (
            "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "16",
            "--max-model-len", str(longest + 512), "--max-num-batched-tokens", str(longest + 512),
            "--kv-cache-memory", sizes.cache, "--pool-size", sizes.pool,
        )  # fmt: skip

    def start(self, name: str, *flags: str, options: str = "") -> RunningStack:
        """Start ``kvrelay up`` on free ports; ``options``: more of its configuration."""
        (port,) = free_ports(1, taken=set())
        config = self._root / f"{name}.toml"
        config.write_text(options)
        own = ["--port", str(port), "--config", str(config)]
        return RunningStack(self._model, self._root / name, [*self._flags, *own, *flags])

    def start_plain(self) -> RunningStack:
        """An engine without a connector, on D's core."""
        return self.start("plain", "--connector", "none", "--decode-cpus", "1")

    def start_pair(self, contestant: Contestant) -> Pair:
        """One P on the first core, one D on the second."""
        (pool_port,) = free_ports(1, taken=set())
        options = contestant.toml(f"tcp:127.0.0.1:{pool_port}") + _prefill_environment()
        flags = ["--connector", contestant.connector, *contestant.flags]
        if contestant.over_tcp:
            flags += ["--pool-port", str(pool_port)]
        flags += ["--prefill-cpus", "0", "--decode-cpus", "1"]
        return Pair(contestant, self.start(contestant.name, *flags, options=options))

    def fill(self, legs: Legs) -> None:
        """Use every block of D's cache once: memory that was never touched costs whoever is first to write there."""
        for number in range(-(-self._sizes.cache_tokens // self.longest)):
            legs.decode.complete(prompt_of(self.longest, "fill", number))


def _prefill_environment() -> str:
    """P's, as TOML: with the hook that lets prompts be left unsaved."""
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return f"[prefill.env]\nPYTHONPATH = {json.dumps(path)}\n"
