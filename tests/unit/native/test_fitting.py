"""A native module that was built for other Python code is not used."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import ModuleType

import pytest

import kvrelay.native
from kvrelay.native import fits, native


def module_of(interface: int | None) -> ModuleType:
    module = ModuleType("_native")
    if interface is not None:
        vars(module)["INTERFACE"] = interface
    return module


def test_a_module_fits_the_stub_it_was_built_from_and_no_other() -> None:
    assert fits(module_of(zlib.crc32(b"def f() -> None: ...")), b"def f() -> None: ...")
    assert not fits(module_of(zlib.crc32(b"def f() -> None: ...")), b"def f() -> int: ...")
    assert not fits(module_of(None), b"")


@pytest.mark.skipif(native is None, reason="no native module here")
def test_the_module_in_use_fits() -> None:
    assert native is not None
    assert fits(native, Path(kvrelay.native.__file__).with_name("_native.pyi").read_bytes())
