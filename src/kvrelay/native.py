"""The native module, `kvrelay._native`, where it was built and is wanted; everything works without it, slower.

``KVRELAY_PURE=1`` in the environment switches it off. ``python -m kvrelay.native`` says which it is. A module that was
built for other Python code than lies here, as after `git pull`, is not used.
"""

from __future__ import annotations

import importlib
import logging
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

PURE_VARIABLE = "KVRELAY_PURE"


def _load() -> ModuleType | None:
    if os.environ.get(PURE_VARIABLE) == "1":
        return None
    try:
        module = importlib.import_module("kvrelay._native")
    except ImportError:
        return None
    stub = Path(__file__).with_name("_native.pyi")
    if stub.exists() and not fits(module, stub.read_bytes()):
        logging.getLogger(__name__).warning(
            "kvrelay: the native module was built for another version of kvrelay and is not used: copies are slower. "
            "Build it again (make setup-dev, or pip install)"
        )
        return None
    return module


def fits(module: ModuleType, stub: bytes) -> bool:
    """Whether the module has the interface that ``stub``, its `.pyi` file, tells of."""
    return getattr(module, "INTERFACE", None) == zlib.crc32(stub)


native = _load()
"""The module, or None."""

if __name__ == "__main__":
    print(  # noqa: T201 - this is a command
        "kvrelay: pure Python. The native module was not built or is switched off (KVRELAY_PURE): copies are slower"
        if native is None
        else f"kvrelay: native module in use ({native.KERNELS[0]})"
    )
