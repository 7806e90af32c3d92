"""API keys: made, hashed, read from a file, found by their secret. Pure: randomness and files are the caller's.

A secret is ``sk-kvr-ID-RANDOM``: the id finds the entry, so that one hash is computed whatever the number of keys, and
for unknown ids too. Secrets are 256 random bits, so a fast salted hash (HMAC-SHA256) cannot be searched backwards.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import hmac
import re
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ID_BYTES, SECRET_BYTES, SALT_BYTES = 6, 32, 16
MAX_WEIGHT = 1000.0
_PREFIX = "sk-kvr-"
_SECRET = re.compile(rb"sk-kvr-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_HASH = re.compile(r"hmac-sha256:([0-9a-f]{12}):([0-9a-f]{32}):([0-9a-f]{64})")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file. What is not given is not limited."""

    name: str
    """In logs and metrics."""
    hash: str
    """``hmac-sha256:ID:SALT:DIGEST``, as `kvrelay router key` prints it."""
    expires: dt.datetime | None = None
    """From this time on (UTC, if it does not say) the key is no more."""
    models: tuple[str, ...] = ()
    """Models it may ask for; none: all."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Prompt and completion together."""
    max_concurrent: int | None = None
    """Requests in the router at once, waiting ones too."""
    weight: float = 1.0
    """Its share of the slots beside other keys."""
    min_priority: int = 0
    """The most urgent (lowest) priority its requests may ask for; below 0 they may go before others'."""

    def share(self, number: int, count: int) -> Key:
        """What is left of its limits for worker ``number`` of ``count``: together they allow what one would.

        Of fewer requests at once than workers, some workers get none (see `undivided`).
        """
        if count == 1:
            return self
        requests, tokens, at_once = self.requests_per_minute, self.tokens_per_minute, self.max_concurrent
        return msgspec.structs.replace(
            self,
            requests_per_minute=None if requests is None else requests / count,
            tokens_per_minute=None if tokens is None else tokens / count,
            max_concurrent=None if at_once is None else at_once // count + (number < at_once % count),
        )

    def expired(self, now: float) -> bool:
        """Whether its time is over at ``now``, a Unix time."""
        at = self.expires
        if at is None:
            return False
        return now >= (at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC)).timestamp()


class KeyFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The file: ``[[keys]]`` in TOML, ``{"keys": [...]}`` in JSON."""

    keys: tuple[Key, ...]


class KeyRing:
    """Finds keys by their secrets."""

    def __init__(self, keys: Iterable[Key]) -> None:
        """Take them over.

        Raises:
            ConfigError: with everything that is wrong with them.
        """
        self.keys = tuple(keys)
        self._by_id: dict[bytes, tuple[bytes, bytes, Key]] = {}
        problems = [problem for key in self.keys for problem in _problems(key)]
        names: set[str] = set()
        for key in self.keys:
            if key.name in names:
                problems.append(f"key {key.name!r} is there twice: names tell keys apart in limits and metrics")
            names.add(key.name)
            if (parts := _HASH.fullmatch(key.hash)) is None:
                problems.append(f"key {key.name!r}: its hash is not one that `kvrelay router key` prints")
                continue
            key_id = parts[1].encode()
            if key_id in self._by_id:
                problems.append(
                    f"key {key.name!r} has the secret of {self._by_id[key_id][2].name!r}: make one of its own"
                )
            self._by_id[key_id] = bytes.fromhex(parts[2]), bytes.fromhex(parts[3]), key
        if problems:
            raise ConfigError(*problems)

    def find(self, secret: bytes) -> Key | None:
        """The key with this secret. As much work, and as long a comparison, whether there is one or not."""
        parts = _SECRET.fullmatch(secret)
        salt, digest, key = self._by_id.get(parts[1] if parts else b"", _NOBODY)
        same = hmac.compare_digest(hmac.digest(salt, secret, "sha256"), digest)
        return key if same else None


def undivided(keys: Iterable[Key], workers: int) -> Iterator[str]:
    """Keys that would be refused by some of so many workers: problems, one line each."""
    for key in keys:
        if key.max_concurrent is not None and key.max_concurrent < workers:
            yield (
                f"key {key.name!r}: max_concurrent = {key.max_concurrent} is less than --workers {workers}, among whom "
                "it is divided: raise it, or lower that"
            )


_NOBODY: tuple[bytes, bytes, Key | None] = bytes(SALT_BYTES), bytes(hashlib.sha256().digest_size), None


def make_secret(key_id: bytes, secret: bytes) -> str:
    """The secret of a key, of `ID_BYTES` and `SECRET_BYTES` random bytes."""
    return f"{_PREFIX}{key_id.hex()}-{base64.urlsafe_b64encode(secret).rstrip(b'=').decode()}"


def hash_secret(secret: str, salt: bytes) -> str:
    """What the file holds of a secret. ``salt``: `SALT_BYTES` random bytes."""
    key_id = secret.removeprefix(_PREFIX).split("-", 1)[0]
    return f"hmac-sha256:{key_id}:{salt.hex()}:{hmac.digest(salt, secret.encode(), 'sha256').hex()}"


def read_keys(said: object, where: str) -> KeyRing:
    """Keys of a file that has been taken apart into plain values.

    Raises:
        ConfigError: with everything that is wrong with them.
    """
    try:
        file = msgspec.convert(_with_midnights(said), KeyFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    try:
        return KeyRing(file.keys)
    except ConfigError as error:
        raise ConfigError(*(f"{where}: {problem}" for problem in error.problems)) from None


def _with_midnights(said: object) -> object:
    """Dates without a time become their first moment."""
    if isinstance(said, dict):
        return {name: _midnight(value) if name == "expires" else _with_midnights(value) for name, value in said.items()}
    return [_with_midnights(item) for item in said] if isinstance(said, list) else said


def _midnight(value: object) -> object:
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        return dt.datetime(value.year, value.month, value.day, tzinfo=dt.UTC)
    if isinstance(value, str) and _DATE.fullmatch(value):
        return f"{value}T00:00:00Z"
    return value


def _problems(key: Key) -> Iterator[str]:
    if not _NAME.fullmatch(key.name):
        yield f"key {key.name[:80]!r}: a name is 1 to 64 letters, digits, dots, dashes and underscores"
    for field, value in (
        ("requests_per_minute", key.requests_per_minute),
        ("tokens_per_minute", key.tokens_per_minute),
        ("max_concurrent", key.max_concurrent),
    ):
        if value is not None and not 1 <= value < float("inf"):
            yield f"key {key.name!r}: {field} = {value:g} is out of range: give 1 or more, or leave it out"
    if not 1 / MAX_WEIGHT <= key.weight <= MAX_WEIGHT:
        yield f"key {key.name!r}: weight = {key.weight:g} is out of range: give {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}"
