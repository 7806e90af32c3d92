"""The KV memory pool server."""
