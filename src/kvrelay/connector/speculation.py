"""Speculative decoding: which methods keep KV of their own, and how a drafter's layers become layers of the model.

A drafter that attends to what came before keeps KV in the same blocks as the model, and writes it in the same step,
after the model's last layer. Without it a decode engine would guess from whatever its blocks held before: answers would
still be right, for the model has the last word, but hardly any guess would be accepted, and nobody would be told. So a
drafter's layers are saved and loaded as the model's own, as its last ones, and engines exchange KV only if they have
the same drafter, however many tokens each has it guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import ModelConfig, VllmConfig

WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa")
"""Methods that guess from tokens, or from the model's last hidden state."""
WITH_KV = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods that keep KV as the model does."""
DRAFT_MODEL = "draft_model."
"""What the names of a draft model's layers begin with; other drafters' layers are numbered after the model's."""
VOLATILE = ("transformers_version", "max_position_embeddings", "max_seq_len")
"""Of a drafter's configuration, what does not change its KV: vLLM makes lengths suit the engine's."""


def drafter(config: VllmConfig) -> ModelConfig | None:
    """The model that guesses, if it keeps KV of its own."""
    speculative = config.speculative_config
    return speculative.draft_model_config if speculative is not None and speculative.method in WITH_KV else None


def layer_number(name: str, index: int, config: VllmConfig) -> int:
    """A layer's number in the whole model, a drafter's layers being its last. ``index``: the number in its name."""
    return index + (config.model_config.get_total_num_hidden_layers() if name.startswith(DRAFT_MODEL) else 0)


def refusals(config: VllmConfig, layer_numbers: Iterable[int]) -> list[str]:
    """What the connector does not support of this engine's speculation. ``layer_numbers``: of all layers with KV."""
    speculative, model = config.speculative_config, config.model_config
    found: list[str] = []
    if speculative is None or speculative.method in WITHOUT_KV:
        return found
    if speculative.method not in WITH_KV:
        known = ", ".join(WITHOUT_KV + WITH_KV)
        return [f"speculative decoding by {speculative.method} is not supported: use one of {known}, or none"]
    if config.parallel_config.pipeline_parallel_size > 1:
        found.append(
            f"speculative decoding by {speculative.method} in a pipeline is not supported yet: set "
            "--pipeline-parallel-size 1, or use a method without KV of its own"
        )
        return found  # only the last stage has the drafter's layers
    draft = speculative.draft_model_config
    if speculative.parallel_drafting or getattr(speculative, "use_heterogeneous_vocab", False):
        found.append(
            "speculative decoding with parallel drafting or a vocabulary of its own is not supported yet: leave "
            "parallel_drafting and use_heterogeneous_vocab out"
        )
    if draft.max_model_len < model.max_model_len:
        found.append(
            f"the drafter guesses up to {draft.max_model_len} tokens, and KV of longer requests could not be saved: "
            f"set --max-model-len to at most {draft.max_model_len}, or use another drafter"
        )
    if _shape(draft) != _shape(model):
        found.append(
            f"a drafter whose layers have {_told(draft)}, in a model whose layers have {_told(model)}, is not "
            "supported yet: use another drafter"
        )
    total = model.get_total_num_hidden_layers()
    if sum(number >= total for number in layer_numbers) != layers_of(draft, speculative.method):
        found.append(
            f"speculative decoding by {speculative.method} with a drafter that does not write KV of every layer of its "
            "own is not supported: use another drafter, or none"
        )
    return found


def layers_of(draft: ModelConfig, method: str) -> int:
    """How many layers of a drafter vLLM computes: of several MTP layers its runner for CPUs takes the first only."""
    return 1 if method == "mtp" else int(draft.get_total_num_hidden_layers())


def _shape(model: ModelConfig) -> tuple[int, int, bool]:
    return model.get_total_num_kv_heads(), model.get_head_size(), model.use_mla


def _told(model: ModelConfig) -> str:
    heads, size, latent = _shape(model)
    return f"a latent of {size}" if latent else f"{heads} KV heads of {size}"


def identity(draft: ModelConfig, config: VllmConfig) -> dict[str, Any]:
    """What must be the same for two drafters to have the same KV, their weights not included."""
    return {
        "config": _lasting(draft.hf_config.to_dict()),
        "architectures": list(draft.architectures),
        "dtype": str(draft.dtype),
        "quantization": str(draft.quantization),
        "kv": str(config.speculative_config.kv_cache_dtype or config.cache_config.cache_dtype),
    }


def _lasting(told: Any) -> Any:
    """A configuration, and those inside it, without what is volatile."""
    if not isinstance(told, dict):
        return told
    return {key: _lasting(value) for key, value in told.items() if key not in VOLATILE and not str(key).startswith("_")}
