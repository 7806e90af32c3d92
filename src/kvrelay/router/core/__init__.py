"""The router's decisions: preparation of the legs, policies, the life of a request. No I/O."""
