"""vLLM's ExampleConnector, once SharedStorageConnector, without what kills an engine on a prompt of one token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

if TYPE_CHECKING:
    from vllm.v1.request import Request


class SharedStorageConnector(ExampleConnector):  # type: ignore[misc]
    """KV as files in a folder that all engines see."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What the folder has beyond the engine's own.

        For a prompt of one token, and for one of which the engine itself has more, the original's arithmetic comes out
        below zero, and vLLM computes at positions that are none.
        """
        found, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return max(found, 0), asynchronous
