"""An S3-compatible object store, through ``obstore`` (the extra ``s3``): one stored object for each of ours.

Several pools may share a bucket and prefix. Nothing is dropped to make room: give the bucket a lifecycle rule.
Credentials come from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``), a web
identity token, or the instance's or container's role, as ``obstore`` finds them; they are never logged.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from kvrelay.errors import ConfigError
from kvrelay.hosts import split_url
from kvrelay.pool.tiers.core.tier import Loaded, Outcome, Shape, Usage
from kvrelay.pool.tiers.naming import SUFFIX, object_path, tenant_prefix
from kvrelay.pool.tiers.record import HEAD_READ_BYTES, DamagedError, Head, pack_head, parse_head, proven_sums
from kvrelay.transport.checksum import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvrelay.pool.tiers.core.tier import Item

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

CONNECT_S = 5
TIMEOUT_S = 30
"""For one request, whatever its size."""
RETRIES = 2
RETRY_S = 20
PARALLEL = 16
"""Requests at once, within one call."""
FORMAT = "kvrelay-v1"
"""Begins every name, so that another format can live beside this one."""
DELETE_AT_ONCE = 1_000
REFUSED = re.compile(r"status code: [34]\d\d")
"""In an error's text: the server was reached, and will not do what it is asked for."""


