"""Hosts as addresses name them."""

from __future__ import annotations

import ipaddress


def in_address(host: str) -> str:
    """``host`` as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there: names other than ``localhost`` may be anybody's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
