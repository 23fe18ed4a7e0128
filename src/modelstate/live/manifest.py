"""What a program file of ours says of its weights: JSON in the archive, as the extra file `modelstate.json`.

Its fields: `format` and `version` of this description; the versions of `modelstate` and `torch` that wrote it; `kind`;
`tensors`, each with `name`, `shape`, `dtype`, `stride`, `role`, `mutable` and the `alias` that it is tied to; `names`,
the map of names, or `names_reason`, why there is none; `extra_state`; `inputs`, for a package; `unseen`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from modelstate.errors import ManifestError, NameMapError, NewerManifestError
from modelstate.live.name_map import NameMap
from modelstate.read.manifest import check_size
from modelstate.version import __version__
from modelstate.words import size

NAME = "modelstate.json"
"""The extra file of the archive."""
_FORMAT = "modelstate-program"
_VERSION = 1

Kind = Literal["exported", "aoti"]


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """A tensor of a program."""

    name: str
    """Its path in the module tree that runs."""
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    """In elements."""
    role: Literal["parameter", "buffer", "hidden"]
    """ "hidden" is a buffer that is in no state dict."""
    mutable: bool
    """Whether requests change it, as far as the inputs of the export tell."""
    alias: str
    """The first name of the tensor: another one where it is tied."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `modelstate.export` has written: the weights of a program, each of which can be swapped."""

    kind: Kind
    tensors: tuple[ProgramTensor, ...]
    names: NameMap | None
    """From the names of the module's `state_dict()`; None where no map can say what its hooks do."""
    names_reason: str
    """Why there is no map; empty where there is one."""
    extra_state: tuple[str, ...]
    """Names of the state dict that hold no tensors. A program has none of it."""
    unseen: tuple[str, ...]
    """Tensors whose change no answer shows, on the inputs of the export: unused ones, most often."""
    torch_version: str
    inputs: Mapping[str, Any] | None = None
    """What a package has to be called with; None where the program itself says that."""

    def __str__(self) -> str:
        weights = {one.alias: one for one in self.tensors if one.role != "hidden"}
        lines = [f"{self.kind}: {len(weights)} weights, {size(sum(one.nbytes for one in weights.values()))}"]
        if self.unseen:
            lines.append(f"  no answer shows a change of {', '.join(self.unseen[:8])}")
        if self.names is None:
            lines.append(f"  no map of names: {self.names_reason}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "modelstate": __version__,
                "torch": self.torch_version,
                "kind": self.kind,
                "tensors": [asdict(one) for one in self.tensors],
                "names": None if self.names is None else json.loads(self.names.to_json()),
                "names_reason": self.names_reason,
                "extra_state": list(self.extra_state),
                "unseen": list(self.unseen),
                "inputs": self.inputs,
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str, where: str) -> "Manifest":
        """What `to_json` has written. Raises `ManifestError`, and `NewerManifestError`."""
        try:
            check_size(text)
            found = json.loads(text)
            if found["format"] != _FORMAT:
                raise ValueError(f"format {found['format']!r}")
            if type(found["version"]) is not int or found["version"] > _VERSION:
                raise NewerManifestError(
                    "the program was written by a newer modelstate",
                    where=where,
                    expected=f"version {_VERSION} or before",
                    found=f"version {found['version']!r}, of modelstate {found.get('modelstate')!r}",
                    remedy="update modelstate",
                )
            if found["kind"] not in ("exported", "aoti"):
                raise ValueError(f"kind {found['kind']!r}")
            names = found["names"]
            return cls(
                found["kind"],
                _tensors(found["tensors"]),
                None if names is None else NameMap.from_json(json.dumps(names)),
                str(found["names_reason"]),
                tuple(map(str, found["extra_state"])),
                tuple(map(str, found["unseen"])),
                str(found["torch"]),
                found["inputs"],
            )
        except NewerManifestError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = error.what if isinstance(error, NameMapError) else f"{type(error).__name__}: {error}"
            raise ManifestError(
                "what the file says of its weights is damaged",
                where=where,
                found=what,
                remedy="export the program again, or get another copy of the file",
            ) from error


def _tensors(found: list[dict[str, Any]]) -> tuple[ProgramTensor, ...]:
    tensors = tuple(
        ProgramTensor(
            name=_text(one["name"]),
            shape=_numbers(one["shape"]),
            dtype=_text(one["dtype"]),
            stride=_numbers(one["stride"]),
            role=one["role"],
            mutable=bool(one["mutable"]),
            alias=_text(one["alias"]),
        )
        for one in found
    )
    by_name = {one.name: one for one in tensors}
    for one in tensors:
        first = by_name[one.alias]
        if not isinstance(getattr(torch, one.dtype), torch.dtype) or len(one.shape) != len(one.stride):
            raise ValueError(f"{one.name}: {one.dtype}, shape {one.shape}, stride {one.stride}")
        if one.role not in ("parameter", "buffer", "hidden"):
            raise ValueError(f"{one.name}: {one.role!r}")
        if (first.shape, first.dtype, first.stride) != (one.shape, one.dtype, one.stride):
            raise ValueError(f"{one.name} is tied to {one.alias}, which is another kind of tensor")
    if len(by_name) != len(tensors):
        raise ValueError("a name twice")
    return tensors


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} in the place of a name")
    return value


def _numbers(value: list[int]) -> tuple[int, ...]:
    if not all(type(one) is int and 0 <= one < 2**48 for one in value):
        raise ValueError(f"{value!r} in the place of sizes")
    return tuple(value)
