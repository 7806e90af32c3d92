"""The admin side of a pool: an HTTP API in a thread of its own, which hands over to the pool's loop."""
