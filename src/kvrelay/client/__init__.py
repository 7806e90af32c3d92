"""Talk to a pool: one sans-IO core, an asyncio and a blocking shell."""
