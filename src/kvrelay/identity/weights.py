"""Weights identity: which weights made a KV cache.

Local models are identified by the whole content of their weight files; hub models by the commit their snapshot was
resolved to.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.identity.core.weights import CODE_SUFFIX, WEIGHT_SUFFIXES, digest_of_files, hub_identity
from kvrelay.identity.digests import files_ending_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.identity.digests import DigestCache


CLOCKS_S = 0.1
"""How far the clocks by which files change and processes begin may be apart on one machine."""


def weights_identity(model: str, cache: DigestCache, *, begun: float | None = None, code: bool = False) -> str:
    """Identity of the weights ``model`` names: a folder, a weight file, or the snapshot folder of a hub model.

    ``begun``: when the process that has read them began, Unix seconds, if it has: it need not have read what is there.
    ``code``: the folder's Python files count, too.

    Raises `ConfigError` when there is nothing to identify, or what is there came later; the mend of the first is the
    connector's ``weights_id``.
    """
    path = Path(model)
    mend = "; set weights_id in kv_connector_extra_config to a name that changes whenever the weights do"
    if path.is_dir():
        files = files_ending_in(path, WEIGHT_SUFFIXES)
        in_hub = hub_identity(path.resolve().parts)
        # The hub's cache links to blobs named by content; a plain file there was put in by hand.
        if in_hub is not None and files and all(file.is_symlink() for file in files):
            return in_hub
    elif path.is_file():
        files = [path]
    else:
        raise ConfigError(f"the weights of {model!r} cannot be identified: no such folder or file{mend}")
    if not files:
        raise ConfigError(f"the weights of {model!r} cannot be identified: no file ending in {WEIGHT_SUFFIXES}{mend}")
    if code and path.is_dir():
        files = files_ending_in(path, (*WEIGHT_SUFFIXES, CODE_SUFFIX))
    if begun is not None and (late := _changed_since(path, files, begun + CLOCKS_S)) is not None:
        raise ConfigError(
            f"{late} was changed while this engine was being started, so nobody knows which weights it has read: "
            "start it again"
        )
    # A lone file's name says nothing about its weights; within a folder names tell shards apart.
    digest = digest_of_files((file.name if path.is_dir() else "", cache.digest(file)) for file in files)
    cache.save()
    return f"sha256:{digest}"


def _changed_since(path: Path, files: Sequence[Path], moment: float) -> Path | None:
    """What has changed of weight files, or of links on the way to them, since a moment."""
    links = [one for one in (path, *path.absolute().parents, *files) if one.is_symlink()]
    changed = [(file, file.stat()) for file in files] + [(link, link.lstat()) for link in links]
    return next((name for name, seen in changed if seen.st_ctime > moment), None)
