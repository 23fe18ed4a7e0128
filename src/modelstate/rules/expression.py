"""Source expressions: tensors that are computed from the tensors of a checkpoint when their values are needed.

Building an expression reads no values: shapes and dtypes are computed with tensors on the meta device. An operation
that only selects or reorders elements of one stored tensor yields another stored tensor, so that only its bytes are
read.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from modelstate.spec import Combined, Stored, StoredComposite, StoredTensor, own_bytes, pieces
from modelstate.torch_compat.plain import has_its_memory, is_plain

Change = Callable[..., torch.Tensor]
"""Computes a tensor from others, with or without looking at their values."""


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """A tensor that is computed from other tensors when its values are needed."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple["Source", ...]
    change: Change
    """Called with the values of the parts. Its result may share their memory."""
    is_certain: bool = True
    """Whether `change` cannot fail once the parts have been read: it is not a user's function."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parts."""
        return sum(_nbytes(part) for part in self.parts)

    @property
    def of_files(self) -> bool:
        """Whether all parts come from files, so that a load cannot change them while it runs."""
        return all(part.of_files if isinstance(part, Derived) else not _is_in_memory(part) for part in self.parts)

    @property
    def scratch_bytes(self) -> int:
        """Memory that the computation needs beside its result, including the parts that are read for it."""
        parts = sum(
            part.result_bytes + part.scratch_bytes if isinstance(part, Derived) else own_bytes(part)
            for part in self.parts
        )
        return parts - self.result_bytes if self.change is _identity else parts

    @property
    def result_bytes(self) -> int:
        """Bytes of the result, when it is dense."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def lacks_values(self) -> bool:
        """Whether a part has no values: it is on the meta device, or its memory has been freed."""
        return any(part.lacks_values if isinstance(part, Derived) else lacks_values(part) for part in self.parts)


Source = Stored | Derived
"""Where the values of a tensor come from."""


def derive(change: Change, parts: Sequence[Source]) -> Source:
    """Returns the result of `change`, an operation of torch, on tensors whose values have not been read.

    If the result only shows elements of one tensor in another order or shape, it is a stored tensor like any other.
    Otherwise it is a `Derived`, which calls `change` again with the values. Raises what `change` raises.
    """
    inputs = [meta_like(part) for part in parts]
    result = change(*inputs)
    if len(parts) == 1 and result is inputs[0]:
        return parts[0]
    if len(parts) == 1 and result._base is inputs[0] and result.dtype == parts[0].dtype:
        view = _stored_view(change, parts[0], result)
        if view is not None:
            return view
    return Derived(result.dtype, tuple(result.shape), tuple(parts), change)


def _stored_view(change: Change, part: Source, view: torch.Tensor) -> Stored | None:
    """Returns the view of `part` that `view` shows on the meta device; None if it cannot be a stored tensor."""
    if isinstance(part, StoredTensor):
        offset = part.offset + int(view.storage_offset()) if view.numel() else 0
        if view.is_conj() or view.is_neg():
            return None
        return StoredTensor(part.dtype, tuple(view.shape), tuple(view.stride()), part.storage, offset)
    return change(part.detach()) if isinstance(part, torch.Tensor) else None


def values_of(
    source: Source,
    read: Callable[[Stored], torch.Tensor],
    on_cast: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """Computes the values of a source.

    Args:
        source: a stored tensor or an expression.
        read: returns the values of a tensor of the checkpoint.
        on_cast: called with the values before and after each step that changes the dtype of one tensor.
    """
    if not isinstance(source, Derived):
        return read(source)
    parts = [values_of(part, read, on_cast) for part in source.parts]
    result = source.change(*parts)
    if on_cast is not None and len(parts) == 1 and parts[0].dtype != result.dtype and parts[0].shape == result.shape:
        on_cast(parts[0], result)
    return result


def to_be_computed(stored: Stored, computed: dict[Stored, Derived]) -> Source:
    """Wraps a `Combined` tensor in a `Derived`; returns any other tensor as it is.

    `computed` caches the wrappers, so that equal tensors share one.
    """
    if not isinstance(stored, Combined):
        return stored
    if stored not in computed:
        computed[stored] = Derived(stored.dtype, stored.shape, (stored,), _identity, is_certain=False)
    return computed[stored]


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def meta_like(source: Source) -> torch.Tensor:
    """Returns a tensor on the meta device with the shape and dtype of the source, and its strides if it has any."""
    if isinstance(source, StoredTensor):
        return torch.empty_strided(source.shape, source.stride, dtype=source.dtype, device="meta")
    if isinstance(source, torch.Tensor):
        return source.detach().to("meta")
    return torch.empty(source.shape, dtype=source.dtype, device="meta")


def why_not_plain(source: Source) -> str:
    """Returns why the elements of a tensor cannot be changed by rules; empty if they can."""
    if isinstance(source, StoredComposite) and (source.kind.startswith("sparse") or "." in source.kind):
        return f"it is {source.kind}, and not a plain tensor"
    if isinstance(source, torch.Tensor):
        if not is_plain(source):
            return f"it is {type(source).__name__} of layout {source.layout}, and not a plain tensor"
        if not source.is_meta and source.numel() and source.untyped_storage().nbytes() == 0:
            return "its memory has been freed"
    return ""


def lacks_values(stored: Stored) -> bool:
    """Whether it is, or contains, a tensor in memory without values: on the meta device, or with freed memory."""
    return any(
        isinstance(piece, torch.Tensor) and (piece.is_meta or (is_plain(piece) and not has_its_memory(piece)))
        for piece in pieces(stored)
    )


def _is_in_memory(stored: Stored) -> bool:
    return any(isinstance(piece, torch.Tensor) for piece in pieces(stored))


def _nbytes(part: Source) -> int:
    return part.numel() * part.itemsize if isinstance(part, torch.Tensor) else part.nbytes
