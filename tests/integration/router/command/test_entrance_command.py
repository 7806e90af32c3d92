"""``kvrelay router serve`` with keys and TLS, as processes."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import time
from typing import TYPE_CHECKING

import pytest

from kvrelay.router.core.admission.keys import ID_BYTES, SALT_BYTES, SECRET_BYTES, hash_secret, make_secret
from kvrelay.testing.certificates import Authority
from kvrelay.testing.router_processes import WAIT_S, children

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.testing.router_processes import Processes


def make_key(file: Path, name: str) -> str:
    secret = make_secret(os.urandom(ID_BYTES), os.urandom(SECRET_BYTES))
    with file.open("a") as out:
        out.write(f'[[keys]]\nname = "{name}"\nhash = "{hash_secret(secret, os.urandom(SALT_BYTES))}"\n')
    return secret


def status(port: int, context: ssl.SSLContext, secret: str) -> int:
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=WAIT_S)
    try:
        headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        connection.request("POST", "/v1/completions", b'{"prompt":"a","max_tokens":1}', headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_keys_and_certificates_are_asked_for_and_read_again(processes: Processes, tmp_path: Path, workers: str) -> None:
    authority, keys = Authority(tmp_path), tmp_path / "keys.toml"
    pair = authority.server("localhost")
    first = make_key(keys, "first")
    process, url = processes.router(
        "--keys-file", str(keys), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--workers", workers,
        "--max-concurrent", "4",
    )  # fmt: skip
    port, context = int(url.rpartition(":")[2]), ssl.create_default_context(cafile=str(authority.ca))
    assert status(port, context, first) == 200
    second = make_key(keys, "second")
    assert status(port, context, second) == 401
    process.send_signal(signal.SIGHUP)
    deadline, row = time.monotonic() + WAIT_S, 0
    while row < 10:  # connections go to any worker
        row = row + 1 if status(port, context, second) == 200 else 0
        assert time.monotonic() < deadline, "the new key is not known"
    process.terminate()
    _, said = process.communicate(timeout=WAIT_S)
    assert "keys and certificates have been read again" in said
    assert first not in said
    assert "can be reached" not in said
    assert process.returncode == 0


def test_a_worker_that_takes_anothers_place_knows_the_keys_of_today(processes: Processes, tmp_path: Path) -> None:
    """1. A key is withdrawn, and all workers know. 2. They crash, and others are started. 3. It is still withdrawn."""
    authority, keys = Authority(tmp_path), tmp_path / "keys.toml"
    pair = authority.server("localhost")
    withdrawn = make_key(keys, "withdrawn")
    process, url = processes.router(
        "--keys-file", str(keys), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--workers", "2"
    )
    port, context = int(url.rpartition(":")[2]), ssl.create_default_context(cafile=str(authority.ca))
    assert status(port, context, withdrawn) == 200
    keys.unlink()
    kept = make_key(keys, "kept")
    workers = children(process)
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while len(children(process) - workers) < 2:
        assert time.monotonic() < deadline, "no others are started"
        time.sleep(0.05)
    for _ in range(10):
        assert status(port, context, kept) == 200
        assert status(port, context, withdrawn) == 401


def test_who_listens_for_others_without_keys_or_tls_is_warned(processes: Processes) -> None:
    process, _ = processes.serve("--host", "0.0.0.0")
    process.terminate()
    assert "0.0.0.0 can be reached from other machines" in process.communicate(timeout=WAIT_S)[1]
