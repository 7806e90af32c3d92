"""Which object to evict next: policies to choose from by measurement (`benchmarks/bench_eviction.py`).

All are of one size here: objects of a pool that serves one model are. A policy knows objects by numbers and holds no
object itself.
"""

from eviction_bench.policies.base import Policy

__all__ = ["Policy"]
