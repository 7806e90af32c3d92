"""Why some connectors are refused on CPUs: when one of these fails, vLLM has learnt it, and the profile may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's dependencies
]


def test_offloading_refuses_the_cpu_itself() -> None:
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    spec: Any = object.__new__(CPUOffloadingSpec)
    spec._worker = None
    with pytest.raises(Exception, match="CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"):
        spec.get_worker(None)


def test_mooncakes_connector_asks_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

    monkeypatch.setattr(mooncake_connector, "TransferEngine", object)  # as if the package were there
    monkeypatch.delattr(mooncake_connector.MooncakeConnectorWorker, "__del__", raising=False)  # of half an object
    config: Any = SimpleNamespace()
    with pytest.raises(RuntimeError, match="Cannot access accelerator device when none is available"):
        mooncake_connector.MooncakeConnectorWorker(config, "P0", config)


def test_mooncakes_store_saves_behind_a_cuda_event() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker

    worker: Any = object.__new__(MooncakeStoreWorker)
    worker._capacity_only, worker.can_put = False, True
    with pytest.raises(RuntimeError, match="Event"):
        worker.wait_for_save(SimpleNamespace(requests=[SimpleNamespace(can_save=True)]))
