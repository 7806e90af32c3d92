from __future__ import annotations

import pytest

from kvrelay.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("512 MiB", 512 << 20),
        ("1.5g", 3 << 29),
        ("2GB", 2_000_000_000),
        ("1024", 1024),
        ("7b", 7),
        (str(2**59 + 1), 2**59 + 1),
    ],
)
def test_sizes_are_read_in_the_usual_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4 parsecs", "1e9", "9" * 400])
def test_an_unreadable_size_names_the_legal_forms(text: str) -> None:
    with pytest.raises(ValueError, match="such as 512MiB, 4GiB or 1073741824"):
        parse_size(text)


def test_sizes_are_shown_in_the_largest_unit_that_fits() -> None:
    assert [format_size(size) for size in (5, 2048, 3 << 29)] == ["5 B", "2 KiB", "1.5 GiB"]
