"""A small random model that sees, made without a hub: a BLIP-2 whose image stands for eight tokens.

Of the kinds vLLM knows it is one whose processor needs nothing but Pillow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrelay.testing.models import install, write_json, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

IMAGE, IMAGE_TOKENS, IMAGE_PIXELS = "<image>", 8, 56
VOCABULARY, POSITIONS = 2048, 2048
TEXT = {
    "model_type": "opt", "hidden_size": 256, "ffn_dim": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": VOCABULARY + 64, "max_position_embeddings": POSITIONS, "word_embed_proj_dim": 256,
    "do_layer_norm_before": True, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": IMAGE_PIXELS, "patch_size": 14,
}  # fmt: skip
QUERIES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
    "encoder_hidden_size": 64, "vocab_size": VOCABULARY + 64, "cross_attention_frequency": 1,
}  # fmt: skip


def build_tiny_blip2(path: Path, *, seed: int) -> Path:
    """Make the random BLIP-2 of ``seed`` at ``path`` and return ``path``. Needs torch and transformers."""
    recipe: dict[str, object] = {"model": "tiny-blip2", "seed": seed, "version": 1}
    return install(path, recipe, lambda scratch: _write(scratch, seed))


def _write(path: Path, seed: int) -> None:
    import torch
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    write_tokenizer(path, vocabulary=VOCABULARY, positions=POSITIONS)
    image = _add_token(path / "tokenizer.json", IMAGE)
    config = Blip2Config(
        vision_config=VISION, qformer_config=QUERIES, text_config=TEXT, num_query_tokens=IMAGE_TOKENS,
        image_token_index=image,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: Any = Blip2ForConditionalGeneration(config)
    model.float().save_pretrained(path)
    norm = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    steps = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
    kind = {"image_processor_type": "BlipImageProcessor"}
    write_json(path / "preprocessor_config.json", {**kind, **steps, **norm, "size": size})
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": IMAGE_TOKENS}
    write_json(path / "processor_config.json", processor)


def _add_token(tokenizer_file: Path, text: str) -> int:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.add_special_tokens([AddedToken(text, special=True)])
    tokenizer.save(str(tokenizer_file))
    number = tokenizer.token_to_id(text)
    assert number is not None
    return int(number)
