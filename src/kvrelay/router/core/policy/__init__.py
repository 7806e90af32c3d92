"""Policies: which engine is asked next."""
