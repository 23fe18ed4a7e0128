"""The names that a pickle of torch may contain, and what each of them becomes.

The allowed names are those of torch's own `weights_only` loading. A call that would rebuild a tensor is described
instead, so no tensor is created here, and no function that the pickle chooses is called. A tensor that is not
supported, or whose description contradicts itself, becomes a `Refused`, so that the error can name its place.

The keys of `FUNCTIONS`, and their arguments, are those that torch.save has written since 0.2.
"""

from __future__ import annotations

import codecs
import enum
import math
import pkgutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from modelstate.errors import DamagedFileError, OpenError, SourceTypeError, UnsupportedTensorError
from modelstate.formats.unpickle import (
    MAX_ARGUMENTS,
    Allowed,
    DeferredCall,
    DeferredTensor,
    Keys,
    SafeGlobal,
    Storage,
    damaged,
    invalid,
    typed,
)
from modelstate.spec import Refused, StoredTensor
from modelstate.text_format import short_repr
from modelstate.torch_compat.dtypes import QUANTIZED
from modelstate.torch_compat.plain import SPARSE_PARTS
from modelstate.torch_compat.private import storage_dtypes, wrapper_subclass

_QUANTIZED = (
    "save its dequantize()d form; or, for a model that has such tensors too: "
    "ms.load_state_dict(model, torch.load(path))"
)
STORAGE_DTYPES = {**storage_dtypes(), "UntypedStorage": torch.uint8, "_UntypedStorage": torch.uint8}
"""The storage classes that a pickle may name, and the dtype of each, which stands for it."""

NEVER = frozenset({"os", "posix", "nt", "sys", "subprocess", "builtins.eval", "builtins.exec", "builtins.compile"}) | {
    f"builtins.{name}" for name in ("setattr", "delattr", "__import__", "open", "globals", "breakpoint")
}
"""Modules and functions that are refused even if the caller allows them: to allow them is to run the file."""


def storage_of(key: tuple[object, ...], length: int) -> tuple[torch.dtype, str, int] | Refused:
    """Returns the dtype, the name and the number of elements of the storage that a persistent id names.

    Returns the class alone where it is not allowed. Raises `DamagedFileError`.
    """
    if len(key) != length or key[0] not in ("storage", b"storage"):
        raise damaged("a persistent id that is not a storage", len(key))
    _, cls, name, _, numel = key[:5]
    if type(cls) is Refused:
        return cls
    name = str(name) if type(name) is int else name
    is_name = type(name) is str and len(name) <= 100
    dtype = cls.real if type(cls) is SafeGlobal else None
    if not isinstance(dtype, torch.dtype) or not is_name or type(numel) is not int or not 0 <= numel < 2**60:
        raise damaged("the description of a storage is not valid")
    return dtype, str(name), numel


class TorchGlobals:
    """Looks up the names in a torch checkpoint."""

    def __init__(self, allow: Sequence[object] = ()) -> None:
        """`allow` has classes and functions, their qualified names, or pairs of both as torch accepts them."""
        self.by_name: dict[str, object] = {}
        self.to_import: set[str] = set()
        self.refused: set[str] = set()
        self.failed: dict[str, str] = {}
        """The reasons why allowed names could not be imported."""
        for registered in torch.serialization.get_safe_globals():
            named = _named(registered)
            if named:
                self.by_name.setdefault(*named)
        for entry in allow:
            named = _named(entry)
            if isinstance(entry, str):
                self.to_import.add(entry)
            elif named:
                self.by_name[named[0]] = named[1]
            else:
                raise SourceTypeError(
                    "what is allowed must have a name",
                    where="allow",
                    expected="classes, functions, or their qualified names as text",
                    found=short_repr(entry),
                )

    def find(self, name: str) -> object:
        """Returns what a name stands for; a `Refused` if it is not allowed."""
        known = BUILTIN.get(name)
        if known is None and not {name, *_moved(name)} & (self.by_name.keys() | self.to_import):
            known = NUMPY.get(name)  # what the caller allows by name is called as it is
        if known is not None:
            return known
        if name == "builtins.getattr":
            return SafeGlobal(name, self.attribute, takes_inert=True)
        module, _, last = name.rpartition(".")
        if last in STORAGE_DTYPES and (module in ("torch", "torch.storage") or module in _DEVICE_MODULES):
            return SafeGlobal(name, real=STORAGE_DTYPES[last])
        if not is_never(name):
            # NumPy has moved the functions that every array refers to.
            for alias in (name, *_moved(name)):
                if alias in self.by_name:
                    return Allowed(name, self.by_name[alias])
                if alias in self.to_import:
                    try:
                        return Allowed(name, pkgutil.resolve_name(alias))
                    except Exception as error:
                        # An import runs the code of the module, which may raise anything.
                        self.failed[name] = f"{type(error).__name__}: {error}"
        self.refused.add(name)
        return Refused(name)

    def attribute(self, parent: object, name: object) -> object:
        """Replaces `getattr`, by which a pickle names nested classes and members of enums, without calling it."""
        if not isinstance(parent, Allowed | Refused) or type(name) is not str or len(name) > 1000:
            raise damaged("getattr of a value that is not a class", str(name)[:100])
        if isinstance(parent, Allowed) and isinstance(parent.real, enum.EnumType) and name in parent.real.__members__:
            return Allowed(f"{parent.name}.{name}", parent.real.__members__[name])
        value = self.find(f"{parent.name}.{name}")
        self.refused.discard(parent.name)
        return value


