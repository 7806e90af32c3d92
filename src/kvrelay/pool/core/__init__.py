"""The pool's decisions: index, allocation, leases, tickets, eviction. No I/O."""
