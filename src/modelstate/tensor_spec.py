"""`TensorSpec`: what `modelstate.open` says of a tensor. It is no tensor, and refuses to be used as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import msgspec

from modelstate.errors import TensorSpecError
from modelstate.spec import DTYPES, ByteRange, Combined, Described, Stored, StoredTensor, StoredTensors, elements_bytes

if TYPE_CHECKING:
    import numpy as np
    import torch


class TensorSpec(msgspec.Struct, frozen=True, eq=False):
    """Describes a tensor of a checkpoint without its data: name, shape, dtype, and where it is stored.

    `checkpoint.tensor(name)` reads the values. Operators, functions of torch and methods of `torch.Tensor` raise
    `TensorSpecError`.

    Examples:
        >>> import modelstate, torch
        >>> spec = modelstate.open({"bias": torch.zeros(4)})["bias"]
        >>> spec.nbytes
        16
    """

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    """The name that torch has for the dtype: "float32"."""
    _stored: Stored | None = None
    """None for a tensor of a table."""
    _tensors: StoredTensors | None = None
    """The table of the tensor, if it has one."""

    @property
    def stored(self) -> Stored:
        """Where the tensor is. That of a table is created when it is first accessed."""
        if self._tensors is not None:
            return self._tensors[self.name]
        assert self._stored is not None
        return self._stored

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSpec):
            return NotImplemented
        return (self.name, self.shape, self.dtype_name) == (other.name, other.shape, other.dtype_name)

    def __hash__(self) -> int:
        return hash((self.name, self.shape, self.dtype_name))

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles the tensor without the others of its file."""
        return TensorSpec, (self.name, self.shape, self.dtype_name, self.stored)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype. Imports torch, unlike `dtype_name`."""
        return DTYPES.get(self.dtype_name) or self.stored.dtype

    def __repr__(self) -> str:
        return f"TensorSpec(name={self.name!r}, shape={self.shape}, dtype=torch.{self.dtype_name})"

    @property
    def stride(self) -> tuple[int, ...]:
        """The stride in elements; empty for a composite tensor."""
        if isinstance(self.stored, Described):
            return self.stored.stride if isinstance(self.stored, StoredTensor) else ()
        return tuple(self.stored.stride()) if self.kind == "strided" else ()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; a view with repeated elements counts each of them."""
        if self._tensors is not None:
            return self._tensors.extent(self.name).nbytes
        stored = self.stored
        if isinstance(stored, Combined):
            return math.prod(stored.shape) * stored.dtype.itemsize
        return elements_bytes(stored)

    @property
    def kind(self) -> str:
        """ "strided", or the layout or type of a tensor that is not."""
        if self._tensors is not None or isinstance(self.stored, StoredTensor):
            return "strided"
        if isinstance(self.stored, Described):
            return self.stored.kind
        return str(self.stored.layout).removeprefix("torch.")

    @property
    def location(self) -> ByteRange | None:
        """The bytes of the file that hold the elements; None for a tensor in memory and for a composite."""
        if self._tensors is not None:
            return self._tensors.extent(self.name)
        return self.stored.extent if isinstance(self.stored, StoredTensor) else None


def specs_of(tensors: StoredTensors, names: Iterable[str]) -> Iterator[TensorSpec]:
    """Describes tensors of a table. The `StoredTensor` of each is created when it is first accessed."""
    rows, shapes, dtype_names = tensors.rows, tensors.columns.shapes, tensors.columns.dtype_names
    for name in names:
        yield TensorSpec(name, shapes[rows[name]], dtype_names[rows[name]], None, tensors)


def _spec_error(spec: TensorSpec, used: str) -> TensorSpecError:
    return TensorSpecError(
        "this is the description of a stored tensor, not the tensor",
        where=spec.name,
        expected="a torch.Tensor",
        found=f"a TensorSpec, on which {used} was called",
        remedy=f"read it first: checkpoint.tensor({spec.name!r})",
    )


def _refused_attribute(self: TensorSpec, name: str) -> NoReturn:
    """Runs for an attribute that a description lacks: refuses those of a tensor."""
    if not name.startswith("_"):
        import torch

        if hasattr(torch.Tensor, name):
            raise _spec_error(self, f".{name}")
    raise AttributeError(f"'TensorSpec' object has no attribute {name!r}")


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: TensorSpec, *_: object, **__: object) -> NoReturn:
        raise _spec_error(self, name)

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def _refuse_function(
    cls: type[TensorSpec],
    function: object,
    types: object,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> NoReturn:
    """Runs where a function of torch is called with a `TensorSpec`."""
    values = (*args, *(kwargs or {}).values())
    flat = (item for value in values for item in (value if isinstance(value, list | tuple) else (value,)))
    spec = next(item for item in flat if isinstance(item, cls))
    raise _spec_error(spec, getattr(function, "__name__", str(function)))


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OTHERS = "neg pos abs invert lt le gt ge float int complex getitem setitem len"
_REFUSED = (
    *(f"__{side}{name}__" for name in _BINARY.split() for side in ("", "r")),
    *(f"__{name}__" for name in _OTHERS.split()),
)


def _as_array(self: TensorSpec, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
    """Called by NumPy. An array of dtype object, such as a column of a table, holds the description itself."""
    import numpy as np

    if dtype is None or np.dtype(dtype) != np.dtype(object):
        raise _spec_error(self, "__array__")
    array = np.empty((), dtype=object)
    array[()] = self
    return array


for _name in _REFUSED:  # set here and not in the class, so that type checkers report these uses
    setattr(TensorSpec, _name, _refusal(_name))
TensorSpec.__getattr__ = _refused_attribute  # type: ignore[attr-defined]
TensorSpec.__array__ = _as_array  # type: ignore[attr-defined]
TensorSpec.__bool__ = lambda self: True  # type: ignore[attr-defined]  # Python would call __len__ otherwise
TensorSpec.__torch_function__ = classmethod(_refuse_function)  # type: ignore[attr-defined]
