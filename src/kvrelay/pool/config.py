"""From flags, environment, one TOML file and defaults to one frozen configuration of a pool server.

Precedence is one list: flag, environment, file, default. All problems are reported at once; unknown keys are problems.
Files that settings name (tokens, certificates) are read here too, so that a pool that starts has all it needs.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from kvrelay.client.token import TOKEN_VARIABLE, read_token
from kvrelay.errors import ConfigError
from kvrelay.hosts import is_loopback
from kvrelay.pool.core.pool import DEFAULT_TENANT
from kvrelay.pool.core.tenants import Quota, Tenant
from kvrelay.pool.core.upkeep import Rules
from kvrelay.pool.settings import (
    PoolSettings,
    TenantSettings,
    flag_of,
    leaves,
    variable_of,
)
from kvrelay.settings import flatten, has_zero_byte, nest, toml, zero_byte_problem
from kvrelay.transport.address import Address, parse_address, parse_host_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvrelay.pool.tiers.config import TierConfig

_FILES = {"path", "token_file", "admin.token_file", "tls.cert", "tls.key", "tls.client_ca"}
_OTHERS = {TOKEN_VARIABLE, "KVRELAY_POOL_PORT", "KVRELAY_POOL_ARGS"}
"""Variables with our prefix that are not settings of a pool server: the token itself, and settings of `kvrelay up`."""


class PoolConfig(NamedTuple):
    """A checked configuration. ``origins``: where each setting's value came from, by dotted path."""

    settings: PoolSettings
    origins: Mapping[str, str]
    tiers: tuple[TierConfig, ...]
    tenants: tuple[Tenant, ...]
    """Those of the file; without any, one named `DEFAULT_TENANT` that has shared memory and the pool's token."""
    admin_token: str | None

    @property
    def addresses(self) -> list[Address]:
        """Where the data protocol is spoken."""
        settings = self.settings
        found = [] if settings.listen == "none" else [parse_host_port(settings.listen)]
        return [*found, parse_address(f"unix:{settings.unix}")] if settings.unix else found

    @property
    def rules(self) -> Rules:
        """How the pool treats its objects."""
        marks = self.settings.watermarks
        rules = Rules(high=marks.high, low=marks.low, ttl_s=self.settings.ttl_s)
        return rules.with_tiers() if self.tiers else rules

    @property
    def needs_token(self) -> bool:
        """Whether nobody gets in without a token or a certificate."""
        return all(tenant.token is not None or tenant.certificate is not None for tenant in self.tenants)

    def __repr__(self) -> str:
        return f"PoolConfig({self.settings!r})"  # tokens stay out of logs and tracebacks


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> PoolConfig:
    """Read ``file``, if there is one, and `resolve`. Relative paths in it are seen from its directory."""
    if file is None:
        return resolve(flags, environ)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {file}: cannot be read: {error}; name an existing TOML file") from None
    return resolve(flags, environ, text, str(file))


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], file_text: str = "", file_name: str = "the file"
) -> PoolConfig:
    """Merge the sources, validate, and read the tokens.

    ``flags``: dotted path to value, only those given. ``environ``: the whole environment.

    Raises:
        ConfigError: with one line for every problem there is.
    """
    problems = list(_unknown_variables(environ))
    try:
        values, names = _merged(flags, environ, tomllib.loads(file_text), file_name)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(*problems, f"{file_name}: not valid TOML: {error}") from None
    problems += [zero_byte_problem(path, value, names[path]) for path, value in values.items() if has_zero_byte(value)]
    try:
        settings = PoolSettings.model_validate(nest(values))
    except ValidationError as error:
        raise ConfigError(*problems, *_explain(error, names, file_name)) from None
    origins = {path: names.get(path, "default") for path in leaves()}
    problems += _contradictions(settings)
    tiers = _tiers(settings, problems)
    tenants = _tenants(settings, problems, environ)
    admin_token = _token(settings.admin.token_file, "admin.token_file", problems)
    problems += _same_tokens(tenants, admin_token)
    if problems:
        raise ConfigError(*problems)
    return PoolConfig(settings, origins, tiers, tenants, admin_token)


