"""The differential suite: seeded requests over every parameter, for one vLLM and for the same through the router."""
