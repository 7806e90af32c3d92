"""The parts of `bench_allocator.py`."""