class S3Tier:
    """Objects below ``url`` (``s3://BUCKET/PREFIX``). ``endpoint``: of another server than Amazon's, ``http(s)://...``.

    Raises:
        ConfigError: obstore is not installed, the address cannot be right, or the server refuses to list the bucket.
    """

    kind = "s3"

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError as error:
            raise ConfigError(f"tier {url}: obstore is not installed: pip install 'kvrelay[s3]'") from error
        parts = split_url(url)
        if parts.scheme != "s3" or not parts.netloc:
            raise ConfigError(f"tier {url!r}: the address of an S3 tier is s3://BUCKET or s3://BUCKET/PREFIX")
        self.where = url
        self._clock = clock
        self._obstore = obstore
        self._root = "/".join(part for part in (parts.path.strip("/"), FORMAT) if part)
        options: dict[str, Any] = {}
        if endpoint is not None:
            options["endpoint"] = endpoint
        if region is not None:
            options["region"] = region
        try:
            self._store = S3Store(
                parts.netloc,
                client_options={
                    "allow_http": endpoint is not None and endpoint.startswith("http://"),
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "timeout": timedelta(seconds=timeout_s),
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
                **options,
            )
            with _errors():
                next(iter(obstore.list(self._store, self._root, chunk_size=1)), None)
        except (FileNotFoundError, PermissionError, obstore.exceptions.BaseError) as error:
            raise ConfigError(f"tier {url}: {_short(error)}") from error
        except OSError as error:
            if REFUSED.search(str(error)):
                raise ConfigError(f"tier {url}: {_short(error)}") from error
            # Anything else may pass, and the pool is of use without it.
            log.warning("s3 tier %s cannot be reached now: %s", url, _short(error))
        self._threads = ThreadPoolExecutor(PARALLEL, thread_name_prefix="s3")
        self._usage = Usage(0, 0)

    def _path(self, key: bytes) -> str:
        return "/".join((self._root, *object_path(key)))

    def _all(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        return list(self._threads.map(work, items))

    # --- storing ---

    def store(self, items: Sequence[Item]) -> list[Outcome]:
        """See `Tier.store`."""
        return self._all(self._put, items)

    def _put(self, item: Item) -> Outcome:
        path = self._path(item.key)
        present = self._head(item.key)
        if present is not None and (present.shape, present.digest) == (item.shape, checksum(item.sums)):
            return Outcome.DONE
        record = b"".join((pack_head(item), item.data))
        with _errors():
            self._obstore.put(self._store, path, record)
        self._usage = Usage(self._usage.objects + (present is None), self._usage.size_bytes + len(record))
        return Outcome.DONE

    # --- finding and loading ---

    def _head(self, key: bytes) -> Head | None:
        try:
            with _errors():
                start = self._obstore.get_range(self._store, self._path(key), start=0, length=HEAD_READ_BYTES)
            head = parse_head(bytes(start))
        except (FileNotFoundError, DamagedError):
            return None
        return head if head.key == key else None

    def _shape(self, key: bytes) -> Shape | None:
        head = self._head(key)
        return None if head is None or 0 < head.shape.expires_at <= self._clock() else head.shape

    def find(self, keys: Sequence[bytes], *, prefix: bool = False) -> list[Shape | None]:
        """See `Tier.find`. With ``prefix`` the first is asked for alone: mostly it is not there."""
        found: list[Shape | None] = []
        at, count = 0, 1 if prefix else PARALLEL
        while at < len(keys):
            found += self._all(self._shape, keys[at : at + count])
            at += count
            count = PARALLEL
            if prefix and None in found:
                break
        return found + [None] * (len(keys) - len(found))

    def load(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[Loaded]:
        """See `Tier.load`."""
        return self._all(self._load, wanted)

    def _load(self, pair: tuple[bytes, memoryview]) -> Loaded:
        key, into = pair
        path = self._path(key)
        try:
            with _errors():
                answer = self._obstore.get(self._store, path)
                if answer.meta["size"] > into.nbytes + HEAD_READ_BYTES + 8 * 65_536:
                    return Loaded(Outcome.ABSENT)
                record = memoryview(answer.bytes())
            head = parse_head(record)
            if head.key != key:
                raise DamagedError("it is another object's")
            if head.shape.size != into.nbytes or 0 < head.shape.expires_at <= self._clock():
                return Loaded(Outcome.ABSENT)
            if record.nbytes != head.record_bytes:
                raise DamagedError(f"it has {record.nbytes} bytes, not {head.record_bytes}")
            into[:] = record[head.head_bytes :]
            sums = proven_sums(key, head.shape, record[: head.head_bytes], into)
        except FileNotFoundError:
            return Loaded(Outcome.ABSENT)
        except DamagedError:
            log.debug("s3 tier %s: damaged object %s", self.where, path, exc_info=True)
            self.delete([key])
            return Loaded(Outcome.CORRUPT)
        except OSError:
            log.debug("s3 tier %s: object %s cannot be had", self.where, path, exc_info=True)
            return Loaded(Outcome.FAILED)
        return Loaded(Outcome.DONE, sums)

    # --- forgetting ---

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `Tier.delete`. S3 does not say what was there: all count."""
        for at in range(0, len(keys), DELETE_AT_ONCE):
            with contextlib.suppress(FileNotFoundError), _errors():
                self._obstore.delete(self._store, [self._path(key) for key in keys[at : at + DELETE_AT_ONCE]])
        return len(keys)

    def purge(self, tenant: str) -> int:
        """See `Tier.purge`."""
        count = 0
        for paths in self._paths(f"{self._root}/{tenant_prefix(tenant)}"):
            with _errors():
                self._obstore.delete(self._store, paths)
            count += len(paths)
        return count

    def _paths(self, below: str) -> Iterator[list[str]]:
        with _errors():
            for page in self._obstore.list(self._store, below, chunk_size=DELETE_AT_ONCE):
                yield [str(meta["path"]) for meta in page if meta["path"].endswith(SUFFIX)]

    def keys(self) -> Iterator[bytes]:
        """See `Tier.keys`."""
        for paths in self._paths(self._root):
            for path in paths:
                with contextlib.suppress(FileNotFoundError, DamagedError):
                    with _errors():
                        start = self._obstore.get_range(self._store, path, start=0, length=HEAD_READ_BYTES)
                    key = parse_head(bytes(start)).key
                    if self._path(key) == path:
                        yield key

    def usage(self) -> Usage:
        """See `Tier.usage`: what this pool has stored since it started."""
        return self._usage

    def take_evicted(self) -> list[bytes]:
        """See `Tier.take_evicted`."""
        return []

    def close(self) -> None:
        """See `Tier.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _short(error: Exception) -> str:
    """The first line of an error of obstore, which goes on with debugging output."""
    return str(error).splitlines()[0][:300]


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Errors of obstore as OSError, an absent object's as FileNotFoundError."""
    from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        raise FileNotFoundError(errno.ENOENT, _short(error)) from None
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, _short(error)) from None
    except BaseError as error:
        raise OSError(errno.EIO, _short(error)) from None
