"""What all tests stand on."""

from __future__ import annotations

import importlib.util
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from kvrelay.testing.s3_server import CREDENTIALS, S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator

settings.register_profile("kvrelay", deadline=None, print_blob=True)
settings.load_profile("kvrelay")


def pytest_configure() -> None:
    """Have Ctrl-C work in what tests start: a shell's background jobs ignore it, and their children with them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have no test pass for want of vLLM."""
    if item.get_closest_marker("vllm") is not None and importlib.util.find_spec("vllm") is None:
        pytest.fail(
            "vLLM is not installed: run `make setup`, or leave these tests out with -m 'not vllm'", pytrace=False
        )


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an object store, in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
