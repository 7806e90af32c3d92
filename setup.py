"""The native module. It is optional: where it cannot be compiled, kvrelay installs and runs without it."""

from __future__ import annotations

import zlib
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("src/native")
INTERFACE = Path("src/kvrelay/_native.pyi")

setup(
    ext_modules=[
        Extension(
            "kvrelay._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=[str(INTERFACE), *sorted(str(path) for path in SOURCES.glob("*.h"))],
            define_macros=[("KVRELAY_INTERFACE", str(zlib.crc32(INTERFACE.read_bytes())))],
            extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
