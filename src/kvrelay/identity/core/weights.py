"""What weights are called: by the commit a hub's snapshot was made from, or by the content of all their files."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".safetensors.index.json", ".bin.index.json")
CODE_SUFFIX = ".py"
"""Of a model that brings the code it is computed with."""
ADAPTER_SUFFIXES = (*WEIGHT_SUFFIXES, ".tensors", "adapter_config.json")
"""Rank, scaling and target modules are in an adapter's configuration: they are weights, too."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_identity(folder: tuple[str, ...]) -> str | None:
    """Identity of a model in a hub's cache, ``.../models--ORG--NAME/snapshots/COMMIT``; None of any other folder.

    ``folder``: the parts of its resolved path.
    """
    match folder[-3:]:
        case (model, "snapshots", commit) if _COMMIT.fullmatch(commit):
            return f"hub:{model}@{commit}"
    return None


def digest_of_files(files: Iterable[tuple[str, str]]) -> str:
    """SHA-256, in hexadecimal, over the names and digests of files, in their order."""
    total = sha256()
    for name, digest in files:
        total.update(f"{len(name)}:{name}:{digest}\n".encode())
    return total.hexdigest()
