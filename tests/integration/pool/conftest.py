from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvrelay.client.blocking import PoolClient

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def client(address: str) -> Iterator[PoolClient]:
    with PoolClient.connect(address, name="client") as connected:
        yield connected
