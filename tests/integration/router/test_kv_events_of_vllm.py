"""A subscription to vLLM's own publisher, without an engine behind it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.launch.core.kv_events import engine_arguments, router_arguments
from kvrelay.router.core.kv.index import KvIndex, Source
from kvrelay.router.core.kv.settings import Publisher, parse_endpoints
from kvrelay.router.kv.hub import KvHub
from kvrelay.router.kv.metrics import KvMetrics

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]
PROMPT = list(range(100, 164))
D0 = Source("D0")


async def holds(hub: KvHub, blocks: int) -> None:
    async with asyncio.timeout(60):
        while hub.index.num_blocks(D0) != blocks:  # noqa: ASYNC110 - what changes is counted, not told
            await asyncio.sleep(0.01)


def test_data_parallel_ranks_publish_where_the_launcher_says() -> None:
    from vllm.distributed.kv_events import ZmqEventPublisher

    told = dict(zip(("flag", "config"), engine_arguments("/run/tcp", "D0"), strict=True))
    config = json.loads(told["config"])
    heard = router_arguments("/run/tcp", "D0", 3)[1::2]
    for rank, text in enumerate(heard):
        (where,) = parse_endpoints([text.removeprefix("D0=")])
        places = (config["endpoint"], config["replay_endpoint"])
        offset = [ZmqEventPublisher.offset_endpoint_port(place, rank) for place in places]
        assert [where.endpoint, where.replay] == offset
        assert ZmqEventPublisher._is_bind_endpoint(where.endpoint)


async def test_what_vllm_publishes_is_understood(tmp_path: Path) -> None:
    from vllm.distributed import kv_events as vllm

    def stored(tokens: list[int], names: list[bytes | int], parent: bytes | int | None = None, **more: Any) -> Any:
        return vllm.BlockStored(
            block_hashes=names, parent_block_hash=parent, token_ids=tokens, block_size=16, lora_id=None,
            medium=vllm.MEDIUM_GPU, lora_name=None, group_idx=0, kv_cache_spec_kind="full_attention", **more,
        )  # fmt: skip

    def publish(*events: Any) -> None:
        publisher.publish(vllm.KVEventBatch(ts=1.0, events=list(events)))

    endpoint, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    publisher = vllm.ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=replay, buffer_steps=100)
    hub = KvHub(KvIndex(), KvMetrics(CollectorRegistry()))
    try:
        publish(stored(PROMPT[:32], [b"a" * 32, b"b" * 32]))
        publish(stored(PROMPT[32:48], [b"c" * 32], b"b" * 32, extra_keys=[None]))
        hub.start((Publisher("D0", 0, endpoint, replay),))
        await holds(hub, 3)
        assert hub.index.cached([*PROMPT, 1]) == {"D0": 48}
        publish(stored(PROMPT[48:], [12345678901234567890], b"c" * 32))
        await holds(hub, 4)
        assert hub.index.cached([*PROMPT, 1]) == {"D0": 64}
        publish(vllm.BlockRemoved(block_hashes=[b"b" * 32], medium=vllm.MEDIUM_GPU, group_idx=0))
        await holds(hub, 3)
        assert hub.index.cached([*PROMPT, 1]) == {"D0": 16}
        publish(vllm.AllBlocksCleared())
        await holds(hub, 0)
    finally:
        await hub.close()
        await asyncio.to_thread(publisher.shutdown)
