"""Copies between a CUDA device and pinned memory, each thread's on a stream of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from kvrelay.connector.device import ITEMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


class CudaCopies:
    """`kvrelay.connector.device.Copies` of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: torch.cuda.Event | None = None
        self._own = threading.local()

    def mark(self) -> torch.cuda.Event:
        """An event on the engine's stream. For its own thread."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def step_begins(self) -> None:
        """Note how far the engine's stream is. For its own thread."""
        self._begun = self.mark()

    def host(self, shape: Sequence[int], item_bytes: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        """Pinned memory."""
        signed, unsigned = ITEMS[item_bytes]
        tensor = torch.empty(tuple(shape), dtype=signed, pin_memory=True)
        return tensor, tensor.numpy().view(unsigned)

    def gather(
        self, blocks: torch.Tensor, ids: Sequence[int], out: torch.Tensor, after: torch.cuda.Event | None
    ) -> None:
        """Copy ``blocks[ids]`` into pinned memory."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream()):
            self._follow(after)
            out.copy_(blocks.index_select(0, self._index(ids)), non_blocking=True)
            self._finish()

    def scatter(self, given: torch.Tensor, blocks: torch.Tensor, ids: Sequence[int]) -> None:
        """Copy pinned memory to ``blocks[ids]``."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream()):
            self._follow(None)
            blocks.index_copy_(0, self._index(ids), given.to(self._device, non_blocking=True))
            self._finish()

    def _stream(self) -> torch.cuda.Stream:
        """This thread's."""
        stream: torch.cuda.Stream | None = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = torch.cuda.Stream(self._device)
        return stream

    def _follow(self, after: torch.cuda.Event | None) -> None:
        for event in (self._begun, after):
            if event is not None:
                self._stream().wait_event(event)

    def _index(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(self._device)

    def _finish(self) -> None:
        """Wait without keeping a core, nor the interpreter's lock."""
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream())
        done.synchronize()
