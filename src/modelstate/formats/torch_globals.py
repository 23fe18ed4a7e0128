"""The names that a pickle of torch may contain, and what each of them becomes.

The allowed names are those of torch's own `weights_only` loading. A call that would rebuild a tensor is described
instead, so no tensor is created here, and no function that the pickle chooses is called.

Tensor subclasses that a manifest describes are created by their `__tensor_unflatten__`, which runs code of the class.
So only classes are used that torch itself would load (`torch.serialization.get_safe_globals`) or that the caller
allows; nothing is imported unless the caller names it.
"""

import codecs
import enum
import pkgutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from modelstate.codec.codec import decode
from modelstate.errors import ForbiddenGlobalError, ManifestError, PickleError, SourceTypeError
from modelstate.formats import rebuild
from modelstate.formats.pickled import Allowed, Refused, SafeGlobal, check_key
from modelstate.formats.rebuild import dims
from modelstate.spec import Stored, StoredComposite, StoredTensor

STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
    "_UntypedStorage": torch.uint8,
    "QUInt8Storage": torch.quint8,
    "QInt8Storage": torch.qint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}
"""The storage classes that a pickle may name, and the dtype of each."""

NEVER = frozenset({"os", "posix", "nt", "sys", "subprocess", "builtins.eval", "builtins.exec", "builtins.compile"}) | {
    f"builtins.{name}" for name in ("setattr", "delattr", "__import__", "open", "globals", "breakpoint")
}
"""Modules and functions that are refused even if the caller allows them: to allow them is to run the file."""


class StorageType:
    """Represents a storage class."""

    __slots__ = ("dtype", "name")

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype


class TorchGlobals:
    """Looks up the names in a torch checkpoint."""

    def __init__(self, allow: Sequence[object] = ()) -> None:
        """`allow` has classes and functions, their qualified names, or pairs of both as torch accepts them."""
        self.by_name: dict[str, Any] = {}
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
                    found=repr(entry)[:100],
                )

    def find(self, name: str) -> object:
        """Returns what a name stands for; a `Refused` if it is not allowed."""
        known = _builtin().get(name)
        if known is not None:
            return known
        if name == "builtins.getattr":
            return SafeGlobal(name, self.attribute, takes_inert=True)
        module, _, last = name.rpartition(".")
        if last in STORAGE_DTYPES and (module in ("torch", "torch.storage") or module in _DEVICE_MODULES):
            return StorageType(name, STORAGE_DTYPES[last])
        if not is_never(name):
            for alias in _aliases(name):
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
            raise PickleError("the pickle is damaged: an attribute of what is no class", found=str(name)[:100])
        if isinstance(parent, Allowed) and isinstance(parent.real, enum.EnumType) and name in parent.real.__members__:
            return Allowed(f"{parent.name}.{name}", parent.real.__members__[name])
        value = self.find(f"{parent.name}.{name}")
        self.refused.discard(parent.name)
        return value


_DEVICE_MODULES = frozenset(f"torch.{device}" for device in ("cuda", "xpu", "hpu", "mps", "npu", "mtia"))


def is_never(name: str) -> bool:
    """Whether the name is refused even if the caller allows it."""
    return name in NEVER or name.partition(".")[0] in NEVER


def _aliases(name: str) -> tuple[str, ...]:
    """The names of an object before and after NumPy moved the functions that every array refers to."""
    for old, new in (("numpy.core.", "numpy._core."), ("numpy._core.", "numpy.core.")):
        if name.startswith(old):
            return name, new + name.removeprefix(old)
    return (name,)


def _named(entry: object) -> tuple[str, object] | None:
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], str):
        return entry[1], entry[0]
    module, name = getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)
    return (f"{module}.{name}", entry) if isinstance(module, str) and isinstance(name, str) else None


@cache
def _builtin() -> dict[str, object]:
    """Every name that is always allowed, except the storage classes."""
    names: dict[str, object] = {f"torch.{k}": v for k, v in vars(torch).items() if isinstance(v, torch.dtype)}

    def add(name: str, call: Callable[..., object] | None, real: object = None, copies: bool = False) -> None:
        names[name] = SafeGlobal(name, call, real=real, copies=copies)

    for name, (call, real) in _VALUES.items():
        add(name, call, real, copies=True)
    for name, call in rebuild.FUNCTIONS.items():
        add(name, call)
    for scheme in ("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"):
        names[f"torch.{scheme}"] = getattr(torch, scheme)
    names["torch.per_channel_affine_float_qparams"] = torch.per_channel_affine_float_qparams
    add("torch.Tensor", rebuild.old_tensor, torch.Tensor)
    add("torch.nn.parameter.Parameter", rebuild.old_tensor, torch.nn.Parameter)
    names["torch.nn.Parameter"] = names["torch.nn.parameter.Parameter"]
    for storage in STORAGE_DTYPES:
        for module in ("torch", "torch.cuda", "torch.sparse", "torch.cuda.sparse"):
            add(f"{module}.{storage.replace('Storage', 'Tensor')}", rebuild.old_tensor)
    return names


# Functions that create plain values. Each copies at most its arguments.


def _items(values: object) -> list[Any]:
    if not isinstance(values, list | tuple | set | frozenset):
        raise PickleError("the pickle is damaged: items that are no list", found=type(values).__name__)
    items = list(values)
    for item in items:
        check_key(item)
    return items