_MOVED = (("numpy.core.", "numpy._core."), ("numpy._core.", "numpy.core."))


def _moved(name: str) -> list[str]:
    return [new + name.removeprefix(old) for old, new in _MOVED if name.startswith(old)]


_DEVICE_MODULES = frozenset(f"torch.{device}" for device in ("cuda", "xpu", "hpu", "mps", "npu", "mtia"))


def is_never(name: str) -> bool:
    """Whether the name is refused even if the caller allows it."""
    return name in NEVER or name.partition(".")[0] in NEVER


def _named(entry: object) -> tuple[str, object] | None:
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], str):
        return entry[1], entry[0]
    module, name = getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)
    return (f"{module}.{name}", entry) if isinstance(module, str) and isinstance(name, str) else None


# Functions that create plain values. Each copies at most its arguments.


def _ordered_dict(pairs: Any = ()) -> OrderedDict[object, object]:
    return OrderedDict(zip(Keys().checked(key for key, _ in pairs), [value for _, value in pairs], strict=True))


def _counter(*counts: object) -> Counter[object]:
    return Counter(*(typed(part, dict, "counts that are not a dict") for part in counts))


def _raw(value: object = b"", encoding: str = "latin-1") -> bytes:
    if isinstance(value, str):
        if encoding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
            raise damaged("bytes in an encoding that pickle does not use", encoding)
        return value.encode(encoding)
    if not isinstance(value, bytes | bytearray):
        # A number would be taken as the size to allocate.
        raise damaged("bytes from a value that is not bytes", type(value).__name__)
    return bytes(value)


def _layout(name: object) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(layout, torch.layout):
        raise damaged("an unknown layout", str(name)[:100])
    return layout


_VALUES: dict[str, tuple[Callable[..., object], object]] = {
    "collections.OrderedDict": (_ordered_dict, OrderedDict),
    "collections.Counter": (_counter, Counter),
    "builtins.set": (lambda values=(): set(Keys().checked(values)), set),
    "builtins.frozenset": (lambda values=(): frozenset(Keys().checked(values)), frozenset),
    "builtins.bytearray": (lambda *args: bytearray(_raw(*args)), bytearray),
    "builtins.bytes": (_raw, bytes),
    "builtins.complex": (complex, complex),
    "_codecs.encode": (_raw, codecs.encode),
    "torch.Size": (lambda values=(): torch.Size(dims(values)), torch.Size),
    "torch.device": (lambda kind, *index: torch.device(kind, *index), torch.device),
    "torch.serialization._get_layout": (_layout, None),
}


# NumPy: its scalars, arrays and dtypes are plain data, and need no `allow=`. The functions have the arguments of those
# of NumPy, and call none of these: NumPy's own take objects, and trust the sizes and flags of a state. An array is a
# read-only view of the bytes in the pickle. `rebuild` copies it.

_NUMPY_KINDS = "biufcSUMm"
_RECONSTRUCT = "numpy._core.multiarray._reconstruct"


