"""The LoRA adapters of one engine: what each is called in the pool, and when that cannot be known any more.

An engine loads an adapter's files once, or again whenever it has thrown it out, and does not say what it read. So the
files' stamp is taken when the engine is told to load, before it reads; as long as it stays the same, what the engine
has is what the files hold. An adapter whose files have changed since, or that was loaded again in place under the same
number, is *spoiled*: KV that was and will be made with it is never named again under that number.

The engine's own prefix cache tells adapters by name and path alone. What was computed with one number is found there
under the next of the same name and path, whatever the files held. So numbers share a *place* only while all that ran
there are known to be the same.
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
    from collections.abc import Callable, Container

    from kvrelay.identity.digests import DigestCache

OTHERS_PLACE = (
    "other weights ran under its name and path before, and the engine's own prefix cache does not tell their KV from "
    "its: load it under another name or from another path, or reset the engine's prefix cache"
)


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

    @property
    def place(self) -> tuple[str, str]:
        """What the engine's prefix cache tells it by."""
        return self.name, self.path


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
        self._places: dict[tuple[str, str], dict[int, str]] = {}
        """What those that requests ran with are, by place and number; empty: not known."""
        self._lock = threading.Lock()
        self.stopped: list[int] = []
        """Numbers whose requests must not be saved or loaded any further, in the order it was found; it grows."""

    def loading(self, adapter: Adapter) -> None:
        """The engine is about to read the adapter's files, perhaps again under the same number."""
        folder = Path(adapter.path).expanduser()
        with self._lock:
            known = self._known.get(adapter.number)
            if known is None:
                self._known[adapter.number] = known = _Known()
                with contextlib.suppress(ConfigError, OSError):  # a hub's, or none: the engine will say so
                    known.stamp = adapter_stamp(folder)
            elif adapter.in_place:
                self._spoil(adapter.number, known, "it was loaded again in place")

    def use(self, adapter: Adapter) -> None:
        """A request comes with it, that will leave KV at its place in the engine's prefix cache."""
        with self._lock:
            place = self._places.setdefault(adapter.place, {})
            if adapter.number not in place:
                self.stopped += place  # they may find this one's, until it is known what it is
                place[adapter.number] = ""

    def identity(self, adapter: Adapter) -> str:
        """What the adapter is called: its name and the digest of its files. Slow the first time.

        Raises:
            ConfigError: it cannot be identified, and why.
        """
        if adapter.in_place:
            raise ConfigError("it is loaded in place (load_inplace): load it under another name or from another path")
        with self._lock:
            known = self._known.setdefault(adapter.number, _Known())
        with known.lock:
            if not known.spoiled:
                self._look(adapter, known)
        with self._lock:
            if known.spoiled:
                raise ConfigError(
                    f"{known.spoiled}: load it under another name or from another path, and do not change files in use"
                )
            content = f"{len(adapter.name)}:{adapter.name}:{adapter.variant}:{known.digest}"
            place = self._places.setdefault(adapter.place, {})
            place[adapter.number] = content
            if any(other != content for other in place.values()):
                raise ConfigError(OTHERS_PLACE)
        return content

    def _look(self, adapter: Adapter, known: _Known) -> None:
        folder = Path(self._resolve(adapter.path))
        before = adapter_stamp(folder)
        digest = known.digest or adapter_digest(folder, self._cache)
        if adapter_stamp(folder) != before or (known.stamp or before) != before:
            with self._lock:
                self._spoil(adapter.number, known, "its files changed after it was loaded")
        else:
            known.stamp, known.digest = before, digest

    def _spoil(self, number: int, known: _Known, why: str) -> None:
        known.spoiled = why
        for place in self._places.values():
            if number in place:
                place[number] = ""
        self.stopped.append(number)

    def cache_dropped(self, running: Container[int]) -> None:
        """The engine's prefix cache holds nothing; ``running``: numbers of requests that may fill it again."""
        with self._lock:
            for place in self._places.values():
                for number in [number for number in place if number not in running]:
                    del place[number]
