"""The router as a command: tests that block, without an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvrelay.testing.router_processes import Processes

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def no_blocking() -> None:
    """Blocking is right here."""


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Start routers and fake engines as processes; they end with the test."""
    started = Processes()
    yield started
    started.close()
