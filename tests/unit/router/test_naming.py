from __future__ import annotations

import re

from kvrelay.router.naming import Names


def test_names_are_long_hexadecimal_and_never_given_twice() -> None:
    names = Names()
    made = [names.make() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in made)
