"""The project's documents as tests see them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def pages() -> dict[str, str]:
    """Every document, by its path from the repository's root."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in sorted(files)}


@pytest.fixture(scope="session")
def blocks(pages: dict[str, str]) -> list[tuple[str, str, str]]:
    """Every fenced block: (page, what stands behind the opening fence, text)."""
    fence = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
    return [(page, match[2].strip(), match[3]) for page, text in pages.items() for match in fence.finditer(text)]


@pytest.fixture(scope="session")
def prose(pages: dict[str, str]) -> dict[str, str]:
    """The documents without their fenced blocks."""
    return {page: re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL) for page, text in pages.items()}


class Tables:
    """Tables of the documents."""

    def __init__(self, prose: dict[str, str]) -> None:
        self._prose = prose

    def rows(self, page: str, heading: str) -> list[list[str]]:
        """Cells of every row of the tables under a heading, header rows left out."""
        sections = re.split(r"^#+ ", self._prose[page], flags=re.MULTILINE)
        (section,) = [text for text in sections if text.partition("\n")[0] == heading]
        lines = [line for line in section.splitlines() if line.startswith("|")]
        rules = {number for number, line in enumerate(lines) if set(line) <= set("|- ")}
        assert rules, f"no table under {heading!r} in {page}"
        data = [line for number, line in enumerate(lines) if not {number, number + 1} & rules]
        return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in data]

    def names(self, page: str, heading: str, column: int = 0) -> list[str]:
        """Everything in backticks in one column of the tables under a heading."""
        return [name for row in self.rows(page, heading) for name in re.findall(r"`([^`]+)`", row[column])]


@pytest.fixture(scope="session")
def tables(prose: dict[str, str]) -> Tables:
    """Look tables up by page and heading."""
    return Tables(prose)
