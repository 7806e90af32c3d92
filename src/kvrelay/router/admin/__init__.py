"""The router's admin HTTP API, in a thread of its own, which hands over to the router's loop."""
