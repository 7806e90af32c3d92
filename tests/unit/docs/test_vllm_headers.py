"""The table of headers that engines read is what the installed vLLM's source says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.docs.conftest import Tables

READS = (
    re.compile(r'headers(?:_value)?\.get\(\s*"([^"]+)"'),
    re.compile(r'^[A-Z_]*HEADER[A-Z_]* = "([^"]+)"', re.MULTILINE),
)
LISTED = re.compile(r"^[A-Z_]*HEADERS = \[(.*)\]", re.MULTILINE)


@pytest.mark.vllm
def test_headers_that_vllm_reads(tables: Tables) -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    read: set[str] = set()
    for part in ("entrypoints", "tracing"):
        for file in (Path(spec.origin).parent / part).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            read |= {name.lower() for form in READS for name in form.findall(text)}
            read |= {name.lower() for names in LISTED.findall(text) for name in re.findall(r'"([^"]+)"', names)}
    assert set(tables.names("docs/router-observability.md", "What engines read", 0)) == read
