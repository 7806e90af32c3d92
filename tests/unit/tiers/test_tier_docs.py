"""The table of settings in docs/tiers.md says what the code takes."""

from __future__ import annotations

from pathlib import Path

from kvrelay.pool.tiers import config

DOCUMENT = Path(__file__).parents[3] / "docs" / "tiers.md"


def test_every_key_of_a_tier_is_described_for_the_kinds_that_take_it() -> None:
    rows = [line.strip("| ").split(" | ") for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    told = {row[0].strip("`"): row[1] for row in rows if len(row) == 4}
    kinds: dict[str, str] = dict.fromkeys(config._COMMON, "all")
    for kind, keys in config._FIELDS.items():
        for key in keys:
            kinds[key] = f"{kinds[key]}, {kind}" if key in kinds else kind
    assert told == kinds
