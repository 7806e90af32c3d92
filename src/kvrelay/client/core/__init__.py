"""The client protocol without I/O."""
