"""The shared folder's connector, where the original answers below zero."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's dependencies
]


@pytest.mark.parametrize(
    ("prompt_tokens", "computed", "found"), [(1, 0, 0), (2, 0, 0), (66, 0, 64), (66, 32, 32), (65, 64, 0)]
)
def test_no_number_below_zero_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch, prompt_tokens: int, computed: int, found: int
) -> None:
    from types import SimpleNamespace

    from kvrelay.connector.shared_storage import SharedStorageConnector

    connector: Any = object.__new__(SharedStorageConnector)
    connector._block_size = 32
    monkeypatch.setattr(SharedStorageConnector, "_found_match_for_request", lambda *_: True)
    request: Any = SimpleNamespace(prompt_token_ids=[7] * prompt_tokens)
    assert connector.get_num_new_matched_tokens(request, computed) == (found, False)
