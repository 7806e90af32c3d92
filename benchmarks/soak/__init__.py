"""The parts of `soak_pool.py`: what objects contain, what a client does, a process of clients, and the final check."""
