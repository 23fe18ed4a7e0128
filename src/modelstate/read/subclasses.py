"""Tensors of classes that are made of plain ones: `__tensor_flatten__` takes them apart, `__tensor_unflatten__` makes
them again.

That runs code of the class, so only classes are used that torch itself would load (`torch.serialization.
get_safe_globals`) or that the caller allows; nothing is imported unless the caller says so.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from modelstate.codec.codec import decode
from modelstate.errors import ForbiddenGlobalError, ManifestError
from modelstate.read.pickled import Allowed
from modelstate.read.rebuild import dims
from modelstate.read.torch_globals import TorchGlobals
from modelstate.spec import Stored, StoredComposite, StoredTensor

FIELDS = ("class", "parts", "context", "shape", "stride", "dtype")


def composite(
    name: str, said: Any, known: Mapping[str, Stored], allow: Sequence[object], where: str
) -> tuple[StoredComposite, list[str]]:
    """The tensor that a manifest describes, and the names of those of its parts that are nothing but that.

    Raises `ValueError` and `CodecError` for a description that is damaged, and `ForbiddenGlobalError`.
    """
    if type(said) is not dict or set(said) != set(FIELDS):
        raise ValueError(f"not described by {', '.join(FIELDS)}")
    parts, dtype = said["parts"], decode(said["dtype"])
    if type(said["class"]) is not str or type(parts) is not dict or not isinstance(dtype, torch.dtype):
        raise ValueError("its class, parts or dtype are damaged")
    missing = [part for part in parts.values() if type(part) is not str or part not in known]
    if missing or not parts:
        raise ValueError(f"made of {str(missing)[:80]}, which is not there")
    shape, stride = dims(said["shape"]), dims(said["stride"])
    if min((*shape, *stride, 0)) < 0 or len(shape) != len(stride):
        raise ValueError(f"shape {shape}, stride {stride}")
    cls = _allowed(said["class"], allow, where, name)
    context = decode(said["context"], f"{where}: {name}")
    within = [known[part] for part in parts.values()]
    flat = [list(one.parts) if isinstance(one, StoredComposite) else [one] for one in within]
    ends = [0]
    for some in flat:
        ends.append(ends[-1] + len(some))

    def build(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        made = {}
        for attribute, one, (first, last) in zip(parts, within, pairwise(ends), strict=True):
            made[attribute] = one.build(tensors[first:last]) if isinstance(one, StoredComposite) else tensors[first]
        try:
            whole: torch.Tensor = cls.__tensor_unflatten__(made, context, torch.Size(shape), stride)
        except Exception as error:
            raise _not_made(said["class"], f"{where}: {name}", f"{type(error).__name__}: {error}") from error
        if tuple(whole.shape) != shape or whole.dtype != dtype:
            raise _not_made(said["class"], f"{where}: {name}", f"{whole.dtype} of shape {tuple(whole.shape)}")
        return whole

    every = tuple(one for some in flat for one in some if isinstance(one, StoredTensor))
    return StoredComposite(said["class"], dtype, shape, every, build), [
        part for attribute, part in parts.items() if part == f"{name}.{attribute}"
    ]


def _not_made(cls: str, where: str, found: str) -> ManifestError:
    return ManifestError(
        f"a tensor of the class {cls} cannot be made of what is stored of it",
        where=where,
        found=found[:500],
        remedy="the version of the package that defines the class may be another one; the safetensors library reads "
        "the parts alone",
    )


def _allowed(cls: str, allow: Sequence[object], where: str, name: str) -> Any:
    found = TorchGlobals(allow).find(cls)
    real = found.real if isinstance(found, Allowed) else None
    if isinstance(real, type) and issubclass(real, torch.Tensor) and hasattr(real, "__tensor_unflatten__"):
        return real
    raise ForbiddenGlobalError(
        "a tensor is of a class that is not known here, or not allowed",
        where=f"{where}: {name}",
        found=cls,
        refused=[(cls, name)],
        allow=[cls],
        remedy=f"import the package that defines it, which tells torch of its classes; or allow=[{cls!r}], which "
        "imports it and lets its code make the tensor",
    )
