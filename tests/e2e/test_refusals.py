"""What cannot work is refused at the start, in a line that names the thing and the mend."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kvrelay.errors import KvRelayError
from kvrelay.testing.architectures import build_tiny_granite

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack


PAIRS = [
    (["--decode-dtype", "bfloat16"], ["P0", "D0", "float32", "bfloat16"]),
    (["--prefill-args=--kv-cache-dtype fp8"], ["P0", "D0", "fp8_e4m3", "float32"]),
]
"""Flags of a pair that cannot, and the words that name why."""


def test_engines_that_cannot_exchange_kv_do_not_get_to_serve(start_stack: Callable[..., RunningStack]) -> None:
    with ThreadPoolExecutor(len(PAIRS)) as threads:  # all at once: starts take long, most of it on one core
        starts = [threads.submit(start_stack, "--prefill", "1", "--decode", "1", *flags) for flags, _ in PAIRS]
        failed = [start.exception() for start in starts]
    for error, (flags, named) in zip(failed, PAIRS, strict=True):
        assert isinstance(error, KvRelayError), flags
        told = [line for line in str(error).splitlines() if all(word in line for word in named)]
        assert told, str(error)


@pytest.mark.matrix
def test_mamba_layers_are_refused_by_name(start_stack: Callable[..., RunningStack], tmp_path: Path) -> None:
    granite = build_tiny_granite(tmp_path / "granite", seed=1)
    with pytest.raises(KvRelayError) as failed:
        start_stack("--prefill", "1", "--decode", "1", model=granite)
    refused = "kvrelay refuses to start: KV cache of kind mamba layers (vLLM tells no connector when their state"
    assert refused in str(failed.value), str(failed.value)
