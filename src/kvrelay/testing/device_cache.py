"""One layer's KV twice, of equal random bytes: on a device, and in host memory to compare it with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvrelay.connector.codec import find_codec
from kvrelay.connector.device import DeviceLayer, Mirrors
from kvrelay.connector.layout import BlockKind
from kvrelay.connector.pages import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.connector.device import Copies

BLOCKS, HEADS, BLOCK, DIMS = 12, 2, 32, 16
ORDERS = {"BHNC": (0, 1, 2, 3), "BNHC": (0, 2, 1, 3), "HBNC": (1, 0, 2, 3)}
"""Axes [B, H, N, C] in the order of memory, as vLLM's ``KVCacheLayout`` has them within a layer."""


class DeviceCache:
    """A layer of FlashAttention's arrangement."""

    def __init__(
        self,
        copies: Copies[Any],
        *,
        device: str = "cpu",
        order: str = "BHNC",
        item_bytes: int = 2,
        kernel_blocks: int = 1,
        native: bool = False,
    ) -> None:
        """``kernel_blocks``: in one block. ``native``: in native packing."""
        tokens = BLOCK // kernel_blocks
        codec = find_codec("FLASH_ATTN", "", block_tokens=tokens, head_size=DIMS, item_bytes=item_bytes)
        self.kind = BlockKind(codec, HEADS, tokens, 2 * DIMS, item_bytes, BLOCK, DIMS, native=native)
        self.copies = copies
        self.theirs = self._pages(order, kernel_blocks)
        self.tensor = self.theirs.to(device, copy=True)
        self.host = self.kind.layer(self.theirs.numpy().view(f"u{item_bytes}"))
        self.layer = self.make_layer()

    def _pages(self, order: str, kernel_blocks: int) -> torch.Tensor:
        sizes = (BLOCKS * kernel_blocks, HEADS, self.kind.kernel_tokens, 2 * DIMS)
        axes = ORDERS[order]
        shape = (*(sizes[axis] for axis in axes), self.kind.item_bytes)
        bits = np.random.default_rng(1).integers(0, 256, shape, "u1").view(f"i{self.kind.item_bytes}")[..., 0]
        return torch.from_numpy(bits.copy()).permute(*np.argsort(axes).tolist())

    def make_layer(self) -> DeviceLayer:
        """The layer on the device, with mirrors of its own."""
        return DeviceLayer(Mirrors(self.kind, self.copies), self.tensor)

    def room(self, spans: Sequence[Span]) -> list[bytearray]:
        """Where objects go."""
        return [bytearray(HEADS * self.host.segment_bytes(span.tokens)) for span in spans]

    @property
    def same(self) -> bool:
        """Whether both hold the same."""
        return bool(torch.equal(self.tensor.cpu(), self.theirs))


def prompt(tokens: int, chunk: int) -> list[Span]:
    """All objects of a prompt, from its blocks' first slot on."""
    return [Span.whole(min(chunk, tokens - at), at) for at in range(0, tokens, chunk)]
