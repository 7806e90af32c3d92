"""The native module. It is optional: where it cannot be compiled, kvrelay installs and runs without it."""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("src/native")

setup(
    ext_modules=[
        Extension(
            "kvrelay._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
