"""Where the connector may import vLLM, so that what differs between its versions stays in one file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvrelay.connector

PACKAGE = Path(kvrelay.connector.__file__).parent
INTERFACE = "vllm.distributed.kv_transfer.kv_connector"
"""What vLLM offers connectors."""
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def _run_imports(node: ast.AST) -> Iterator[str]:
    """Modules imported when the code runs: those for type checkers alone are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom):
            yield child.module or ""
        elif isinstance(child, ast.Import):
            yield from (name.name for name in child.names)
        yield from _run_imports(child)


def _of_vllm(module: str) -> set[str]:
    names = _run_imports(ast.parse((PACKAGE / module).read_text()))
    return {name for name in names if name.split(".")[0] == "vllm"}


@pytest.mark.parametrize("module", [module for module in MODULES if module != "compat.py"])
def test_only_compat_imports_more_of_vllm_than_its_interface_for_connectors(module: str) -> None:
    assert {name for name in _of_vllm(module) if not name.startswith(INTERFACE)} == set()


def test_imports_of_vllm_are_seen() -> None:
    assert "vllm.version" in _of_vllm("compat.py")
    assert any(name.startswith(INTERFACE) for name in _of_vllm("vllm.py"))
