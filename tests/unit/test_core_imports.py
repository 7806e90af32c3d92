"""What cores import: other cores, and the vocabulary that all parts share. No shell, whatever its name."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import kvrelay

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(kvrelay.__file__).parent
VOCABULARY = ("errors", "hosts", "profiles", "settings", "sizes", "types", "wire")
OUTSIDE = {"msgspec", "pydantic", "xxhash"}
COMPILED = "kvrelay.native"
"""Whether a core's own table was compiled: reads the environment, once, as it is imported."""
MAY_BE_COMPILED = {"kvrelay.pool.core.catalog", "kvrelay.router.core.events"}


def cores() -> Iterator[tuple[str, Path]]:
    for file in sorted(ROOT.rglob("*.py")):
        *packages, name = file.relative_to(ROOT).with_suffix("").parts
        if "core" in packages and packages[0] != "testing":
            yield ".".join(["kvrelay", *packages, *([] if name == "__init__" else [name])]), file


def imported(file: Path) -> Iterator[str]:
    """Every module a file imports, for its types as well."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0, f"{file}: imports are absolute"
            for alias in node.names:
                inner = ROOT.parent / Path(*node.module.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def may_import(core: str, module: str) -> bool:
    top, *rest = module.split(".")
    if top != "kvrelay":
        return top in sys.stdlib_module_names or top in OUTSIDE
    if module == COMPILED:
        return core in MAY_BE_COMPILED
    return rest[0] in VOCABULARY or "core" in rest


def test_cores_import_cores_and_shared_vocabulary_only() -> None:
    found = [(core, module) for core, file in cores() for module in imported(file)]
    assert len({core for core, _ in found}) > 100  # it looked at them all
    assert [f"{core} imports {module}" for core, module in found if not may_import(core, module)] == []


def test_a_shell_is_told_from_a_core() -> None:
    assert may_import("kvrelay.pool.core.pool", "kvrelay.wire.messages")
    assert may_import("kvrelay.pool.core.tiering", "kvrelay.pool.tiers.core.tier")
    assert not may_import("kvrelay.pool.core.tiering", "kvrelay.pool.tiers.guard")
    assert not may_import("kvrelay.pool.core.pool", "kvrelay.transport.address")
    assert not may_import("kvrelay.pool.core.pool", "kvrelay.native")
    assert not may_import("kvrelay.pool.core.pool", "uvloop")