def show(config: PoolConfig) -> str:
    """The effective settings as TOML, each with its origin; those that are not set are comments. No secrets in it."""
    lines = []
    marks = {"watermarks.high": config.rules.high, "watermarks.low": config.rules.low}
    for path in leaves():
        value: Any = config.settings.model_dump(mode="json")
        for name in path.split("."):
            value = value[name]
        value = marks.get(path, value)
        if value is None or (value == [] and config.origins[path] == "default"):
            lines.append(f"# {path} is not set")
        else:
            lines.append(f"{f'{path} = {toml(value)}':<48}  # {config.origins[path]}")
    return "\n".join(lines)


def _merged(
    flags: Mapping[str, Any], environ: Mapping[str, str], tree: Mapping[str, Any], file_name: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and their origins by dotted path, later sources over earlier ones."""
    values = _from_file(tree, Path(file_name).parent)
    names = dict.fromkeys(values, file_name)
    for path in leaves():
        variable = variable_of(path)
        if variable is not None and variable in environ:
            values[path], names[path] = environ[variable], variable
        if path in flags:
            values[path], names[path] = flags[path], flag_of(path) or path
    return values, names


def _from_file(tree: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Values of the file by dotted path; relative paths are seen from where the file is."""

    def located(path: str, value: Any) -> Any:
        return str(base / value) if path in _FILES and isinstance(value, str) else value

    values = {path: located(path, value) for path, value in flatten(tree).items()}
    for lists in ("tenants", "tiers"):
        tables = values.get(lists)
        if isinstance(tables, list):
            values[lists] = [
                {name: located(name, value) for name, value in table.items()} if isinstance(table, dict) else table
                for table in tables
            ]
    return values


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Whatever begins like ours and is not: a misspelt setting that would silently not count."""
    known = [name for path in leaves() if (name := variable_of(path)) is not None]
    for name in sorted(environ):
        if name.startswith("KVRELAY_POOL_") and name not in known and name not in _OTHERS:
            yield f"{name} (environment): unknown setting; {_suggestion(name, known)}"


def _suggestion(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "`kvrelay pool config` lists all settings"


def _explain(error: ValidationError, names: Mapping[str, str], file_name: str) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        path = ".".join(str(part) for part in problem["loc"])
        origin = names.get(path) or names.get(path.partition(".")[0]) or file_name
        if problem["type"] == "extra_forbidden":
            known = list(TenantSettings.model_fields) if path.startswith("tenants.") else list(leaves())
            hint = _suggestion(path.rpartition(".")[2] if path.startswith("tenants.") else path, known)
            yield f"{path} (from {origin}): unknown setting; {hint}"
        elif problem["type"] == "missing":
            yield f"{path} (from {origin}): not given"
        elif problem["type"] == "tuple_type":
            hint = f"tables, each under [[{path}]]" if path in {"tenants", "tiers"} else "a list"
            yield f"{path} = {problem['input']!r} (from {origin}): legal are {hint}"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            yield f"{path} = {problem['input']!r} (from {origin}): {message[0].lower()}{message[1:]}"


def _contradictions(settings: PoolSettings) -> Iterator[str]:
    admin = settings.admin
    if settings.listen == "none" and not settings.unix:
        yield "listen = 'none' without unix: the pool would listen nowhere; give --listen HOST:PORT or --unix PATH"
    if settings.watermarks.low > settings.watermarks.high:
        low, high = settings.watermarks.low, settings.watermarks.high
        yield f"watermarks.low = {low:g} is above watermarks.high = {high:g}: lower the one or raise the other"
    yield from _tls_problems(settings)
    yield from _tenant_problems(settings)
    if admin.listen is None and admin.token_file is not None:
        yield "admin.token_file has no effect without admin.listen: give --admin-listen HOST:PORT"
    if admin.listen is not None and admin.token_file is None and not is_loopback(parse_host_port(admin.listen).host):
        yield (
            f"admin.listen = {admin.listen!r} can be reached from other hosts and asks for no token: "
            "give --admin-token-file FILE, or an address such as 127.0.0.1:7421"
        )


def _tls_problems(settings: PoolSettings) -> Iterator[str]:
    tls = settings.tls
    if tls.cert is None and (tls.key is not None or tls.client_ca is not None):
        yield "tls.key and tls.client_ca have no effect without tls.cert: give --tls-cert FILE"
    if tls.cert is not None and settings.listen == "none":
        yield "tls.cert is given and listen = 'none': TLS is spoken over TCP only; give --listen HOST:PORT"
    for path, file in (("tls.cert", tls.cert), ("tls.key", tls.key), ("tls.client_ca", tls.client_ca)):
        if file is not None and not _is_file(file):
            yield f"{path} = '{file}': no such file"


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # such as a name that is too long
        return False


def _tenant_problems(settings: PoolSettings) -> Iterator[str]:
    names = [tenant.name for tenant in settings.tenants]
    if settings.tenants and settings.token_file is not None:
        yield "token_file has no effect beside tenants, which have tokens of their own: drop --token-file"
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"tenants: {name!r} is given twice: names must differ"
    for tenant in settings.tenants:
        if tenant.token_file is None and tenant.certificate is None:
            yield f"tenants: {tenant.name!r} has neither token_file nor certificate: no client could connect as it"
        if tenant.certificate is not None and settings.tls.client_ca is None:
            yield f"tenants: {tenant.name!r} has a certificate and no client is asked for one: give --tls-client-ca"
        if tenant.quota is not None and tenant.quota > settings.size:
            yield f"tenants: {tenant.name!r} has a quota of {tenant.quota} bytes, more than size = {settings.size}"


def _tiers(settings: PoolSettings, problems: list[str]) -> tuple[TierConfig, ...]:
    if not settings.tiers:
        return ()
    from kvrelay.pool.tiers.config import parse_tiers

    try:
        return parse_tiers(settings.tiers)
    except ConfigError as error:
        problems += error.problems
        return ()


def _tenants(settings: PoolSettings, problems: list[str], environ: Mapping[str, str]) -> tuple[Tenant, ...]:
    if not settings.tenants:
        token = _token(settings.token_file, "token_file", problems) or environ.get(TOKEN_VARIABLE) or None
        return (Tenant(name=DEFAULT_TENANT, token=token, shm=True),)
    return tuple(
        Tenant(
            name=tenant.name,
            token=_token(tenant.token_file, f"tenants.{number}.token_file", problems),
            certificate=tenant.certificate,
            quota=Quota(
                quota_bytes=tenant.quota, max_objects=tenant.max_objects, max_connections=tenant.max_connections
            ),
            shm=tenant.shm,
        )
        for number, tenant in enumerate(settings.tenants)
    )


def _token(file: Path | None, path: str, problems: list[str]) -> str | None:
    if file is None:
        return None
    try:
        return read_token(str(file))
    except ConfigError as error:
        problems += [f"{path}: {problem}" for problem in error.problems]
        return None


def _same_tokens(tenants: tuple[Tenant, ...], admin_token: str | None) -> Iterator[str]:
    """Two that share a token could not be told apart."""
    owners: dict[str, str] = {} if admin_token is None else {admin_token: "the admin API"}
    for tenant in tenants:
        if tenant.token in owners:
            yield f"tenants: {tenant.name!r} has the same token as {owners[tenant.token]}: give each its own"
        elif tenant.token is not None:
            owners[tenant.token] = f"tenant {tenant.name!r}"
