"""docs/connector-contract.md: every clause names a test that there is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.docs.conftest import Tables

METHODS = {
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "handle_preemptions",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "shutdown",
    "get_kv_connector_stats",
    "requires_kv_delivery",
    "requires_piecewise_for_cudagraph",
}
"""Of vLLM's base class: each has a clause."""


def test_every_clause_is_held_by_a_test(root: Path, tables: Tables) -> None:
    there = {
        name
        for file in (root / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    rows = tables.rows("docs/connector-contract.md", "Clauses")
    assert len(rows) > len(METHODS)
    for clause, source, does, test in rows:
        assert all((clause, source, does)), clause
        assert test.strip("`") in there, clause


def test_every_method_of_the_base_class_that_matters_has_a_clause(tables: Tables) -> None:
    assert METHODS - set(tables.names("docs/connector-contract.md", "Clauses", column=1)) == set()
