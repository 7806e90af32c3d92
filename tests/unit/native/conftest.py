"""The native module and its twin in Python: the same tests for both."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

import pytest

from kvrelay.transport import pure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from kvrelay import _native
    from kvrelay.transport.copying import Copies

    _is_typed: tuple[Copies, ...] = (pure, _native)

try:
    native: ModuleType | None = importlib.import_module("kvrelay._native")
except ImportError:
    native = None

KERNELS: tuple[str, ...] = () if native is None else native.KERNELS


@pytest.fixture(params=["pure", *(f"native-{kernel}" for kernel in KERNELS)])
def copies(request: pytest.FixtureRequest) -> Iterator[Copies]:
    """Every implementation there is on this machine."""
    if request.param == "pure":
        yield pure
        return
    assert native is not None
    native.use_kernel(request.param.removeprefix("native-"))
    yield cast("Copies", native)
    native.use_kernel(KERNELS[0])
