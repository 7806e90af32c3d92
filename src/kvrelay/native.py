"""The native module, `kvrelay._native`, where it was built and is wanted; everything works without it, slower.

``KVRELAY_PURE=1`` in the environment switches it off. ``python -m kvrelay.native`` says which it is.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def _load() -> ModuleType | None:
    if os.environ.get("KVRELAY_PURE") == "1":
        return None
    try:
        return importlib.import_module("kvrelay._native")
    except ImportError:
        return None


native = _load()
"""The module, or None."""

if __name__ == "__main__":
    print(  # noqa: T201 - this is a command
        "kvrelay: pure Python. The native module was not built or is switched off (KVRELAY_PURE): copies are slower"
        if native is None
        else f"kvrelay: native module in use ({native.KERNELS[0]})"
    )
