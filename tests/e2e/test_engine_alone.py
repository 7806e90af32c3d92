"""One engine started by hand: without its pool, with a pool that comes later, and what a changed weight means."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

import httpx
import pytest
from asking import completion, eventually, tokens

from kvrelay.client.blocking import PoolClient
from kvrelay.identity.core.chunks import chain_seed, prompt_chunks
from kvrelay.identity.core.namespace import namespace
from kvrelay.identity.digests import DigestCache
from kvrelay.identity.weights import weights_identity
from kvrelay.launch.host import free_ports
from kvrelay.testing.models import change_one_weight
from kvrelay.testing.pool import pool_process
from kvrelay.testing.resting import environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

START_S = 300.0
PROMPT = tokens(300, "alone")


@contextmanager
def engine(model: Path, pool: str, log: Path) -> Iterator[str]:
    """A vLLM server with kvrelay's connector, as the README starts one; its URL."""
    (port,) = free_ports(1, taken=set())
    transfer = {
        "kv_connector": "KvRelayConnector", "kv_connector_module_path": "kvrelay.connector.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"pool": pool, "engine": "E0"},
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager",
        "--block-size", "32", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(256 << 20),
        "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    guarded = [sys.executable, "-m", "kvrelay.launch.guard", "10", "--", *command]  # ends with its standard input
    with (
        log.open("wb") as output,
        subprocess.Popen(
            guarded, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=output, env=environment()
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: _healthy(url), bool, f"engine; see {log}", within_s=START_S)
            yield url
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        time.sleep(0.2)
        return False


@pytest.mark.timeout(600)
def test_an_engine_without_its_pool_serves_undelayed_and_uses_the_pool_once_it_is_there(
    tmp_path: Path, tiny_model: Path, reference: RunningStack
) -> None:
    address = f"unix:{tmp_path / 'pool.sock'}"
    with engine(tiny_model, address, tmp_path / "engine.log") as url:
        question = completion("tiny", PROMPT)
        for base, model in ((reference.base_url, reference.model_name), (url, "tiny")):
            warm_up = completion(model, tokens(300, "warm-up"))
            httpx.post(f"{base}/v1/completions", json=warm_up.body, timeout=60)
        plain = httpx.post(
            f"{reference.base_url}/v1/completions", json={**question.body, "model": reference.model_name}, timeout=60
        )
        took = []
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/completions", json=question.body, timeout=60)
            assert answer.json()["choices"][0]["token_ids"] == plain.json()["choices"][0]["token_ids"]
            took.append(answer.elapsed.total_seconds())
        assert median(took) < 2 * plain.elapsed.total_seconds() + 1.0, (
            f"a pool that is not there delays requests: {took}"
        )
        with pool_process(tmp_path) as pool, PoolClient.connect(pool.unix, name="test") as client:
            eventually(client.engines, lambda engines: [e.engine for e in engines] == ["E0"], "engine at the pool")
            eventually(lambda: client.stat()["connections"], lambda count: count == 6, "its saver and loaders")
            httpx.post(f"{url}/v1/completions", json=question.body, timeout=60)
            (facts,) = (e.facts for e in client.engines())
            keys = [chunk.key for chunk in prompt_chunks(chain_seed(namespace(facts)), PROMPT, 64)]
            assert len(keys) == 5
            eventually(lambda: client.exists(keys), all, "every chunk of the prompt in the pool")

            # The same engine, but for one weight: nothing of this is its own.
            cache = DigestCache(tmp_path / "digests.json")
            assert facts["weights"] == weights_identity(str(tiny_model), cache)
            changed = change_one_weight(tiny_model, tmp_path / "changed")
            other = namespace({**facts, "weights": weights_identity(str(changed), cache)})
            assert client.exists([chunk.key for chunk in prompt_chunks(chain_seed(other), PROMPT, 64)]) == [False] * 5
