"""What the launcher's settings and the pool's have in common: dotted paths, tables, and how values are shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Collection


class Settings(BaseModel):
    """Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def leaves_of(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every setting of ``model``: dotted path to its pydantic field, in order."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            found |= leaves_of(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


def flatten(tree: Mapping[str, Any], whole: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Nested tables to dotted paths. Those in ``whole`` are free-form, and stay as they are."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = prefix + name
        if isinstance(value, dict) and path not in whole:
            flat |= flatten(value, whole, path + ".")
        else:
            flat[path] = value
    return flat


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted paths to nested tables."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *tables, leaf = path.split(".")
        node = tree
        for table in tables:
            inner = node.setdefault(table, {})
            if not isinstance(inner, dict):
                break  # "prefill = 2" in the file: validation reports that it is no table
            node = inner
        else:
            node[leaf] = value
    return tree


def has_zero_byte(value: object) -> bool:
    """Whether a text in ``value``, or anywhere below it, has a zero byte: no path, argument or variable can."""
    if isinstance(value, Mapping):
        return any(map(has_zero_byte, value)) or any(map(has_zero_byte, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_zero_byte, value))
    return "\0" in value if isinstance(value, str) else False


def zero_byte_problem(name: str, value: object, origin: str) -> str:
    """What is told of it."""
    return f"{name} = {value!r} (from {origin}): a text has a zero byte in it: leave it out"


def toml(value: object) -> str:
    """A value as TOML; entries of a table that are not set are left out."""
    if isinstance(value, dict):
        pairs = ((key, entry) for key, entry in value.items() if entry is not None)
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(entry)}" for key, entry in pairs) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(entry) for entry in value) + "]"
    return json.dumps(value)  # strings, numbers and booleans are written alike in JSON and TOML
