"""What runs in the peers' own environment: one peer behind a few methods, commanded by JSON lines over a pipe.

``python driver.py NAME`` reads one command a line, ``[method, arguments]`` and writes one answer a line: ``{"ok": ..}``
or ``{"error": ..}``. Operations time themselves, so the pipe is in no figure. Standard output belongs to the answers:
whatever native code prints goes to standard error.

Standard library and NumPy only, besides the peer: this file does not import kvrelay. Drivers take `children` from the
folder above, which ``PYTHONPATH`` has to name.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODULES = {"mooncake": "mooncake_store", "redis": "redis_server", "nixl": "nixl_agents"}


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Driver(ABC):
    """One peer.

    ``source`` and ``target`` are two buffers of a batch's bytes, touched; object ``i`` of a batch is their ``i``-th
    block. Methods may be called in any order after `start`, any number of times.
    """

    name: str
    source: np.ndarray[Any, np.dtype[np.uint8]]
    target: np.ndarray[Any, np.dtype[np.uint8]]

    def allocate(self, batch_bytes: int) -> None:
        """Make the two buffers: random bytes, and zeros in touched pages."""
        self.source = np.frombuffer(bytearray(os.urandom(batch_bytes)), dtype=np.uint8)
        self.target = np.frombuffer(bytearray(batch_bytes), dtype=np.uint8)
        self.target[:] = 0

    @abstractmethod
    def start(self, batch_bytes: int, **options: Any) -> dict[str, str]:
        """Start whatever the peer consists of; versions and settings worth reporting. Raises when it does not start."""

    @abstractmethod
    def put(self, keys: Sequence[str], size: int) -> None:
        """Store block ``i`` of ``source`` under ``keys[i]``."""

    @abstractmethod
    def get(self, keys: Sequence[str], size: int) -> None:
        """Read ``keys[i]`` into block ``i`` of ``target``."""

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> int:
        """How many of the keys there are."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Forget the keys."""

    @abstractmethod
    def stop(self) -> None:
        """End everything that `start` started. May be called twice, and after a start that failed."""

    def prepare(self, keys: Sequence[str], size: int) -> None:  # noqa: B027 - most have nothing to do
        """Whatever the peer wants done before a batch of these is timed."""


class Commands:
    """The commands, over one driver."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def start(self, **options: Any) -> dict[str, str]:
        """See `Driver.start`."""
        return self.driver.start(**options)

    def transfer(self, keys: list[str], size: int, verify: bool) -> dict[str, float]:
        """Put and get a batch, and delete it; seconds of each. ``verify``: compare the bytes."""
        driver = self.driver
        driver.target[:: max(1, size // 2)] = 0
        if verify:
            driver.target[:] = 0
        driver.prepare(keys, size)
        put = timed(lambda: driver.put(keys, size))
        got = timed(lambda: driver.get(keys, size))
        used = len(keys) * size
        if verify and not np.array_equal(driver.target[:used], driver.source[:used]):
            raise AssertionError(f"{driver.name}: wrong bytes at {size} bytes an object")
        driver.delete(keys)
        return {"put": put, "get": got}

    def fill(self, keys: list[str], size: int) -> None:
        """Store a batch that stays."""
        self.driver.prepare(keys, size)
        self.driver.put(keys, size)

    def load(self, keys: list[str], size: int, seconds: float) -> int:
        """Put, get and delete a batch again and again; how often. Answered when the time is over."""
        rounds, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            round_keys = [f"{key}-{rounds}" for key in keys]
            self.driver.prepare(round_keys, size)
            self.driver.put(round_keys, size)
            self.driver.get(round_keys, size)
            self.driver.delete(round_keys)
            rounds += 1
        return rounds

    def lookups(self, keys: list[str], repeats: int, present: int) -> list[float]:
        """Seconds of each of ``repeats`` existence checks of all keys; ``present`` of them must be there."""
        if self.driver.exists(keys) != present:
            raise AssertionError(f"{self.driver.name}: {self.driver.exists(keys)} of {present} keys are there")
        return [timed(lambda: self.driver.exists(keys)) for _ in range(repeats)]

    def stop(self) -> None:
        """See `Driver.stop`."""
        self.driver.stop()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name = sys.argv[1]
    try:
        driver: Driver = import_module(MODULES[name]).driver()
    except (ImportError, OSError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        return
    print(json.dumps({"ok": name}), file=answers)
    commands = Commands(driver)
    try:
        for line in sys.stdin:
            method, arguments = json.loads(line)
            try:
                answer = {"ok": getattr(commands, method)(**arguments)}
            except Exception as error:  # noqa: BLE001 - told to whoever commands
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
            if method == "stop":
                break
    finally:
        driver.stop()
        answers.flush()
        os._exit(0)  # native threads of a peer must not keep a stopped driver alive


if __name__ == "__main__":
    main()
