"""The parts of `bench_eviction.py`."""
