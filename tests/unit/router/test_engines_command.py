"""`kvrelay router engines`, in front of an admin API that is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrelay.cli import build_parser, router_engines
from kvrelay.errors import NotFoundError

if TYPE_CHECKING:
    import pytest


def test_an_engine_that_leaves_while_its_drain_is_waited_for_has_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(_url: str, _token: str | None, method: str, _path: str, *_: object, **__: object) -> dict[str, Any]:
        if method == "GET":
            raise NotFoundError("no engine D0")
        return {}

    monkeypatch.setattr(router_engines, "ask", ask)
    args = build_parser().parse_args(["router", "engines", "drain", "D0", "--wait", "5"])
    assert args.run(args) == 0
    assert capsys.readouterr().out == "D0 has left\n"
