"""The parts of `bench_pool.py`: peers, floors and one module a section."""
