"""How KV lies in pool objects: canonical, for engines of any block size and backend, or as the engine has it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.connector.facts import ModelFacts

CANONICAL, NATIVE = "canonical", "native"
PACKINGS = (CANONICAL, NATIVE)
NATIVE_FORMAT = "native-1"


def in_native_packing(model: ModelFacts, codecs: Sequence[str], chunk_tokens: int) -> ModelFacts:
    """A model whose objects hold whole blocks, copied as they are, so that only engines with equal blocks share them.

    ``codecs``: of each group. Raises `ConfigError` where chunks do not end at the blocks' bounds.
    """
    groups = []
    for at, group in enumerate(model.groups.geometry.groups):
        sizes = {table.block_tokens for table in model.groups.tables.tables if table.group == at}
        if len(sizes) != 1:
            raise ConfigError(
                f"packing 'native' needs blocks of one size in a group of layers, not {sorted(sizes)} tokens: set "
                "packing to 'canonical'"
            )
        (block_tokens,) = sizes
        if chunk_tokens % block_tokens:
            raise ConfigError(
                f"packing 'native' needs chunk_tokens to be a multiple of the block size: {chunk_tokens} is not one of "
                f"{block_tokens}; set chunk_tokens to {-(-chunk_tokens // block_tokens) * block_tokens}, choose "
                "another --block-size, or set packing to 'canonical'"
            )
        groups.append(replace(group, block_tokens=block_tokens))
    return replace(
        model,
        groups=replace(model.groups, geometry=replace(model.groups.geometry, groups=tuple(groups))),
        facts={
            **model.facts,
            "packing": NATIVE_FORMAT,
            "codec": ",".join(codecs),
            "block_tokens": ",".join(str(group.block_tokens) for group in groups),
        },
    )
