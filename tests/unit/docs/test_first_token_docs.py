"""The page on the first token names every outcome there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.first_token import SkipReason

if TYPE_CHECKING:
    from tests.unit.docs.conftest import Tables


def test_outcomes_of_first_tokens(tables: Tables) -> None:
    rows = tables.rows("docs/router-first-token.md", "First token from P")
    assert [row[0].strip("`") for row in rows] == ["prefill", *(str(against) for against in SkipReason)]
