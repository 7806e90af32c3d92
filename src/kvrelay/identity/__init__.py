"""What a piece of KV cache is called: namespace, weights identity, chunk keys."""
