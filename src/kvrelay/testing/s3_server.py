"""An S3-compatible server for tests: moto's, as a process of its own that speaks HTTP on a free port."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

from kvrelay.launch.host import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 30.0
STOP_S = 10.0
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test-id", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1"}
"""What moto accepts: anything."""


class S3Server:
    """The server, with one ``bucket``. ``endpoint`` is its address."""

    bucket = "kvrelay"

    def __init__(self) -> None:
        (self.port,) = free_ports(1, taken=set())
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                self._create_bucket()
                return
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.stop()
                raise TimeoutError("moto's server did not start")
            time.sleep(0.05)

    def _create_bucket(self) -> None:
        request = urllib.request.Request(  # noqa: S310 (http, to ourselves)
            f"{self.endpoint}/{self.bucket}",
            method="PUT",
            headers={"Authorization": "AWS4-HMAC-SHA256 Credential=test-id/20300101/us-east-1/s3/aws4_request"},
        )
        with urllib.request.urlopen(request, timeout=5):  # noqa: S310 (as above)
            pass

    def restart(self) -> None:
        """Start it again after `stop`, at the same address and empty."""
        self._start()

    def stop(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait(STOP_S)


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server for the length of a ``with`` block."""
    server = S3Server()
    try:
        yield server
    finally:
        server.stop()
