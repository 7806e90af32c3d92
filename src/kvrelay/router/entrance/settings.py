"""The entrance's settings, checked with all the others before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from kvrelay.errors import ConfigError
from kvrelay.hosts import is_loopback, split_url
from kvrelay.router.core.admission.keys import KeyRing  # noqa: TC001 - msgspec looks at it
from kvrelay.router.core.admission.queue import Limits
from kvrelay.router.entrance.keyring import read_key_file
from kvrelay.router.entrance.tls import TlsFiles, make_context

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENGINE_KEY_VARIABLE = "KVRELAY_ENGINE_API_KEY"
FORWARD = ("auto", "yes", "no")
MAX_WAIT_S = 3600.0
MAX_REQUESTS = 1_000_000


class EntranceSettings(Struct, frozen=True, kw_only=True):
    """As given: see `kvrelay router serve --help`."""

    max_concurrent: int = 0
    """0: as many as come."""
    max_per_decode: int = 0
    """For each decode engine; 0: as many as come."""
    max_queued: int = 100
    max_queue_wait_s: float = 60.0
    keys_file: str | None = None
    engine_api_key_file: str | None = None
    forward_authorization: str = "auto"
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    cors_origins: Sequence[str] = ()


class EntranceConfig(Struct, frozen=True, kw_only=True):
    """Checked and complete."""

    max_concurrent: int = 0
    max_per_decode: int = 0
    max_queued: int = 100
    max_queue_wait_s: float = 60.0
    keys_file: Path | None = None
    keys: KeyRing | None = None
    """What it held."""
    engine_api_key: bytes | None = None
    forward_authorization: bool = True
    """Whether engines get the client's own credentials."""
    tls: TlsFiles | None = None
    cors_origins: frozenset[bytes] = frozenset()

    @property
    def limits(self) -> Limits:
        """The queue's; its slots are set as engines come and go."""
        return Limits(queue=self.max_queued, wait_s=self.max_queue_wait_s)

    num_workers: int = 1
    """Among whom what is allowed is divided."""
    worker: int = 0
    """Which of them this is for."""

    def share(self, number: int, count: int) -> EntranceConfig:
        """What one of several workers may let in: together they let in no more than one would."""
        bounds = {
            field: (bound := getattr(self, field)) // count + (number < bound % count)
            for field in ("max_concurrent", "max_per_decode", "max_queued")
        }
        return msgspec.structs.replace(self, num_workers=count, worker=number, **bounds)

    @property
    def own_headers(self) -> frozenset[bytes]:
        """Headers engines get that are not the client's."""
        return frozenset({b"authorization"} if self.engine_api_key is not None else ())

    @property
    def admits(self) -> bool:
        """Whether requests may have to wait."""
        return bool(self.max_concurrent or self.max_per_decode)


def check_entrance(settings: EntranceSettings, problems: list[str], *, workers: int = 1) -> EntranceConfig:
    """Make a configuration of the settings; what is wrong is added to ``problems``.

    Reads the files of keys and certificates.
    """
    problems += _bounds(settings, workers)
    problems += _cors_problems(settings)
    key = _engine_key(settings, problems)
    if settings.forward_authorization not in FORWARD:
        problems.append(
            f"--forward-authorization {settings.forward_authorization!r} is unknown: choose one of {', '.join(FORWARD)}"
        )
    if settings.forward_authorization == "yes" and key is not None:
        problems.append("--forward-authorization yes and an API key for the engines exclude each other: leave one out")
    keys_file = Path(settings.keys_file) if settings.keys_file is not None else None
    keys = None
    if keys_file is not None:
        try:
            keys = read_key_file(keys_file, workers)
        except ConfigError as error:
            problems += [f"--keys-file: {problem}" for problem in error.problems]
    forward = {"yes": True, "no": False}.get(settings.forward_authorization, keys_file is None and key is None)
    return EntranceConfig(
        max_concurrent=settings.max_concurrent,
        max_per_decode=settings.max_per_decode,
        max_queued=settings.max_queued,
        max_queue_wait_s=settings.max_queue_wait_s,
        keys_file=keys_file,
        keys=keys,
        engine_api_key=key,
        forward_authorization=forward,
        tls=_tls(settings, problems),
        cors_origins=frozenset(origin.lower().encode(errors="replace") for origin in settings.cors_origins),
    )


