"""What cannot work is refused at the start, in a line that names the thing and the mend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvrelay.errors import KvRelayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.testing.stack import RunningStack


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--decode-dtype", "bfloat16"], ["P0", "D0", "float32", "bfloat16"]),
        (["--prefill-args=--kv-cache-dtype fp8"], ["P0", "D0", "fp8_e4m3", "float32"]),
    ],
)
def test_engines_that_cannot_exchange_kv_do_not_get_to_serve(
    start_stack: Callable[..., RunningStack], arguments: list[str], named: list[str]
) -> None:
    with pytest.raises(KvRelayError) as failed:
        start_stack("--prefill", "1", "--decode", "1", *arguments)
    told = [line for line in str(failed.value).splitlines() if all(word in line for word in named)]
    assert told, str(failed.value)