def _numpy_dtype(
    text: object, _align: object = False, _copy: object = True, state: object = None
) -> np.dtype[np.generic]:
    """`numpy.dtype`, with the state that follows it: byte order, size of text, unit of time."""
    if type(text) is not str or len(text) > 100:
        raise damaged("a dtype of NumPy without a name")
    dtype = np.dtype(text)
    if state is None:
        return dtype
    if type(state) is not tuple or len(state) not in (8, 9) or state[1] not in ("<", ">", "|", "="):
        raise damaged("the state of a dtype of NumPy is not valid")
    _, order, *structure, nbytes, _, _ = state[:8]
    if dtype.kind in "SU" and type(nbytes) is int and 0 <= nbytes < 2**31:
        dtype = np.dtype((dtype.type, nbytes // (4 if dtype.kind == "U" else 1)))
    elif dtype.kind in "Mm":
        (unit, count, *_) = state[8][1] if len(state) == 9 else ("generic", 1)
        unit = unit.decode("ascii") if isinstance(unit, bytes) else unit
        if unit != "generic":
            dtype = np.dtype(f"{dtype.kind}8[{int(count)}{unit}]")
    elif dtype.kind not in "biufcO" or any(part is not None for part in structure):
        raise UnsupportedTensorError(
            f"a structured dtype of NumPy ({text}) is not supported",
            remedy="save an array of a plain dtype for each field",
        )
    return dtype.newbyteorder(order) if order in "<>" else dtype


def _numpy_scalar(dtype: object, data: object = b"") -> object:
    """`numpy._core.multiarray.scalar`."""
    kind = _plain_dtype(dtype)
    return np.frombuffer(_numpy_bytes(data), kind).reshape(())[()] if kind.itemsize else kind.type()


def _numpy_array(cls: object, _shape: object, _code: object, state: object = None) -> object:
    """`numpy._core.multiarray._reconstruct`, with the state that follows it."""
    if cls is not np.ndarray or type(state) is not tuple or len(state) != 5:
        raise damaged("the state of an array of NumPy is not valid")
    _, shape, dtype, is_fortran, data = state
    return _numpy_view(data, dtype, shape, "F" if is_fortran else "C")


def _numpy_view(data: object, dtype: object, shape: object, order: Any, _axes: object = None) -> object:
    """`numpy._core.numeric._frombuffer`, as which protocol 5 writes an array."""
    if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape):
        raise damaged("the shape of an array of NumPy is not valid")  # NumPy would work out a size of -1
    kind = _plain_dtype(dtype)
    return np.frombuffer(_numpy_bytes(data), kind).reshape(shape, order=order)


def _plain_dtype(dtype: object) -> np.dtype[np.generic]:
    if not isinstance(dtype, np.dtype):
        raise damaged("a dtype of NumPy that is not one", type(dtype).__name__)
    if dtype.kind == "O":
        raise UnsupportedTensorError(
            "an array of NumPy with objects in it is not supported",
            remedy=f'save its tolist(); or, if you trust the file: allow=["{_RECONSTRUCT}"]',
        )
    if dtype.kind not in _NUMPY_KINDS:
        raise damaged("a dtype of NumPy that is not plain", str(dtype)[:80])
    return dtype


def _numpy_bytes(data: object) -> bytes | bytearray:
    if isinstance(data, str):
        return data.encode("utf-8")  # a string of Python 2 that happened to be UTF-8
    if not isinstance(data, bytes | bytearray):
        raise damaged("the values of NumPy are not bytes", type(data).__name__)
    return data


def _numpy_names(name: str, make: Callable[..., object], takes_state: bool = False) -> dict[str, SafeGlobal]:
    """The function under its names in NumPy 1 and 2."""

    def call(*args: object) -> DeferredCall:
        return DeferredCall(f"numpy.{name}", make, args, takes_state=takes_state)

    names = {f"numpy.{name}", f"numpy.{name}".replace("_core.", "core.")}
    return {name: SafeGlobal(name, call) for name in names}


NUMPY: dict[str, SafeGlobal] = {
    **_numpy_names("dtype", _numpy_dtype, takes_state=True),
    **_numpy_names("_core.multiarray.scalar", _numpy_scalar),
    **_numpy_names("_core.multiarray._reconstruct", _numpy_array, takes_state=True),
    **_numpy_names("_core.numeric._frombuffer", _numpy_view),
    "numpy.ndarray": SafeGlobal("numpy.ndarray", real=np.ndarray),
}
"""By the names in a pickle."""


# Functions that describe tensors.


MAX_DIMS = 64
MAX_INDEX = 2**63

_INTEGERS = frozenset({int})

Rebuilt = StoredTensor | DeferredTensor | Refused
"""What a function that rebuilds a tensor returns here."""


def dims(values: object) -> tuple[int, ...]:
    """The values as a tuple of at most 64 integers of 64 bits. Raises `DamagedFileError`."""
    if not isinstance(values, tuple | list):
        raise damaged("a shape that is not a tuple", type(values).__name__)
    if len(values) > MAX_DIMS:
        raise DamagedFileError("a tensor of too many dimensions", expected=f"at most {MAX_DIMS}", found=len(values))
    if not _INTEGERS.issuperset(map(type, values)):
        raise damaged("a shape that is not made of integers")
    if values and not -MAX_INDEX <= min(values) <= max(values) < MAX_INDEX:
        raise DamagedFileError("a tensor has more elements than any memory", found="a size above 2**63")
    return tuple(values)


def shape_of(sizes: object) -> tuple[int, ...]:
    """The sizes as `dims` returns them. Raises `DamagedFileError` for sizes that no tensor can have."""
    shape = dims(sizes)
    # torch multiplies all sizes, even those of an empty tensor.
    if min(shape, default=0) < 0 or math.prod(filter(None, shape)) >= MAX_INDEX:
        raise DamagedFileError("a tensor has an impossible layout", found=f"shape {shape}")
    return shape


def unsupported(kind: str, remedy: str = "") -> Refused:
    """The placeholder for a tensor that is not supported."""
    return invalid(UnsupportedTensorError(f"{kind} is not supported", remedy=remedy))


def _nested() -> Refused:
    return unsupported("a nested tensor", "save its values() and offsets()")


def _tensor_v2(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object = False,
    hooks: object = None,
    metadata: object = None,
    dtype: torch.dtype | None = None,
) -> Rebuilt:
    """`torch._utils._rebuild_tensor_v2`, which rebuilds nearly every tensor since torch 0.4."""
    if type(storage) is not Storage:
        raise damaged("a tensor without a storage", type(storage).__name__)
    dtype = storage.dtype if dtype is None else dtype
    if dtype in QUANTIZED:
        return unsupported(f"a quantized tensor ({dtype})", _QUANTIZED)
    try:
        shape, steps, first = shape_of(size), dims(stride), dims((offset,))[0] if offset else 0
        if not storage.numel and 0 not in shape:
            return unsupported(
                "a tensor whose memory had been given back when it was saved",
                "save it where its memory is there, as in the hooks of the code that frees it",
            )
        grad = typed(requires_grad, bool, "requires_grad is neither True nor False")
        stored = StoredTensor.view(dtype, shape, steps, storage.region, storage.offset + first, grad)
    except OpenError as error:
        return invalid(error)
    return _with_bits(stored, metadata) if metadata else stored


def _with_bits(stored: StoredTensor, metadata: object) -> Rebuilt:
    """Adds the lazy conjugation or negation of a view: `conj()`, and `imag` of complex numbers."""
    if not isinstance(metadata, dict) or not {"conj", "neg"}.issuperset(metadata):
        return unsupported(f"a tensor with {str(metadata)[:100]}")
    conj, neg = bool(metadata.get("conj")), bool(metadata.get("neg"))
    if not conj and not neg:
        return stored
    if conj and not stored.dtype.is_complex:
        return invalid(damaged("real numbers that are conjugated"))

    def make(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        value = parts[0].conj() if conj else parts[0]  # a view: a small file may expand a number to any size
        return value.neg() if neg else value

    kind = " and ".join(name for name, there in (("conjugate", conj), ("negative", neg)) if there)
    plain = replace(stored, requires_grad=False)
    return DeferredTensor(f"{kind} view", stored.dtype, stored.shape, (plain,), make, stored.requires_grad)


def _tensor_v3(*args: object) -> Rebuilt:
    """As `_tensor_v2`, for dtypes without a storage class of their own, such as fp8: the dtype is before `metadata`."""
    storage, offset, size, stride, requires_grad, hooks, dtype, *rest = args
    metadata = rest[0] if rest else None
    return _tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata, _dtype(dtype))


def _dtype(value: object) -> torch.dtype:
    dtype: torch.dtype = typed(value, torch.dtype, "a value that is not a dtype")
    return dtype


def _parameter(data: object, requires_grad: object = True, hooks: object = None, state: object = None) -> Rebuilt:
    """A parameter. The Python attributes of a tensor, its state, are not read."""
    grad = typed(requires_grad, bool, "requires_grad is neither True nor False")
    if not isinstance(data, StoredTensor | DeferredTensor):
        raise damaged("a parameter without a tensor", type(data).__name__)
    return replace(data, requires_grad=grad, is_parameter=True)


def _sparse(layout: object, data: object) -> Rebuilt:
    if not isinstance(layout, torch.layout) or layout not in SPARSE_PARTS or type(data) is not tuple:
        return unsupported(f"a sparse tensor of layout {str(layout)[:100]}")
    count = len(SPARSE_PARTS[layout])
    parts, rest = data[:count], data[count:]
    for part in parts:
        if isinstance(part, Refused):
            return part
    try:
        size = shape_of(rest[0])
    except OpenError as error:
        return invalid(error)
    # Files from before 2.1 do not store whether the indices are coalesced.
    coalesced = rest[1] if len(rest) == 2 and type(rest[1]) is bool else None

    def make(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        try:
            if layout is torch.sparse_coo:
                return torch.sparse_coo_tensor(
                    tensors[0], tensors[1], size, check_invariants=True, is_coalesced=coalesced
                )
            compressed, plain, values = tensors
            return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=True)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise DamagedFileError("the parts of a sparse tensor contradict each other", found=error) from error

    return DeferredTensor(str(layout).removeprefix("torch."), parts[-1].dtype, size, parts, make)


def _from_type(function: object, cls: object, args: object, state: object) -> Rebuilt:
    """`torch._tensor._rebuild_from_type_v2`: tensors with attributes, and subclasses."""
    for part in (cls, function, *(args[:MAX_ARGUMENTS] if type(args) is tuple else ())):
        if isinstance(part, Refused):
            return Refused(part.name, args, state, error=part.error)
    if isinstance(function, Allowed) and function.name.startswith("torch.nested."):
        return _nested()
    name = function.name if type(function) is SafeGlobal and function.call is not _from_type else ""
    if name not in FUNCTIONS or type(args) is not tuple or len(args) > MAX_ARGUMENTS:
        raise damaged("a class that is not a tensor subclass", _class_name(function))
    if not isinstance(cls, SafeGlobal | Allowed):
        raise damaged("a class that is not a tensor subclass", _class_name(cls))
    if name == "torch._utils._rebuild_wrapper_subclass":
        return _wrapper_subclass(cls, args, state)
    base = FUNCTIONS[name](*args)
    if isinstance(base, Refused):
        return Refused(base.name, base, state, error=base.error)
    if type(base) is not StoredTensor and type(base) is not DeferredTensor:
        raise damaged("a subclass of a value that is not a tensor", type(base).__name__)
    if cls.real is torch.Tensor:
        return base
    if isinstance(cls, SafeGlobal) or not _is_tensor_class(cls.real):
        raise damaged("a tensor converted to a class that is not a tensor class", cls.name)
    return _subclass(cls, base.dtype, base.shape, (base,), state, lambda parts: parts[0])


def _wrapper_subclass(cls: object, args: tuple[object, ...], state: object) -> Rebuilt:
    if type(cls) is not Allowed or not _is_tensor_class(cls.real) or len(args) != 8 or args[0] is not cls:
        raise damaged("a class that is not a tensor subclass", _class_name(cls))
    if cls.name.startswith("torch.nested."):
        return _nested()
    _, dtype, size, stride, offset, layout, _, _ = args
    try:
        shape, steps, first = shape_of(size), dims(stride), dims((offset,))[0]
    except OpenError as error:
        return invalid(error)
    dtype, layout = _dtype(dtype), typed(layout, torch.layout, "a value that is not a layout")

    def make(parts: Sequence[object]) -> torch.Tensor:
        # Every such class calls `_make_wrapper_subclass` in its `__new__`, whose arguments are not known here.
        return wrapper_subclass(cls.real, shape, steps, first, dtype, layout)

    return replace(_subclass(cls, dtype, shape, (), state, make), requires_grad=args[7] is True)


def _subclass(
    cls: Allowed,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    base: tuple[object, ...],
    state: object,
    make: Callable[..., torch.Tensor],
) -> DeferredTensor:
    def finish(parts: tuple[tuple[object, ...], object]) -> torch.Tensor:
        tensor = make(parts[0])
        if type(tensor) is not cls.real:
            tensor = tensor.as_subclass(cls.real)
        set_state(tensor, parts[1])
        return tensor

    return DeferredTensor(cls.name, dtype, shape, (base, state), finish)


def set_state(target: Any, state: object) -> None:
    """Does what BUILD of a pickle does to a new object. Raises `DamagedFileError` for private attributes."""
    own = getattr(type(target), "__setstate__", None)
    if own is not None and own is not torch.Tensor.__setstate__:
        target.__setstate__(state)
        return
    pieces = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    # A frozen dataclass refuses plain assignment; a tensor may define its own.
    assign = setattr if isinstance(target, torch.Tensor) else object.__setattr__
    for piece in pieces:
        if piece is not None and not isinstance(piece, Mapping):
            raise damaged("a state that is not a dict", type(piece).__name__)
        for key, value in (piece or {}).items():
            if type(key) is not str or key.startswith("__") or isinstance(target, type):
                raise damaged("a state that reaches behind the object", str(key)[:100])
            assign(target, key, value)


def _is_tensor_class(real: object) -> bool:
    return isinstance(real, type) and issubclass(real, torch.Tensor)


def _class_name(cls: object) -> str:
    return str(getattr(cls, "name", type(cls).__name__))


def _from_cpu(data: object, dtype: object, device: object, requires_grad: object) -> Rebuilt:
    """Rebuilds a tensor of a device without storages, such as XLA."""
    target = _dtype(dtype)
    grad = typed(requires_grad, bool, "requires_grad is neither True nor False")
    if type(data) is not StoredTensor:
        raise damaged("a tensor of a device without its values", type(data).__name__)
    if data.dtype == target:
        return replace(data, requires_grad=grad)
    return DeferredTensor("cast", target, data.shape, (data,), lambda parts: parts[0].to(target), grad)


def _from_numpy(data: object, dtype: object, device: object, requires_grad: object) -> object:
    target = _dtype(dtype)
    return DeferredCall("torch.from_numpy", lambda array: torch.from_numpy(array).to(target), (data,))


def _quantized(*args: object) -> Rebuilt:
    dtype = args[0].dtype if args and type(args[0]) is Storage else "quantized"
    return unsupported(f"a quantized tensor ({dtype})", _QUANTIZED)


FUNCTIONS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _tensor_v2,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    # A subclass without a storage of its own has no content by itself.
    "torch._utils._rebuild_wrapper_subclass": lambda cls=None, *_: unsupported(
        f"a tensor of class {_class_name(cls)} without its contents"
    ),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_cpu,
    "torch._utils._rebuild_device_tensor_from_numpy": _from_numpy,
    "torch._utils._rebuild_xla_tensor": _from_numpy,
    "torch._utils._rebuild_meta_tensor_no_storage": lambda dtype, size, *_: unsupported(
        f"a tensor on the meta device ({dtype}, shape {str(size)[:100]}), which has no values,",
        "save the tensors after they were given values",
    ),
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_nested_tensor": lambda *_: unsupported(
        "a nested tensor", "save the tensors that it is made of"
    ),
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch.tensor._rebuild_from_type_v2": _from_type,
    "torch.tensor._rebuild_from_type": _from_type,
}

BUILTIN: dict[str, object] = {
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype | torch.qscheme)},
    **{name: SafeGlobal(name, call, real) for name, (call, real) in _VALUES.items()},
    **{name: SafeGlobal(name, call) for name, call in FUNCTIONS.items()},
    "torch.Tensor": SafeGlobal("torch.Tensor", real=torch.Tensor),
    "torch.nn.parameter.Parameter": SafeGlobal("torch.nn.parameter.Parameter", real=torch.nn.Parameter),
    "torch.nn.Parameter": SafeGlobal("torch.nn.parameter.Parameter", real=torch.nn.Parameter),
}
"""Every name that is always allowed, except the storage classes and those of NumPy."""
