"""The vLLM KV connector: what to save and load, and how vLLM's paged KV maps to pool objects."""
