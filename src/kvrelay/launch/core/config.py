"""From flags, environment, file and defaults to one frozen configuration, with the origin of every value.

Precedence is one list: flag, environment, file, default. All problems are reported at once.
"""

from __future__ import annotations

import difflib
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from pydantic import ValidationError

from kvrelay.errors import ConfigError
from kvrelay.launch.core.kv_events import kv_events_problems
from kvrelay.launch.core.settings import NO_CONNECTOR, UpSettings, flag_of, leaves, variable_of
from kvrelay.profiles.needs import needs_of
from kvrelay.profiles.registry import PROFILES
from kvrelay.router.core.observing.settings import is_collector
from kvrelay.router.core.routing import routing_problems
from kvrelay.settings import flatten, has_zero_byte, nest, toml, zero_byte_problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

OWN_ARGUMENTS = {
    "--model": "the MODEL argument",
    "--host": "--host (engines themselves listen on 127.0.0.1)",
    "--port": "--port (engines themselves get free ports)",
    "--kv-transfer-config": "--connector and the table connector_options",
}
"""vLLM arguments that the launcher writes itself, and what to use instead."""


class Configuration(NamedTuple):
    """What `resolve` found: the settings and, for each dotted path, where its value came from."""

    settings: UpSettings
    origins: Mapping[str, str]


class Source(Struct, frozen=True):
    """Values from one place: dotted path to value, and to the name that place has for it."""

    values: dict[str, Any]
    names: dict[str, str]


def resolve(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file_text: str | None = None,
    file_name: str = "",
    *,
    others: Collection[str] = (),
) -> Configuration:
    """Merge the sources and validate.

    ``flags``: dotted path to value, only those given. ``environ``: the whole environment. ``file_text``: TOML.
    ``others``: variables that other parts of kvrelay read. Raises `ConfigError` with one line for every problem.
    """
    problems = list(_misspelt_variables(environ, others))
    try:
        sources = [_from_file(file_text or "", file_name), _from_environ(environ), _from_flags(flags)]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(*problems, f"{file_name}: not valid TOML: {error}") from None
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for source in sources:
        values |= source.values
        names |= source.names
    problems += [zero_byte_problem(path, value, names[path]) for path, value in values.items() if has_zero_byte(value)]
    connector = values.get("connector")
    if not _hands_over(connector) and "prefill.count" not in values:
        values["prefill.count"], names["prefill.count"] = 0, f"default with connector {connector}"
    try:
        settings = UpSettings.model_validate(nest(values))
    except ValidationError as error:
        raise ConfigError(*problems, *_explain(error, names, file_name)) from None
    problems += _contradictions(settings, names)
    if problems:
        raise ConfigError(*problems)
    return Configuration(settings, {path: names.get(path, "default") for path in leaves()})


def show(configuration: Configuration) -> str:
    """The effective settings as TOML, each with its origin; those left to vLLM are comments."""
    lines = []
    for path, value in _by_path(configuration.settings.model_dump(mode="json")).items():
        origin = configuration.origins[path]
        shown = f"{path} = {toml(value)}" if value is not None else f"# {path} is not set"
        lines.append(f"{shown:<48}  # {origin}" if value is not None else shown)
    return "\n".join(lines)


def _from_flags(flags: Mapping[str, Any]) -> Source:
    return Source(dict(flags), {path: flag_of(path) or "MODEL" for path in flags})


def _from_environ(environ: Mapping[str, str]) -> Source:
    settable = {path: variable_of(path) for path in leaves() if flag_of(path) or path == "model"}
    return Source(
        {path: environ[name] for path, name in settable.items() if name in environ},
        {path: name for path, name in settable.items() if name in environ},
    )


def _from_file(text: str, name: str) -> Source:
    values = _by_path(tomllib.loads(text))
    return Source(values, dict.fromkeys(values, name))


def _by_path(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted path; free-form tables stay whole."""
    return flatten(tree, whole={path for path in leaves() if path == "connector_options" or path.endswith(".env")})


def _misspelt_variables(environ: Mapping[str, str], others: Collection[str]) -> Iterator[str]:
    """Variables that look like ours but are not. Other parts of kvrelay have theirs, so only near misses count."""
    known = [variable_of(path) for path in leaves()]
    for name in sorted(environ):
        if name.startswith("KVRELAY_") and name not in others and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            if near:
                yield f"{name} (environment): unknown setting; did you mean {near[0]}?"


def _explain(error: ValidationError, names: Mapping[str, str], file_name: str) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        path = ".".join(str(part) for part in problem["loc"])
        known = next((name for name in (path, path.rpartition(".")[0]) if name in names), path)
        origin = names.get(known, file_name)
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(path, leaves(), n=1)
            hint = f"did you mean {near[0]}?" if near else "`kvrelay config show` lists all settings"
            yield f"{path} (from {origin}): unknown setting; {hint}"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            yield f"{path} = {problem['input']!r} (from {origin}): {message[0].lower()}{message[1:]}"


def _hands_over(connector: object) -> bool:
    """Whether a connector moves KV between engines; one nobody knows is reported elsewhere."""
    profile = PROFILES.get(str(connector))
    return profile.hands_over if profile else connector != NO_CONNECTOR


def _need_problems(settings: UpSettings, names: Mapping[str, str]) -> Iterator[str]:
    profile = settings.profile
    for need, value in needs_of(settings):
        if profile is None or not need.met_by(profile):
            yield (
                f"{need.setting} = {value} (from {names[need.setting]}): with connector {settings.connector} decode "
                f"engines {need.lacking}; choose {need.instead} or --connector kvrelay"
            )


def _contradictions(settings: UpSettings, names: Mapping[str, str]) -> Iterator[str]:
    counts = {"prefill": settings.prefill.count, "decode": settings.decode.count}
    if not _hands_over(settings.connector):
        if settings.prefill.count:
            yield (
                f"prefill.count = {settings.prefill.count} (from {names['prefill.count']}): connector "
                f"{settings.connector} does not hand KV over, so there is no prefill engine; drop --prefill or choose "
                "--connector kvrelay"
            )
        counts.pop("prefill")
    if settings.otlp_endpoint is not None and not is_collector(settings.otlp_endpoint):
        yield (
            f"otlp_endpoint = {settings.otlp_endpoint!r} (from {names['otlp_endpoint']}): it is not a URL; write "
            "http://HOST:4318"
        )
    yield from _need_problems(settings, names)
    for problem in routing_problems(settings.router.routing, hands_over=_hands_over(settings.connector)):
        yield f"router: {problem}"
    yield from kv_events_problems(settings, names)
    for role, count in counts.items():
        if count == 0:
            origin = names[f"{role}.count"]
            yield f"{role}.count = 0 (from {origin}): at least one {role} engine is needed; set --{role} 1"
        cpus = getattr(settings, role).cpus
        if cpus and len(cpus) != count:
            yield (
                f"{role}.cpus = {list(cpus)} (from {names[f'{role}.cpus']}): {len(cpus)} entries for {count} engines; "
                "give one an engine"
            )
    for table in ("engine", "prefill", "decode"):
        for argument in getattr(settings, table).args:
            if instead := OWN_ARGUMENTS.get(argument.partition("=")[0]):
                path = f"{table}.args"
                yield f"{path} (from {names[path]}): {argument} is chosen by kvrelay up; use {instead}"
