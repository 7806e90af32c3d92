"""What the documents point at is there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:src|tests|docs|examples|benchmarks|\.ci)/[\w./-]*)`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, made as code hosts make them."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(text)}


def test_every_relative_link_leads_somewhere(root: Path, pages: dict[str, str], prose: dict[str, str]) -> None:
    broken = []
    for page, text in prose.items():
        for target in LINK.findall(text):
            if target.startswith(("http://", "https://")):
                continue
            name, _, anchor = target.partition("#")
            file = ((root / page).parent / name).resolve() if name else root / page
            inside = str(file.relative_to(root))
            if not file.exists() or (anchor and anchor not in anchors(pages[inside])):
                broken.append(f"{page}: {target}")
    assert not broken


def test_every_path_named_in_code_font_exists(root: Path, prose: dict[str, str]) -> None:
    named = {(page, path) for page, text in prose.items() for path in PATH.findall(text)}
    assert named
    assert not [(page, path) for page, path in named if not (root / path).exists()]


def test_every_document_can_be_reached_from_the_readme(root: Path, prose: dict[str, str]) -> None:
    reached, fresh = set[str](), {"README.md"}
    while fresh:
        page = fresh.pop()
        reached.add(page)
        for target in LINK.findall(prose[page]):
            if target.startswith(("http://", "https://")):
                continue
            file = ((root / page).parent / target.partition("#")[0]).resolve()
            if file.suffix == ".md" and (inside := str(file.relative_to(root))) not in reached:
                fresh.add(inside)
    assert reached == set(prose)


def test_the_architecture_names_every_package(root: Path, pages: dict[str, str]) -> None:
    packages = {path.parent.name for path in root.glob("src/kvrelay/*/__init__.py")}
    assert not [name for name in packages if f"`src/kvrelay/{name}`" not in pages["docs/architecture.md"]]
