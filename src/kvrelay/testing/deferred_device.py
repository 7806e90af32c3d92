"""A device without one: what its engine queues runs late, not before somebody waits for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from kvrelay.connector.device import ITEMS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

GARBAGE = 0x5A


class DeferredCopies:
    """`kvrelay.connector.device.Copies` of tensors in host memory.

    A mark is how many kernels had been queued. Whoever copies without waiting for the mark it needs finds what was
    there before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued: list[Callable[[], None]] = []
        self._begun = 0
        self.reached = 0
        """Kernels that have run."""
        self.copied_blocks: list[int] = []
        """Of each copy, how many."""

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queue a kernel, as the engine does."""
        self._queued.append(kernel)

    def mark(self) -> int:
        """Everything queued so far."""
        return len(self._queued)

    def step_begins(self) -> None:
        """Note what has been queued so far."""
        self._begun = self.mark()

    def host(self, shape: Sequence[int], item_bytes: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        """Memory that holds garbage."""
        signed, unsigned = ITEMS[item_bytes]
        tensor = torch.full(tuple(shape), GARBAGE, dtype=signed)
        return tensor, tensor.numpy().view(unsigned)

    def gather(self, blocks: torch.Tensor, ids: Sequence[int], out: torch.Tensor, after: int | None) -> None:
        """Run what is waited for, and copy."""
        with self._lock:
            self._run(max(self._begun, after or 0))
            self.copied_blocks.append(len(ids))
            out.copy_(blocks[list(ids)])

    def scatter(self, given: torch.Tensor, blocks: torch.Tensor, ids: Sequence[int]) -> None:
        """Run what was queued before the step, and copy."""
        with self._lock:
            self._run(self._begun)
            self.copied_blocks.append(len(ids))
            blocks[list(ids)] = given

    def finish(self) -> None:
        """Run everything."""
        with self._lock:
            self._run(self.mark())

    def _run(self, mark: int) -> None:
        while self.reached < mark:
            self._queued[self.reached]()
            self.reached += 1
