"""A process of the soak: three blocking clients in threads and one asyncio client, until standard input ends."""

from __future__ import annotations

import asyncio
import sys
import threading

from soak.client import SoakClient
from soak.concurrent import ConcurrentClient
from soak.journal import Journal

BLOCKING = 3
CLIENTS = BLOCKING + 1
"""Clients of a process."""
FLUSH_S = 1.0


def work(first: int, addresses: list[str], seed: int) -> None:
    """Run clients ``first`` to ``first + CLIENTS - 1``, each on one of the addresses in turn."""
    journal = Journal(sys.stdout)
    stop = threading.Event()

    def blocking(number: int) -> None:
        try:
            client = SoakClient(number, addresses[number % len(addresses)], seed + number, journal)
            while not stop.is_set():
                client.step()
            client.close()
        except Exception as error:  # noqa: BLE001 - told to the supervisor
            journal.violation(f"client {number} cannot go on: {type(error).__name__}: {error}")

    last = ConcurrentClient(first + BLOCKING, addresses[(first // CLIENTS) % len(addresses)], seed, journal)

    def concurrent() -> None:
        try:
            asyncio.run(last.run())
        except Exception as error:  # noqa: BLE001 - told to the supervisor
            journal.violation(f"client {first + BLOCKING} cannot go on: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=blocking, args=(first + index,)) for index in range(BLOCKING)]
    threads.append(threading.Thread(target=concurrent))
    for thread in threads:
        thread.start()
    flusher = threading.Thread(target=_flush, args=(journal, stop))
    flusher.start()
    sys.stdin.read()  # the supervisor closes it when the time is over
    stop.set()
    last.stop()
    for thread in [*threads, flusher]:
        thread.join()
    journal.flush()


def _flush(journal: Journal, stop: threading.Event) -> None:
    while not stop.wait(FLUSH_S):
        journal.flush()


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]))
