from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from kvrelay.errors import ConfigError
from kvrelay.testing.models import STAMP, build_tiny_llama, change_one_weight

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm  # torch and tokenizers come with it


def digests(model: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in model.iterdir()}


def test_equal_recipes_give_equal_bytes_and_another_seed_gives_other_weights(tmp_path: Path) -> None:
    first, second, third = (
        build_tiny_llama(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert digests(first) == digests(second)
    different = {name for name, digest in digests(first).items() if digest != digests(third)[name]}
    assert different == {"model.safetensors", STAMP}


def test_a_model_that_is_there_is_left_alone_and_one_of_another_recipe_is_replaced(tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path / "m", seed=1)
    built = (model / "model.safetensors").stat().st_mtime_ns
    build_tiny_llama(model, seed=1)
    assert (model / "model.safetensors").stat().st_mtime_ns == built
    build_tiny_llama(model, seed=1, layers=2)
    assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_directory_that_was_not_built_here_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(ConfigError, match="is not a model built here"):
        build_tiny_llama(tmp_path, seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_the_tokenizer_has_a_chat_template_and_loses_nothing(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = build_tiny_llama(tmp_path / "m", seed=1)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "déjà vu: 漢字 and\n\ttabs <|begin|>user"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert "add_generation_prompt" in json.loads((model / "tokenizer_config.json").read_text())["chat_template"]


def test_one_changed_weight_changes_the_weights_file_alone(tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path / "m", seed=1)
    changed = digests(change_one_weight(model, tmp_path / "changed"))
    original = digests(model)
    del original[STAMP]
    assert {name for name in original if original[name] != changed[name]} == {"model.safetensors"}
