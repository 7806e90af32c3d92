"""The pool's wire protocol, sans-IO: frames, messages, limits."""
