"""What holds for every command."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from kvrelay import cli

if TYPE_CHECKING:
    import pytest


def test_output_nobody_reads_ends_the_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvrelay", "config", "show", "some/model"],
            stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


def test_ctrl_c_while_a_command_is_still_being_imported_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert cli.main(["pool", "serve"]) == 130


def test_the_version_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvrelay", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "kvrelay 0.1.0\n")
