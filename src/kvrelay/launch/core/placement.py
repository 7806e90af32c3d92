"""Which cores and devices each engine gets."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def bind_cores(cores: Sequence[int], ranks: Sequence[int]) -> list[str]:
    """Cores for each engine in the notation of VLLM_CPU_OMP_THREADS_BIND: ranks are separated by ``|``.

    ``ranks``: ranks of each engine. With more cores than ranks, each rank gets an equal run of neighbouring cores, the
    remainder going to the first ones; otherwise ranks share single cores in rotation.
    """
    total = sum(ranks)
    if total >= len(cores):
        shares = [str(cores[rank % len(cores)]) for rank in range(total)]
    else:
        size, extra = divmod(len(cores), total)
        ends = [size * rank + min(rank, extra) for rank in range(total + 1)]
        shares = [",".join(map(str, cores[a:b])) for a, b in pairwise(ends)]
    return ["|".join(group) for group in _deal(shares, ranks)]


def give_devices(devices: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """Accelerators for each engine in the notation of CUDA_VISIBLE_DEVICES, one a rank.

    Raises `ConfigError` when there are too few: two engines on one accelerator would each claim its whole memory.
    """
    if sum(ranks) > len(devices):
        raise ConfigError(
            f"{sum(ranks)} accelerators are needed ({len(ranks)} engines of {', '.join(map(str, ranks))} ranks) but "
            f"{len(devices)} are visible; lower --prefill, --decode or --tensor-parallel-size"
        )
    return [",".join(group) for group in _deal(devices, ranks)]


def _deal(items: Sequence[str], counts: Sequence[int]) -> list[Sequence[str]]:
    dealt, position = [], 0
    for count in counts:
        dealt.append(items[position : position + count])
        position += count
    return dealt
