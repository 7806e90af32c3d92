"""What engines hold in their KV caches, by their own word: vLLM's KV cache events, made an index of prefixes."""
