"""The router's entrance: who may come in, over what, how many at once and how often."""
