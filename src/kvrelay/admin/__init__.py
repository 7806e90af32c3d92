"""What admin HTTP APIs share: a server in a thread of its own, a bridge into the working loop, errors, the token."""
