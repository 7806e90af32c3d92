"""What engines say of their KV caches, and what is needed to use it: subscriptions, and token ids of requests."""
