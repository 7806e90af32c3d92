"""The OpenAI-compatible prefill/decode router."""
