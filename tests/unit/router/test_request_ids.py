from __future__ import annotations

import re

from kvrelay.router.request_ids import RequestIds


def test_names_are_long_hexadecimal_and_never_given_twice() -> None:
    names = RequestIds()
    made = [names.make() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in made)
