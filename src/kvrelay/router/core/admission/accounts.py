"""What each API key has used of its limits. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvrelay.router.core.admission.rates import Bucket, in_words
from kvrelay.router.core.answers import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrelay.router.core.admission.keys import Key

CONCURRENCY_RETRY_S = 1
_KINDS = ("requests", "tokens")


class Account:
    """One key's."""

    __slots__ = ("_buckets", "inside", "key")

    def __init__(self, key: Key, now: float) -> None:
        """Nothing used yet."""
        self.key = key
        self.inside = 0
        """Requests in the router."""
        self._buckets: dict[str, Bucket] = {}
        self.renew(key, now)

    def renew(self, key: Key, now: float) -> None:
        """The file was read again: other limits, what was used stays used."""
        self.key = key
        for kind, limit in zip(_KINDS, (key.requests_per_minute, key.tokens_per_minute), strict=True):
            bucket = self._buckets.get(kind)
            if limit is None:
                self._buckets.pop(kind, None)
            elif bucket is None:
                self._buckets[kind] = Bucket(limit, now)
            elif bucket.per_minute != limit:
                bucket.resize(limit, now)

    @property
    def meters_tokens(self) -> bool:
        """Whether what an answer used matters."""
        return "tokens" in self._buckets

    def enter(self, tokens: float, now: float) -> tuple[Refusal, int] | None:
        """Count a request in; or why not, and after how many seconds it may be tried again."""
        limit = self.key.max_concurrent
        if limit is not None and self.inside >= limit:
            message = f"Key {self.key.name} may have {limit} requests at once, and has"
            return Refusal(429, "concurrency_limit_exceeded", message, "requests"), CONCURRENCY_RETRY_S
        for kind, bucket in self._buckets.items():
            amount = 1.0 if kind == "requests" else tokens
            wait_s = bucket.wait_s(amount, now)
            if wait_s > 0:
                used = bucket.per_minute - bucket.left(now)
                message = (
                    f"Rate limit reached for key {self.key.name} on {kind} per minute: Limit {bucket.per_minute:.0f}, "
                    f"Used {used:.0f}, Requested {amount:.0f}. Please try again in {in_words(wait_s)}."
                )
                return Refusal(429, "rate_limit_exceeded", message, kind), max(1, math.ceil(wait_s))
        for kind, bucket in self._buckets.items():
            bucket.take(1.0 if kind == "requests" else tokens, now)
        self.inside += 1
        return None

    def leave(self) -> None:
        """A request is over."""
        self.inside -= 1

    def correct(self, tokens: float, now: float, *, requests: float = 0.0) -> None:
        """It used so many tokens more than estimated, or fewer; ``requests``: likewise, if it was none after all."""
        for kind, amount in (("tokens", tokens), ("requests", requests)):
            if (bucket := self._buckets.get(kind)) is not None:
                bucket.take(amount, now)

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """As OpenAI sends them."""
        told: list[tuple[bytes, bytes]] = []
        for kind, bucket in self._buckets.items():
            told += [
                (f"x-ratelimit-limit-{kind}".encode(), b"%d" % bucket.per_minute),
                (f"x-ratelimit-remaining-{kind}".encode(), b"%d" % max(0, math.floor(bucket.left(now)))),
                (f"x-ratelimit-reset-{kind}".encode(), in_words(bucket.reset_s(now)).encode()),
            ]
        return told


class Accounts:
    """Everybody's."""

    def __init__(self, worker: int = 0, num_workers: int = 1) -> None:
        """None yet. ``num_workers``: among whom each key's limits are divided; ``worker``: which of them this is."""
        self._seat = worker, num_workers
        self._by_name: dict[str, Account] = {}

    def of(self, key: Key, now: float) -> Account:
        """The account of ``key``."""
        account = self._by_name.get(key.name)
        if account is None:
            account = self._by_name[key.name] = Account(key.share(*self._seat), now)
        return account

    def renew(self, keys: Iterable[Key], now: float) -> None:
        """The file was read again. Accounts of keys that are gone go, once nothing of theirs is in the router."""
        known = {key.name: key.share(*self._seat) for key in keys}
        for name, account in list(self._by_name.items()):
            if name in known:
                account.renew(known[name], now)
            elif not account.inside:
                del self._by_name[name]
