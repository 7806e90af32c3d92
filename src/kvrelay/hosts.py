"""Hosts as addresses name them."""


def in_address(host: str) -> str:
    """``host`` as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
