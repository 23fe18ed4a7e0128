"""The manifest of a file: what safetensors has no word for, as text for its `__metadata__`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from modelstate.codec.codec import encode
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.manifest import FORMAT
from modelstate.spec import Contents
from modelstate.version import __version__
from modelstate.write.safetensors import why_not


@dataclass(slots=True)
class Draft:
    """What goes into a file: tensors under names, and the manifest."""

    tensors: dict[str, torch.Tensor]
    """Of those that are the same bytes only the first, and then those of values that are no tensors."""
    aliases: dict[str, str]
    """The other names of tensors, with the name that has the bytes."""
    versions: Any
    extra: dict[str, Any] = field(default_factory=dict)
    """Values that are no tensors, encoded."""
    extra_tensors: list[str] = field(default_factory=list)
    """The names of their tensors."""

    def text(self, schema: str | None) -> str:
        manifest: dict[str, Any] = {"format": FORMAT, "writer": f"modelstate {__version__}"}
        if schema is not None:
            manifest["schema"] = schema
        for key in ("aliases", "versions", "extra", "extra_tensors"):
            if value := getattr(self, key):
                manifest[key] = value
        return json.dumps(manifest, allow_nan=False, separators=(",", ":"))


def draft(
    tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], versions: Mapping[str, Any] | None, where: str
) -> Draft:
    """Sorts out what goes where. Raises `UnsupportedValueError` for a value that cannot be encoded."""
    others = {other: first for first, *rest in _ties(tensors) for other in rest}
    made = Draft({name: tensor for name, tensor in tensors.items() if name not in others}, others, None)
    prefix = _free_prefix(tensors)

    def put(tensor: torch.Tensor) -> str:
        name = f"{prefix}{len(made.extra_tensors)}"
        if problem := why_not(name, tensor):
            raise ValueError(problem)
        made.tensors[name] = tensor
        made.extra_tensors.append(name)
        return name

    for name, value in values.items():
        made.extra[name] = encode(value, f"{where}: {name}", leaf=put)
    if versions is not None:
        saved = {str(path): dict(kept) for path, kept in versions.items() if isinstance(kept, Mapping)}
        made.versions = encode(saved, f"{where}: _metadata", leaf=put)
    return made


def _ties(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    return Checkpoint(Contents("mapping", dict(tensors)), source="state dict").aliases


def _free_prefix(names: Iterable[str]) -> str:
    prefix = "_modelstate_extra."
    while any(name.startswith(prefix) for name in names):
        prefix = "_" + prefix
    return prefix
