"""What users import from `kvrelay.client`, and that the documents send them nowhere else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kvrelay.client

ROOT = Path(__file__).parents[3]
PUBLIC = {"kvrelay.client", "kvrelay.client.infinistore", "kvrelay.errors"}
HARNESS = ("kvrelay.testing", "kvrelay.transport.address")
"""A pool to try the client with, and where it listens."""


def test_every_name_is_there() -> None:
    assert set(kvrelay.client.__all__) == set(kvrelay.client._HOMES) <= set(dir(kvrelay.client))
    for name in kvrelay.client.__all__:
        found = getattr(kvrelay.client, name)
        assert found.__name__ == name
        assert not isinstance(found, ModuleType)
    with pytest.raises(AttributeError, match="has no attribute 'Poolclient'"):
        _ = kvrelay.client.Poolclient


def test_a_core_that_is_imported_alone_pulls_in_no_shell() -> None:
    script = (
        "import sys, kvrelay.client.core.names, kvrelay.client.core.session;"
        "print(*(name for name in sys.modules if name.startswith('kvrelay.client.') and '.core' not in name))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


def imported(text: str) -> set[str]:
    """Modules of kvrelay that a text imports, or names with a class behind them."""
    lines = re.findall(r"^ *from (kvrelay[\w.]*) import ([\w, ]+)", text, re.MULTILINE)
    modules = {f"{module}.{names}" if names == "infinistore" else module for module, names in lines}
    return modules | set(re.findall(r"`(kvrelay(?:\.[a-z_]+)+)\.[A-Z]\w+", text))


def test_pages_for_users_of_the_client_name_nothing_deeper() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "client.md", *ROOT.glob("examples/**/*.py")):
        deeper = {name for name in imported(page.read_text(encoding="utf-8")) if not name.startswith(HARNESS)} - PUBLIC
        assert deeper == set(), page
