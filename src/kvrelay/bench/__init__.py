"""What benchmarks share: interleaving, statistics, the record of host and commit."""
