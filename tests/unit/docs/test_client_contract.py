"""docs/client.md: its methods are those of both clients, and every promise names a test that there is."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.client.blocking import PoolClient
from kvrelay.client.core import blocks
from kvrelay.client.core.handshake import TRANSPORTS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.docs.conftest import Tables

BLOCKING_ONLY = {"start"}
WATCHING = {"fileno"}
"""For whoever watches the socket; told in its docstring."""


def methods(client: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(client, callable) if not name.startswith("_")}


def test_every_method_of_the_clients_is_told(tables: Tables) -> None:
    told = {name.partition("(")[0] for name in tables.names("docs/client.md", "Methods")}
    assert told == methods(AsyncPoolClient) - WATCHING
    assert methods(PoolClient) == told | BLOCKING_ONLY | WATCHING


def test_both_clients_take_the_same_arguments() -> None:
    for name in methods(AsyncPoolClient) - {"connect"}:
        assert inspect.signature(getattr(PoolClient, name)) == inspect.signature(getattr(AsyncPoolClient, name)), name
    assert inspect.signature(PoolClient.connect).parameters == inspect.signature(AsyncPoolClient.connect).parameters


def test_every_promise_is_held_by_a_test(root: Path, tables: Tables) -> None:
    there = {
        name
        for file in (root / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    rows = tables.rows("docs/client.md", "The contract")
    assert rows
    for promise, test in rows:
        assert test.strip("`") in there, promise


def test_transports_and_batches_are_those_of_the_code(tables: Tables, pages: dict[str, str]) -> None:
    told = [row[0].strip("`") for row in tables.rows("docs/client.md", "How the bytes travel")]
    assert ["auto", *told] == list(TRANSPORTS)
    assert f"{blocks.BATCH_KEYS:,} keys or {blocks.BATCH_BYTES >> 20} MiB" in pages["docs/client.md"]
