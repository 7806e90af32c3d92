"""The index of KV cache events beside what a real engine says it had in its cache, over evictions and a restart."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.launch.host import free_ports
from kvrelay.router.core.kv.index import KvIndex, Source
from kvrelay.router.core.kv.settings import Publisher
from kvrelay.router.kv.hub import KvHub
from kvrelay.router.kv.metrics import KvMetrics
from kvrelay.testing.stack import RunningStack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK = 32
START_S = 400.0
ROUNDS = 40


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(0.02)


class Engine:
    """A plain engine whose cache holds some 4,000 tokens, and an index that listens to it."""

    def __init__(self, stack: RunningStack, hub: KvHub) -> None:
        self.stack = stack
        self.hub = hub

    def known(self, prompt: list[int]) -> int:
        """Tokens that the engine has of a prompt, by the index."""
        return self.hub.index.cached(prompt).get("D0", 0)

    async def ask(self, prompt: list[int]) -> int:
        """Tokens that the engine had of a prompt, by its own word."""
        body = {"model": self.stack.model_name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        async with httpx.AsyncClient(timeout=120) as client:
            answer = await client.post(f"{self.stack.base_url}/v1/completions", json=body)
        usage = answer.raise_for_status().json()["usage"]
        await until(lambda: self.known(prompt) == (len(prompt) - 1) // BLOCK * BLOCK)
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


@pytest.mark.matrix
async def test_the_index_agrees_with_the_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run_dir = tmp_path_factory.mktemp("kv")
    sockets = [f"ipc://{run_dir}/{name}" for name in ("pub", "replay")]
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": sockets[0], "replay_endpoint": sockets[1]}
    (port,) = free_ports(1, taken=set())
    arguments = [
        "--connector", "none", "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-model-len",
        "2048", "--kv-cache-memory", "8MiB", "--on-exit", "wait", "--port", str(port),
        f"--engine-args=--enable-prompt-tokens-details --kv-events-config '{json.dumps(config)}'",
    ]  # fmt: skip
    rng = random.Random(3)
    bases = [[rng.randrange(10, 2000) for _ in range(900)] for _ in range(6)]
    hub = KvHub(KvIndex(seed=1), KvMetrics(CollectorRegistry()))
    with RunningStack(tiny_model, run_dir / "run", arguments) as stack:
        await asyncio.to_thread(stack.wait_ready, START_S)
        hub.start((Publisher("D0", 0, *sockets),))
        try:
            engine = Engine(stack, hub)
            found = []
            for _ in range(ROUNDS):
                prompt = rng.choice(bases)[: rng.randrange(40, 900)]
                prompt = prompt + [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 80))]
                expected = engine.known(prompt)
                found.append((expected, await engine.ask(prompt)))
            assert [actual for _, actual in found] == [expected for expected, _ in found]
            assert sum(expected > 0 for expected, _ in found) > ROUNDS / 4
            removed = hub.index.count(Source("D0")).removed
            assert removed > 0, "the cache was never full"
            prompt = bases[0][:500]
            await engine.ask(prompt)
            stack.kill("D0")
            await asyncio.to_thread(stack.revive, START_S)
            await until(lambda: engine.known(prompt) == 0)
            assert await engine.ask(prompt) == 0
        finally:
            await hub.close()


@pytest.mark.matrix
def test_data_parallel_ranks_of_a_started_engine_are_listened_to(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (port,) = free_ports(1, taken=set())
    arguments = [
        "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "2048",
        "--kv-cache-memory", "64MiB", "--pool-size", "256MiB", "--decode-data-parallel-size", "2",
        "--router-decode-policy", "kv-aware", "--router-token-ids", "off", "--port", str(port),
    ]  # fmt: skip
    rng = random.Random(4)

    def shown(name: str) -> dict[str, float]:
        text = httpx.get(f"{stack.base_url}/metrics").text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return {sample.labels["rank"]: sample.value for sample in families[f"kvrelay_router_kv_{name}"].samples}

    with RunningStack(tiny_model, tmp_path_factory.mktemp("dp"), arguments) as stack:
        stack.wait_ready(START_S)
        deadline = time.monotonic() + 60
        while not (shown("events_up") == {"0": 1, "1": 1} and all(blocks >= 3 for blocks in shown("blocks").values())):
            assert time.monotonic() < deadline, (shown("events_up"), shown("blocks"))
            prompt = [rng.randrange(10, 2000) for _ in range(100)]
            asked = {"model": stack.model_name, "prompt": prompt, "max_tokens": 2}
            httpx.post(f"{stack.base_url}/v1/completions", json=asked, timeout=60).raise_for_status()
