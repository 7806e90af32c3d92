from __future__ import annotations

import pytest

from kvrelay.hosts import is_loopback
from kvrelay.router.core.admin import AdminSettings


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_what_only_this_machine_reaches_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    assert not list(AdminSettings(listen="as given").problems(host, None))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::12", "10.0.0.1", "127.0.0.1.example", "localhost.example", ""])
def test_what_others_may_reach_needs_one_however_it_begins(host: str) -> None:
    assert not is_loopback(host)
    assert list(AdminSettings(listen="as given").problems(host, None))
    assert not list(AdminSettings(listen="as given").problems(host, "token"))
