"""Our connector as one of several in vLLM's MultiConnector."""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's dependencies
]


def test_multi_connector_rebuilds_our_statistics_from_what_the_engine_sent() -> None:
    """The engine's process sends plain values; the server's process finds our class by name, or ends."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from kvrelay.connector.vllm import KvRelayConnector

    sent = {KvRelayConnector.__name__: {"loaded_tokens": 5}}
    rebuilt = MultiConnector.build_kv_connector_stats(sent)
    assert rebuilt.reduce() == {KvRelayConnector.__name__: {"loaded_tokens": 5}}
