"""What the engine asks of the connector's class itself, and that the guards of these tests see what they should."""

from __future__ import annotations

import json
import pickle
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.testing.bare_connector import BareScheduler, BareTransfers, BareWorker
from kvrelay.testing.contract_guard import SchedulerGuard, WorkerGuard
from kvrelay.testing.contract_world import ContractEngine, Shape
from kvrelay.testing.fake_worker import layer_name

if TYPE_CHECKING:
    from kvrelay.testing.paged_rank import PagedRank
    from kvrelay.testing.pool import PoolThread

PROMPT = list(range(60))


class Waits(BareScheduler):
    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int | None, bool]:
        return 0, True


class Hesitates(BareScheduler):
    asked = 0

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int | None, bool]:
        self.asked += 1
        return 10 + self.asked % 2, True


class Exaggerates(BareScheduler):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return request.num_prompt_tokens - num_computed_tokens + 1, True


class LeavesNothing(BareScheduler):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return request.num_prompt_tokens - num_computed_tokens, False


class Scribbles(BareScheduler):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        made = super().build_connector_meta(scheduler_output)
        scheduler_output.num_scheduled_tokens.clear()
        return made


class Steals(BareScheduler):
    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        request.prompt_token_ids.pop()


class Insists(BareScheduler):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished_all_groups(request, block_ids)
        return True, None


class Babbles(BareWorker):
    def get_transfer_results(self, finished_req_ids: set[str]) -> BareTransfers:
        said = super().get_transfer_results(finished_req_ids)
        return BareTransfers(said.finished_sending | {"a"}, said.finished_recving, said.failed_recving)


class Repeats(BareWorker):
    def get_block_ids_with_load_errors(self) -> set[int]:
        return {1}


class Rambles(BareWorker):
    def build_connector_worker_meta(self) -> Any:
        super().build_connector_worker_meta()
        return SimpleNamespace(report=bytes(1 << 20))


BROKEN = [
    (Waits, "(0, True)"),
    (Hesitates, "asking changed"),
    (Exaggerates, "more than the prompt has"),
    (LeavesNothing, "leaves nothing to compute"),
    (Scribbles, "changed what it was lent"),
    (Steals, "changed what it was lent"),
    (Insists, "blocks are kept for nothing"),
    (Babbles, "does not wait for"),
    (Repeats, "told twice"),
    (Rambles, "bytes of reports"),
]


@pytest.mark.parametrize(("broken", "told"), BROKEN, ids=[one.__name__ for one, _ in BROKEN])
def test_a_connector_that_breaks_the_contract_is_caught(broken: type, told: str, pool: PoolThread) -> None:
    class Engine(ContractEngine):
        def _connector(self) -> Any:
            kind = broken if issubclass(broken, BareScheduler) else BareScheduler
            return type("Guarded", (SchedulerGuard, kind), {})(self.side)

        def _worker(self, rank: PagedRank) -> Any:
            kind = broken if issubclass(broken, BareWorker) else BareWorker
            names = {layer_name(layer): at for at, layer in enumerate(rank.own_layers)}
            return type("Guarded", (WorkerGuard, kind), {})(rank.side, names)

    engine = Engine(pool.unix, f"E{broken.__name__}", random.Random(1), Shape(saves=broken is not Insists))
    try:
        with pytest.raises(AssertionError) as caught:
            live(engine)
        assert told in str(caught.value)
    finally:
        engine.close()


def live(engine: ContractEngine) -> None:
    """A request from its beginning to its end."""
    engine.add("a", PROMPT, 2)
    for _ in range(30):
        engine.step()
        if engine.scheduler.idle:
            return
    raise AssertionError("blocks are kept for nothing")


@pytest.fixture
def connector_class() -> Any:
    pytest.importorskip("vllm")
    from kvrelay.connector.vllm import KvRelayConnector

    return KvRelayConnector


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # of vLLM and what it imports
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_what_the_engine_asks_of_the_class_is_answered_on_purpose(connector_class: Any, role: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA, supports_hma

    from kvrelay.testing.fake_scheduler import Settings
    from kvrelay.testing.vllm_engine import WiredScheduler, engine_config

    side: Any = SimpleNamespace(sides=[SimpleNamespace(saving=False)])
    connector = WiredScheduler(engine_config(Settings(), role=role, stages=1), side)
    assert connector.requires_kv_delivery is False
    assert connector_class.requires_piecewise_for_cudagraph({}) is True
    assert supports_hma(connector_class)
    assert isinstance(connector, SupportsHMA)
    assert connector.get_finished_count() is None
    assert not connector.has_pending_push_work()
    side.sides.append(SimpleNamespace(saving=True))
    assert connector.has_pending_push_work()
    assert list(connector.take_events()) == []


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # of vLLM and what it imports
def test_statistics_are_plain_data(connector_class: Any) -> None:
    from kvrelay.testing.fake_scheduler import Settings
    from kvrelay.testing.vllm_engine import WiredScheduler, engine_config

    side: Any = SimpleNamespace()
    connector = WiredScheduler(engine_config(Settings(), role="kv_both", stages=1), side)
    assert connector.get_kv_connector_stats() is None
    connector._counters.add("saved_tokens", 3)
    stats: Any = connector.get_kv_connector_stats()
    assert pickle.loads(pickle.dumps(stats)).to_dict() == stats.to_dict()
    again = connector_class.build_kv_connector_stats(json.loads(json.dumps(stats.data)))
    assert again.aggregate(stats).reduce() == {"saved_tokens": 6}
    assert connector.get_kv_connector_stats() is None
