"""What tiers decide without doing I/O: how fast, whether to try at all, what they count."""
