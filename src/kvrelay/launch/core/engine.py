"""Settings in the words of vLLM: its arguments."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.launch.core.settings import RoleSettings

DEFAULT_CPU_KV_BYTES = 1 << 30
"""On a CPU vLLM would take most of the machine's memory for each engine."""
VALUE_FIELDS = (
    "dtype", "kv_cache_dtype", "gpu_memory_utilization", "block_size", "max_model_len", "max_num_batched_tokens",
    "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
)  # fmt: skip
SHOWS_REQUESTS = "--enable-scale-out"
"""Has vLLM show requests as it completes them, among other things that only the router can reach."""
KV_SIZE_ARGUMENTS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--num-gpu-blocks-override")


def engine_arguments(role: RoleSettings, *, default_kv_bytes: int | None) -> list[str]:
    """The role's settings as arguments; its free ``args`` are not included.

    ``default_kv_bytes``: size of the KV cache when nothing says one; None leaves it to vLLM.
    """
    argv: list[str] = []
    for field in VALUE_FIELDS:
        if (value := getattr(role, field)) is not None:
            argv += ["--" + field.replace("_", "-"), str(value)]
    if role.enforce_eager is not None:
        argv.append("--enforce-eager" if role.enforce_eager else "--no-enforce-eager")
    size = role.kv_cache_memory
    if size is None and not sizes_kv_itself(role):
        size = default_kv_bytes
    return argv if size is None else [*argv, "--kv-cache-memory-bytes", str(size)]


def sizes_kv_itself(role: RoleSettings) -> bool:
    """Whether the user said in vLLM's own words how much memory the KV cache gets."""
    return role.gpu_memory_utilization is not None or any(
        argument.partition("=")[0] in KV_SIZE_ARGUMENTS for argument in role.args
    )


def ranks_of(role: RoleSettings) -> int:
    """Processes one engine of the role computes with: those of one replica times the replicas."""
    tensor = _number(role.args, "--tensor-parallel-size", "-tp") or role.tensor_parallel_size or 1
    return tensor * stages_of(role) * replicas_of(role)


def stages_of(role: RoleSettings) -> int:
    """Pipeline stages of one engine of the role."""
    return _number(role.args, "--pipeline-parallel-size", "-pp") or role.pipeline_parallel_size or 1


def replicas_of(role: RoleSettings) -> int:
    """Data-parallel replicas of one engine of the role: each has a scheduler, ranks and a connector of its own."""
    return _number(role.args, "--data-parallel-size", "-dp") or role.data_parallel_size or 1


def names_of(engine: str, role: RoleSettings) -> tuple[str, ...]:
    """The names under which the connectors of one engine register with the pool."""
    replicas = replicas_of(role)
    return (engine,) if replicas == 1 else tuple(f"{engine}-dp{number}" for number in range(replicas))


def _number(args: tuple[str, ...], *names: str) -> int | None:
    """The positive number an argument gives; the last one wins. What is no number is left for vLLM to report."""
    number = None
    for argument, following in pairwise((*args, "")):
        name, equals, value = argument.partition("=")
        text = value if equals else following
        if name in names and text.isdecimal() and int(text) > 0:
            number = int(text)
    return number
