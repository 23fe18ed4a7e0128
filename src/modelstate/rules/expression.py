"""Tensors that are made of those of a checkpoint, without reading them before they are wanted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from modelstate.spec import Combined, Stored, StoredComposite, StoredTensor, own_bytes, pieces
from modelstate.torch_compat.plain import has_its_memory, is_plain

Change = Callable[..., torch.Tensor]
"""Makes a tensor of others, whose values it may look at or not."""


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """A tensor that is computed from others when it is wanted."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple["Source", ...]
    change: Change
    """Called with the parts. What it returns may share their memory."""
    is_certain: bool = True
    """Whether it cannot fail once the parts are there: it is no function of a user's."""

    @property
    def nbytes(self) -> int:
        """Bytes of what it is computed from."""
        return sum(_nbytes(part) for part in self.parts)

    @property
    def of_files(self) -> bool:
        """Whether it is computed from files alone, and from nothing that a load could be about to change."""
        return all(part.of_files if isinstance(part, Derived) else not on_memory(part) for part in self.parts)

    @property
    def scratch_bytes(self) -> int:
        """Memory that computing it is known to need beside its result, with the parts that are read for it."""
        parts = sum(
            part.result_bytes + part.scratch_bytes if isinstance(part, Derived) else own_bytes(part)
            for part in self.parts
        )
        return parts - self.result_bytes if self.change is _itself else parts

    @property
    def result_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def lacks_values(self) -> bool:
        """Whether it is made of tensors without values: on the meta device, or freed."""
        return any(part.lacks_values if isinstance(part, Derived) else lacks_values(part) for part in self.parts)


Source = Stored | Derived
"""Where the values of a tensor come from."""


def on_memory(stored: Stored) -> bool:
    return any(isinstance(piece, torch.Tensor) for piece in pieces(stored))


def lacks_values(stored: Stored) -> bool:
    """Whether it is, or is made of, a tensor in memory that has none: on the meta device, or freed."""
    return any(isinstance(piece, torch.Tensor) and _is_empty(piece) for piece in pieces(stored))


def _is_empty(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or (is_plain(tensor) and not has_its_memory(tensor))


def to_be_computed(stored: Stored, made: dict[Stored, Derived]) -> Source:
    """What is computed when it is wanted, as such; any other tensor as it is. `made` has those so far."""
    if not isinstance(stored, Combined):
        return stored
    if stored not in made:
        made[stored] = Derived(stored.dtype, stored.shape, (stored,), _itself, is_certain=False)
    return made[stored]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def values_of(
    source: Source,
    read: Callable[[Stored], torch.Tensor],
    on_cast: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """The values; `read` gives those of the tensors of the checkpoint.

    `on_cast` is called with the values before and after each step that changes the dtype of one tensor.
    """
    if not isinstance(source, Derived):
        return read(source)
    parts = [values_of(part, read, on_cast) for part in source.parts]
    result = source.change(*parts)
    if on_cast is not None and len(parts) == 1 and parts[0].dtype != result.dtype and parts[0].shape == result.shape:
        on_cast(parts[0], result)
    return result


def derived(change: Change, parts: Sequence[Source]) -> Source:
    """What `change`, an operation of torch, makes of tensors that have not been read.

    Where that only shows other elements of one tensor, in another order or shape, it is a tensor of the file like any
    other. Otherwise `change` is called again when the values are wanted. What it raises comes through.
    """
    stand_ins = [meta_like(part) for part in parts]
    result = change(*stand_ins)
    if len(parts) == 1 and result is stand_ins[0]:
        return parts[0]
    if len(parts) == 1 and result._base is stand_ins[0] and result.dtype == parts[0].dtype:
        shown = _shown(change, parts[0], result)
        if shown is not None:
            return shown
    return Derived(result.dtype, tuple(result.shape), tuple(parts), change)


def why_not_plain(part: Source) -> str:
    """What a tensor is, if it is more than elements in order, or less; else empty."""
    if isinstance(part, StoredComposite) and (part.kind.startswith("sparse") or "." in part.kind):
        return f"it is {part.kind}, and not a plain tensor"
    if isinstance(part, torch.Tensor):
        if not is_plain(part):
            return f"it is {type(part).__name__} of layout {part.layout}, and not a plain tensor"
        if not part.is_meta and part.numel() and part.untyped_storage().nbytes() == 0:
            return "its memory has been taken away"
    return ""


def _nbytes(part: Source) -> int:
    return part.numel() * part.itemsize if isinstance(part, torch.Tensor) else part.nbytes


def meta_like(part: Source) -> torch.Tensor:
    """A tensor without values that is like this one."""
    if isinstance(part, StoredTensor):
        return torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
    if isinstance(part, torch.Tensor):
        return part.detach().to("meta")
    return torch.empty(part.shape, dtype=part.dtype, device="meta")


def _shown(change: Change, part: Source, view: torch.Tensor) -> Stored | None:
    if isinstance(part, StoredTensor):
        offset = part.offset + int(view.storage_offset()) if view.numel() else 0
        if view.is_conj() or view.is_neg():
            return None
        return StoredTensor(part.dtype, tuple(view.shape), tuple(view.stride()), part.storage, offset)
    return change(part.detach()) if isinstance(part, torch.Tensor) else None
