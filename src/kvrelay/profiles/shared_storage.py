"""vLLM's ExampleConnector (once SharedStorageConnector): KV as files in a folder that both sides see.

It is a demonstration, and only safe within bounds, which are set or refused here:

- A prompt computed in parts is stored in part, and kills the engine that reads it. So chunked prefill is off, and a
  step takes the longest prompt.
- It counts tokens below zero for a prompt of one, and where more is cached locally. `SharedStorageConnector` answers
  none then. It also writes over blocks that are cached locally, so vLLM's prefix caching is off.
- A folder counts as a match as soon as it exists, while its files are still being written. The router asks the decode
  side only when the prefill side has answered; two engines of one role could still meet. So there is one of each.
- KV is named by token ids and layer alone: not by model, adapter, types, rank, or ``cache_salt``. So a run has a folder
  of its own, engines are of one rank and without adapters, and both sides lay their blocks out alike.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvrelay.launch.core.engine import ranks_of
from kvrelay.profiles.base import EngineSetup, Profile, with_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.launch.core.settings import RoleSettings, UpSettings

PATH = "shared_storage_path"
ALIKE = ("dtype", "kv_cache_dtype", "block_size")
"""What a block's bytes mean depends on these."""
CONTRARY = ("--enable-chunked-prefill", "--enable-prefix-caching")


class SharedStorage(Profile):
    """The decode side finds the folder by the prompt's token ids: nothing has to be carried."""

    name = "shared-storage"

    def refusals(self, settings: UpSettings, *, cpu: bool) -> Iterator[str]:  # noqa: ARG002
        """Whatever would kill an engine or mix up KV."""
        yield from _mixed_up(settings)
        for role in ("prefill", "decode"):
            count, told = getattr(settings, role).count, settings.role(role)
            if count > 1:
                yield (
                    f"connector shared-storage: {role}.count = {count}: two engines could read and write one folder at "
                    f"once, and a half-written one kills its reader; use --{role} 1, or --connector kvrelay"
                )
            longest, step = told.max_model_len, told.max_num_batched_tokens
            if longest is None:
                yield (
                    f"connector shared-storage: {role}.max_model_len is not set: a prompt computed in parts kills the "
                    "engine that reads it, so a step must take the longest; set --max-model-len"
                )
            elif step is not None and step < longest:
                yield (
                    f"connector shared-storage: {role}.max_num_batched_tokens = {step} is less than max_model_len = "
                    f"{longest}: a prompt computed in parts kills the engine that reads it; raise --{role}-max-num-"
                    "batched-tokens to it, or lower --max-model-len"
                )
            for argument in told.args:
                if argument.partition("=")[0] in CONTRARY:
                    yield (
                        f"connector shared-storage: {role}.args has {argument}, with which this connector kills "
                        "engines; leave it out"
                    )

    def notes(self, settings: UpSettings) -> Iterator[str]:
        """What the folder does not do."""
        yield (
            "connector shared-storage: vLLM's demonstration of a connector. Its folder grows with every new prompt and "
            "is never cleaned while it is used; cache_salt does not separate tenants; nothing proves a hand-over"
        )
        if path := settings.connector_options.get(PATH):
            yield f"connector shared-storage: {path} stays behind; KV in it is right for this model and its types only"

    def transfer_config(self, setup: EngineSetup) -> dict[str, Any]:
        """Both roles read and write."""
        config = {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_module_path": "kvrelay.connector.shared_storage",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {PATH: _own_folder(setup.run_dir)},
        }
        return with_options(config, setup.settings.connector_options)

    def arguments(self, setup: EngineSetup) -> list[str]:
        """No prompt in parts, no prefix caching."""
        argv = ["--no-enable-chunked-prefill", "--no-enable-prefix-caching"]
        role = setup.settings.role(setup.role)
        if role.max_num_batched_tokens is None:
            argv += ["--max-num-batched-tokens", str(role.max_model_len)]
        return argv

    def folders(self, settings: UpSettings, run_dir: str) -> tuple[str, ...]:
        """The run's own, unless the user named one."""
        return () if PATH in settings.connector_options else (_own_folder(run_dir),)


def _mixed_up(settings: UpSettings) -> Iterator[str]:
    prefill, decode = settings.role("prefill"), settings.role("decode")
    for name in ALIKE:
        values = [_said(role, name) for role in (prefill, decode)]
        if values[0] != values[1]:
            yield (
                f"connector shared-storage: prefill.{name} = {values[0]}, decode.{name} = {values[1]}: bytes are "
                "copied as they are, which the other side would read as something else; give both the same, in [engine]"
            )
    for name, role in (("prefill", prefill), ("decode", decode)):
        if ranks_of(role) > 1:
            yield (
                f"connector shared-storage: {name} engines of {ranks_of(role)} ranks: all ranks would write the same "
                "files; use engines of one rank, or --connector kvrelay"
            )
        if "--enable-lora" in role.args:
            yield (
                f"connector shared-storage: {name}.args has --enable-lora: a prompt's KV would be taken for that of "
                "every adapter; leave it out"
            )


def _said(role: RoleSettings, name: str) -> str | None:
    """The value vLLM will get, from the setting or from the free arguments; None if neither says one."""
    value, flag = getattr(role, name), "--" + name.replace("_", "-")
    for argument, following in pairwise((*role.args, "")):
        said, equals, text = argument.partition("=")
        if said == flag:
            value = text if equals else following
    return None if value is None else str(value)


def _own_folder(run_dir: str) -> str:
    return f"{run_dir}/kv"
