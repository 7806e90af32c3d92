"""Where the pool's token comes from."""

from __future__ import annotations

import os
from pathlib import Path

from kvrelay.errors import ConfigError

TOKEN_VARIABLE = "KVRELAY_POOL_TOKEN"  # noqa: S105 - the variable's name


def read_token(file: str | None, variable: str = TOKEN_VARIABLE) -> str | None:
    """Take the token from ``file``, else from the environment's ``variable``, else None.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    if file is None:
        return os.environ.get(variable) or None
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"token file {file!r} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"token file {file!r} is empty")
    return token
