"""The LoRA adapters of one engine: what each is called in the pool, and when that cannot be known any more.

An engine loads an adapter's files once, or again whenever it has thrown it out, and does not say what it read. So the
files' stamp is taken when the engine is told to load, before it reads; as long as it stays the same, what the engine
has is what the files hold. An adapter whose files have changed since, or that was loaded again in place under the same
number, is *spoiled*: KV that was and will be made with it is never named again under that number.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.identity.adapters import adapter_digest, adapter_stamp

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.identity.digests import DigestCache


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as the engine is asked for it."""

    name: str
    number: int
    """The engine's own: an adapter that was unloaded and loaded again has another."""
    path: str
    """As it was given: a folder, or a name of a hub."""
    variant: str = ""
    """What else changes what it computes, such as the type its weights are converted to."""
    in_place: bool = False
    """The engine may read it again at any time."""


@dataclass(slots=True)
class _Known:
    stamp: str = ""
    digest: str = ""
    spoiled: str = ""
    """Why it can have no identity."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Adapters:
    """All adapters one engine was asked for. Thread-safe."""

    def __init__(self, cache: DigestCache, resolve: Callable[[str], str] = str) -> None:
        """``resolve``: from an adapter's path as given to its folder; may raise `ConfigError`, may be slow."""
        self._cache = cache
        self._resolve = resolve
        self._known: dict[int, _Known] = {}
        self._lock = threading.Lock()

    def loading(self, adapter: Adapter) -> bool:
        """The engine is about to read the adapter's files. Whether it forgets what it had under the same number."""
        folder = Path(adapter.path).expanduser()
        with self._lock:
            known = self._known.get(adapter.number)
            if known is None:
                self._known[adapter.number] = known = _Known()
                with contextlib.suppress(ConfigError, OSError):  # a hub's, or none: the engine will say so
                    known.stamp = adapter_stamp(folder)
            elif adapter.in_place:
                known.spoiled = "it was loaded again in place"
        return bool(known.spoiled)

    def identity(self, adapter: Adapter) -> str:
        """What the adapter is called: its name and the digest of its files. Slow the first time.

        Raises:
            ConfigError: it cannot be identified, and why.
        """
        if adapter.in_place:
            raise ConfigError("it is loaded in place (load_inplace): unload it and load it again under its name")
        with self._lock:
            known = self._known.setdefault(adapter.number, _Known())
        with known.lock:
            if not known.spoiled:
                self._look(adapter, known)
            if known.spoiled:
                raise ConfigError(f"{known.spoiled}: unload it, load it again, and do not change files in use")
            return f"{len(adapter.name)}:{adapter.name}:{adapter.variant}:{known.digest}"

    def _look(self, adapter: Adapter, known: _Known) -> None:
        folder = Path(self._resolve(adapter.path))
        before = adapter_stamp(folder)
        digest = known.digest or adapter_digest(folder, self._cache)
        if adapter_stamp(folder) != before or (known.stamp or before) != before:
            known.spoiled = "its files changed after it was loaded"
        else:
            known.stamp, known.digest = before, digest
