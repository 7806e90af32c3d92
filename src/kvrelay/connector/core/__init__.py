"""The connector's decisions, without vLLM, torch or I/O."""