def exposed_without(host: str, config: EntranceConfig) -> str:
    """What is missing for a host others can reach, in words; nothing where nobody else can, or nothing is missing."""
    if is_loopback(host):
        return ""
    missing = [
        words
        for words, there in (
            ("without API keys (--keys-file), so anybody who can reach it can use the engines", config.keys_file),
            ("without TLS (--tls-cert), so prompts, answers and keys can be read on the way", config.tls),
        )
        if there is None
    ]
    return f"{host} can be reached from other machines, and is served " + " and ".join(missing) if missing else ""


def _bounds(settings: EntranceSettings, workers: int) -> Iterator[str]:
    for flag, value in (
        ("--max-concurrent", settings.max_concurrent),
        ("--max-per-decode", settings.max_per_decode),
        ("--max-queued", settings.max_queued),
    ):
        if not 0 <= value <= MAX_REQUESTS:
            yield f"{flag} {value} is out of range: give 0 to {MAX_REQUESTS}"
    for flag, value in (("--max-concurrent", settings.max_concurrent), ("--max-per-decode", settings.max_per_decode)):
        if 0 < value < workers:
            yield f"{flag} {value} is less than --workers {workers}, among whom it is divided: raise it, or lower that"
    if not 0 < settings.max_queue_wait_s <= MAX_WAIT_S:
        yield f"--max-queue-wait {settings.max_queue_wait_s:g} is out of range: give seconds up to {MAX_WAIT_S:g}"


def _cors_problems(settings: EntranceSettings) -> Iterator[str]:
    for origin in settings.cors_origins:
        if origin != "*" and not _is_origin(origin):
            yield f"--cors-origin {origin!r} is not an origin: give SCHEME://HOST[:PORT] without a path, or *"
    if "*" in settings.cors_origins and len(settings.cors_origins) > 1:
        yield "--cors-origin * allows every origin: leave the others out"


def _is_origin(text: str) -> bool:
    try:
        parts = split_url(text)
    except ConfigError:
        return False
    bare = f"{parts.scheme}://{parts.netloc}".lower()
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and bare == text.lower() and text.isascii()


def _engine_key(settings: EntranceSettings, problems: list[str]) -> bytes | None:
    file = settings.engine_api_key_file
    if file is None:
        key = os.environ.get(ENGINE_KEY_VARIABLE, "").strip()
        where = ENGINE_KEY_VARIABLE
    else:
        where = f"--engine-api-key-file {file!r}"
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            problems.append(f"{where} cannot be read: {error}")
            return None
        if not key:
            problems.append(f"{where} is empty")
    if not all("!" <= character <= "~" for character in key):
        problems.append(f"{where} holds no API key: it has spaces or characters that do not fit into a header")
        return None
    return key.encode() or None


def _tls(settings: EntranceSettings, problems: list[str]) -> TlsFiles | None:
    for flag, name in (
        ("--tls-cert", settings.tls_cert),
        ("--tls-key", settings.tls_key),
        ("--tls-client-ca", settings.tls_client_ca),
    ):
        if name == "":
            problems.append(f"{flag} is empty: name a PEM file, or leave it out")
    cert, key, ca = (
        Path(name) if name else None for name in (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    )
    if cert is None:
        if key is not None or ca is not None:
            problems.append("--tls-key and --tls-client-ca have no effect without --tls-cert: give it too")
        return None
    files = TlsFiles(cert, key, ca)
    try:
        make_context(files)
    except ConfigError as error:
        problems += [f"--tls-cert: {problem}" for problem in error.problems]
    return files
