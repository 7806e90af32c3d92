"""Why an address cannot be listened on, and what to do about it."""

from __future__ import annotations

import errno


def listening_problem(host: str, port: int, error: OSError) -> str:
    """One sentence."""
    if error.errno == errno.EADDRINUSE:
        who = f"`ss -ltnp 'sport = :{port}'`"
        return f"port {port} on {host} is in use: stop what listens there ({who}) or choose another --port"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"port {port} on {host} may not be listened on by this user: choose a --port above 1023"
    return f"--host {host} --port {port} cannot be listened on: {error.strerror or error}"
