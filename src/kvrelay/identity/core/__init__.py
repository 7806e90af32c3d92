"""Namespaces and chunk keys, pure."""
