"""The file of API keys, and what its keys have used of their limits."""

from __future__ import annotations

import asyncio
import tomllib
from typing import TYPE_CHECKING

import msgspec

from kvrelay.errors import ConfigError
from kvrelay.router.core.admission.accounts import Account, Accounts
from kvrelay.router.core.admission.keys import read_keys, undivided
from kvrelay.router.core.answers import Refusal
from kvrelay.router.http.messages import find

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.router.core.admission.keys import KeyRing
    from kvrelay.router.http.messages import Headers

_MISSING = Refusal(
    401, "missing_api_key", "No API key was given: send it as Authorization: Bearer KEY", "invalid_request_error"
)
_WRONG = Refusal(401, "invalid_api_key", "The API key is not known here", "invalid_request_error")
_EXPIRED = Refusal(401, "invalid_api_key", "The API key has expired", "invalid_request_error")


def read_key_file(path: Path, workers: int = 1) -> KeyRing:
    """Read keys, for so many ``workers``: JSON where the name ends in ``.json``, TOML otherwise.

    Raises:
        ConfigError: with everything that is wrong with the file.
    """
    where = f"'{path}'"
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        said = msgspec.json.decode(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    ring = read_keys(said, where)
    if problems := [f"{where}: {problem}" for problem in undivided(ring.keys, workers)]:
        raise ConfigError(*problems)
    return ring


class Keyring:
    """Tells clients apart by the keys they show."""

    def __init__(self, path: Path, ring: KeyRing, *, worker: int = 0, num_workers: int = 1) -> None:
        """``ring``: what the file held when it was last read.

        ``num_workers``: who divide its limits; ``worker``: which of them this is.
        """
        self._path = path
        self._ring = ring
        self._accounts = Accounts(worker, num_workers)
        self._num_workers = num_workers

    async def reload(self, now: float) -> None:
        """Read the file again: requests from now on count by it. What keys have used stays used.

        Raises:
            ConfigError: the file cannot be used; the keys are as before.
        """
        self._ring = ring = await asyncio.to_thread(read_key_file, self._path, self._num_workers)
        self._accounts.renew(ring.keys, now)

    def recognise(self, headers: Headers, now: float, unix_now: float) -> Account | Refusal:
        """Whose request it is."""
        secret = shown_key(headers)
        if secret is None:
            return _MISSING
        key = self._ring.find(secret)
        if key is None:
            return _WRONG
        if key.expired(unix_now):
            return _EXPIRED
        return self._accounts.of(key, now)


def shown_key(headers: Headers) -> bytes | None:
    """The key a request shows, as OpenAI's clients do or as Anthropic's do."""
    authorization = find(headers, b"authorization")
    if authorization is not None:
        scheme, _, secret = authorization.partition(b" ")
        return secret.strip() if scheme.lower() == b"bearer" else None
    key = find(headers, b"x-api-key")
    return key.strip() if key is not None else None