def _ordered_dict(pairs: object = ()) -> OrderedDict[Any, Any]:
    if type(pairs) is dict:
        return OrderedDict(pairs)
    mapping: OrderedDict[Any, Any] = OrderedDict()
    if not isinstance(pairs, list | tuple):
        raise PickleError("the pickle is damaged: a dict of what is no list", found=type(pairs).__name__)
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise PickleError("the pickle is damaged: a dict of what is no pair", found=type(pair).__name__)
        check_key(pair[0])
        mapping[pair[0]] = pair[1]
    return mapping


def _counter(counts: object = None) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    if type(counts) is dict:
        dict.update(counter, counts)
    elif counts is not None:
        raise PickleError("the pickle is damaged: counts that are no dict", found=type(counts).__name__)
    return counter


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
        raise PickleError("the pickle is damaged: bytes in an encoding that pickle does not use", found=encoding)
    return codecs.encode(text, encoding)


def _bytearray(value: object = b"", encoding: str = "latin-1") -> bytearray:
    if isinstance(value, str):
        return bytearray(_encode(value, encoding))
    if not isinstance(value, bytes | bytearray):
        # A number would be taken as the size to allocate.
        raise PickleError("the pickle is damaged: a bytearray of what is no bytes", found=type(value).__name__)
    return bytearray(value)


def _bytes(value: object = b"") -> bytes:
    return bytes(_bytearray(value))


def _complex(real: float = 0.0, imaginary: float = 0.0) -> complex:
    if type(real) not in (int, float) or type(imaginary) not in (int, float):
        raise PickleError("the pickle is damaged: a complex number of what is no number")
    return complex(real, imaginary)


def _size(values: object = ()) -> torch.Size:
    return torch.Size(rebuild.dims(values))


def _layout(name: object) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(layout, torch.layout):
        raise PickleError("the pickle is damaged: an unknown layout", found=str(name)[:100])
    return layout


_VALUES: dict[str, tuple[Callable[..., object], object]] = {
    "collections.OrderedDict": (_ordered_dict, OrderedDict),
    "collections.Counter": (_counter, Counter),
    "builtins.set": (lambda values=(): set(_items(values)), set),
    "builtins.frozenset": (lambda values=(): frozenset(_items(values)), frozenset),
    "builtins.bytearray": (_bytearray, bytearray),
    "builtins.bytes": (_bytes, bytes),
    "builtins.complex": (_complex, complex),
    "_codecs.encode": (_encode, codecs.encode),
    "torch.Size": (_size, torch.Size),
    "torch.device": (lambda kind, *index: torch.device(kind, *index), torch.device),
    "torch.serialization._get_layout": (_layout, None),
}


FIELDS = ("class", "parts", "context", "shape", "stride", "dtype")


def composite(
    name: str, description: Any, known: Mapping[str, Stored], allow: Sequence[object], where: str
) -> tuple[StoredComposite, list[str]]:
    """Creates the stored tensor of a subclass that a manifest describes.

    Args:
        name: The name of the tensor.
        description: The entry of the manifest.
        known: The tensors of the file by name.
        allow: Additional classes that may be created.
        where: The place of the manifest, for messages.

    Returns:
        The tensor, and the names of the parts that are no tensors of the state by themselves.

    Raises:
        ValueError: The description is damaged.
        CodecError: An encoded field is damaged.
        ForbiddenGlobalError: The class is not allowed.
    """
    if type(description) is not dict or set(description) != set(FIELDS):
        raise ValueError(f"not described by {', '.join(FIELDS)}")
    parts, dtype, class_name = description["parts"], decode(description["dtype"]), description["class"]
    if type(class_name) is not str or type(parts) is not dict or not isinstance(dtype, torch.dtype):
        raise ValueError("its class, parts or dtype are damaged")
    missing = [part for part in parts.values() if type(part) is not str or part not in known]
    if missing or not parts:
        raise ValueError(f"made of {str(missing)[:80]}, which is not there")
    shape, stride = dims(description["shape"]), dims(description["stride"])
    if min((*shape, *stride, 0)) < 0 or len(shape) != len(stride):
        raise ValueError(f"shape {shape}, stride {stride}")
    cls = _allowed(class_name, allow, where, name)
    context = decode(description["context"], f"{where}: {name}")
    inner = [known[part] for part in parts.values()]
    stored = [list(part.parts) if isinstance(part, StoredComposite) else [part] for part in inner]
    ends = [0]
    for group in stored:
        ends.append(ends[-1] + len(group))

    def build(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        built = {}
        for attribute, part, (first, last) in zip(parts, inner, pairwise(ends), strict=True):
            built[attribute] = part.build(tensors[first:last]) if isinstance(part, StoredComposite) else tensors[first]
        try:
            tensor: torch.Tensor = cls.__tensor_unflatten__(built, context, torch.Size(shape), stride)
        except Exception as error:
            raise _not_made(class_name, f"{where}: {name}", f"{type(error).__name__}: {error}") from error
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise _not_made(class_name, f"{where}: {name}", f"{tensor.dtype} of shape {tuple(tensor.shape)}")
        return tensor

    every = tuple(part for group in stored for part in group if isinstance(part, StoredTensor))
    own_parts = [part for attribute, part in parts.items() if part == f"{name}.{attribute}"]
    return StoredComposite(class_name, dtype, shape, every, build), own_parts


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
