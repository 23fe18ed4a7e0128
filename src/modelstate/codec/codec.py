"""`encode`, `decode` and `register_codec`: convert plain values to JSON and tensors, and back.

Values of Python, NumPy and torch have an encoding, and objects of enums, dataclasses and namedtuples.

A class is looked up in imported modules and never imported; its objects are filled without running their constructors.
The attributes of a class or a module are read without running its own code (`__getattr__`, descriptors, metaclasses).
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import date, datetime, timedelta, timezone, tzinfo
from enum import Enum
from functools import partial
from inspect import getattr_static
from pathlib import Path
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from torch import nn

from modelstate.codec.walk import FIELD, REGISTER, Decoder, Encoder, Leaf, Tree, ValueKind, Walk
from modelstate.errors import CodecError, OptionError, UnknownClassError, code_errors
from modelstate.spec import set_version_metadata
from modelstate.text_format import short_repr
from modelstate.torch_compat.plain import byte_tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

FACTORIES: dict[str, type] = {
    cls.__name__: cls
    for cls in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, OrderedDict, Counter)
}
"""The factories that a `defaultdict` may have."""


# Python.


def _of_text(tag: str, text: Callable[[Any], str], create: Callable[[str], object]) -> ValueKind:
    """A kind of values that are encoded as a text."""
    return ValueKind(
        tag,
        lambda value, encoder: encoder.value(text(value)),
        lambda tree, decoder: create(decoder.expect(decoder.value(tree), str)),
    )


def _of_items(tag: str, items: Callable[[Any], Iterable[object]], create: Callable[..., object]) -> ValueKind:
    """A kind of values that are encoded as a list of items, which `create` takes as arguments."""

    def decode(tree: Tree, decoder: Decoder) -> object:
        decoded = decoder.children(decoder.expect(tree, list))
        if not _ITEMS.issuperset(map(type, decoded)):  # `create` would call methods of other classes
            raise decoder.fail("an item of another class than a tag needs")
        return create(*decoded)

    return ValueKind(tag, lambda value, encoder: encoder.children(items(value)), decode)


_ITEMS = frozenset({int, float, str, type(None), timedelta, timezone})


def _as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _encode_set(value: set[object] | frozenset[object], encoder: Encoder) -> list[Tree]:
    """Encodes the members of a set, in an order that does not depend on their hashes where that is possible."""
    encoder.check_hashes(value)
    trees = [encoder.key(member, member) for member in value]
    try:
        return sorted(trees, key=json.dumps)
    except TypeError:
        return trees


def _encode_ordered(value: OrderedDict[object, object], encoder: Encoder) -> Tree:
    attributes = vars(value)
    if not attributes:
        return encoder.pairs(value)
    if set(attributes) != {"_metadata"}:
        raise encoder.fail("an OrderedDict with attributes", found=", ".join(attributes), remedy="save a dict")
    # The versions of modules in a state dict.
    return {"items": encoder.pairs(value), **encoder.named(attributes)}


def _ordered(tree: Tree, decoder: Decoder) -> OrderedDict[object, object]:
    value: OrderedDict[object, object] = OrderedDict()
    if type(tree) is list:
        return decoder.pairs(tree, value)
    items, metadata = decoder.fields(tree, "items", "_metadata")
    decoder.pairs(items, value)
    set_version_metadata(value, decoder.named({"_metadata": metadata})["_metadata"])
    return value


def _encode_default(value: defaultdict[object, object], encoder: Encoder) -> Tree:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and FACTORIES.get(str(name)) is not factory:
        raise encoder.fail(
            "a defaultdict whose factory is not known",
            expected=", ".join(FACTORIES),
            found=f"a {type(factory).__qualname__}",
            remedy="save dict(...) of it",
        )
    return {"factory": name, "items": encoder.pairs(value)}


def _default(tree: Tree, decoder: Decoder) -> defaultdict[object, object]:
    factory, items = decoder.fields(tree, "factory", "items")
    value: defaultdict[object, object] = defaultdict(None if factory is None else FACTORIES[factory])
    return decoder.pairs(items, value)


def _datetime(text: str, fold: int, zone: tzinfo | None) -> datetime:
    return datetime.fromisoformat(text).replace(fold=fold, tzinfo=zone)


# NumPy.

_DTYPE_KINDS = "biufcSUMm"
Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def _encode_dtype(dtype: np.dtype[np.generic], encoder: Encoder) -> str:
    if dtype.kind not in _DTYPE_KINDS or dtype.char in "gG" or np.dtype(dtype.str) != dtype:
        remedy = "save a list of it, or an array of another dtype"
        raise encoder.fail(f"there is no encoding for NumPy's dtype {dtype}", remedy=remedy)
    return str(dtype.str)


def _dtype(tree: Tree, decoder: Decoder) -> np.dtype[np.generic]:
    dtype: np.dtype[np.generic] = np.dtype(decoder.expect(tree, str))
    if dtype.kind not in _DTYPE_KINDS or dtype.char in "gG":
        raise decoder.fail("a dtype that is not stored here", found=str(dtype)[:80])
    return dtype


def _encode_array(value: Array, encoder: Encoder) -> Tree:
    order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    dtype = _encode_dtype(value.dtype, encoder)
    data = encoder.array(value, lambda: byte_tensor(value.tobytes(order)))
    return {"dtype": dtype, "shape": list(value.shape), "order": order, "data": data}


def _array(tree: Tree, decoder: Decoder) -> object:
    text, shape, order, data = decoder.fields(tree, "dtype", "shape", "order", "data")
    sizes = [decoder.expect(size, int) for size in decoder.expect(shape, list)]
    dtype = _dtype(text, decoder)

    def filled(stored: torch.Tensor) -> Array:
        if stored.dtype != torch.uint8 or stored.device.type != "cpu":
            raise decoder.fail("the data of an array are not bytes")
        raw = stored.contiguous().view(-1).numpy()
        # The product of other sizes could take very long.
        is_shape = len(sizes) <= 64 and all(0 <= size < 2**63 for size in sizes)
        if not is_shape or not dtype.itemsize or math.prod(sizes) * dtype.itemsize != len(raw):
            raise decoder.fail("the bytes of an array are not as many as its shape and dtype need", found=len(raw))
        return np.frombuffer(bytearray(raw), dtype).reshape(sizes, order=order) if len(raw) else np.empty(sizes, dtype)

    return decoder.array(data, (dtype, sizes, order), filled)


def _encode_scalar(value: np.generic, encoder: Encoder) -> Tree:
    return [_encode_dtype(value.dtype, encoder), _as_base64(value.tobytes())]


def _scalar(tree: Tree, decoder: Decoder) -> object:
    text, encoded = decoder.expect(tree, list)
    dtype, raw = _dtype(text, decoder), _from_base64(decoder.expect(encoded, str))
    if len(raw) != dtype.itemsize:
        raise decoder.fail("the bytes of a scalar are not as many as its dtype needs", found=len(raw))
    if dtype.kind in "SU":  # `frombuffer` drops zeros at the end
        return np.bytes_(raw) if dtype.kind == "S" else np.str_(raw.decode("utf-32-le", "surrogatepass"))
    return np.frombuffer(raw, dtype)[0]


# torch.


def _torch_dtype(name: str) -> torch.dtype:
    dtype = vars(torch)[name]  # a newer torch may have more
    if type(dtype) is not torch.dtype:
        raise ValueError(name)
    return dtype


def _parameter(tree: Tree, decoder: Decoder) -> torch.Tensor:
    data, requires_grad = decoder.fields(tree, "data", "requires_grad")
    return decoder.tensor(data, True, decoder.expect(requires_grad, bool))


def _uninitialised(tree: Tree, decoder: Decoder, cls: Callable[..., torch.Tensor]) -> torch.Tensor:
    dtype_tree, requires_grad = decoder.fields(tree, "dtype", "requires_grad")
    dtype = decoder.expect(decoder.value(dtype_tree), torch.dtype)
    with torch.inference_mode(False):  # otherwise it could never be trained
        tensor: torch.Tensor = cls(decoder.expect(requires_grad, bool), "cpu", dtype)
    return tensor


# Enums, dataclasses and namedtuples.


def find(text: str) -> type | None:
    """The class named `module:qualname`, if its module has been imported and contains it."""
    module, _, qualname = text.partition(":")
    value: object = sys.modules.get(module)
    for part in qualname.split("."):
        value = getattr_static(value, part, None)
    return value if issubclass(type(value), type) else None  # type: ignore[return-value]


def _is_enum(cls: type) -> bool:
    return issubclass(cls, Enum)


def _is_namedtuple(cls: type) -> bool:
    fields = getattr_static(cls, "_fields", None)
    return tuple in cls.__mro__ and type(fields) is tuple and all(type(name) is str for name in fields)


def _is_dataclass(cls: type) -> bool:
    return type(getattr_static(cls, "__dataclass_fields__", None)) is dict and not _is_enum(cls)


def _class_text(value: object, encoder: Encoder) -> str:
    cls = type(value)
    text = f"{cls.__module__}:{cls.__qualname__}"
    if find(text) is not cls:
        raise encoder.fail(
            "a class that cannot be found by its name, as one that is defined in a function",
            found=text,
            remedy="define it at the top of a module; " + REGISTER,
        )
    _check_class(cls, encoder)
    return text


def _class(tree: Tree, decoder: Decoder, what: str, applies: Callable[[type], bool]) -> type:
    text = decoder.expect(tree, str)
    cls = find(text)
    if cls is None:
        raise UnknownClassError(
            f"the class {text[:200]!r} is not there",
            where=decoder.place,
            remedy=f"import {text.partition(':')[0][:200]!r} first: decoding imports nothing by itself",
        )
    if not applies(cls):
        raise UnknownClassError(f"a class that is no {what}", where=decoder.place, expected=what, found=text[:200])
    _check_class(cls, decoder)
    return cls


def _check_class(cls: type, walk: Walk) -> None:
    """Refuses a class with `__del__`, and counts a class with its own `__hash__`: both would run without a call."""
    if getattr_static(cls, "__del__", None) is not None:
        raise walk.fail("a class with a __del__, which would run", found=cls.__qualname__, remedy=REGISTER)
    for name in ("__hash__", "__eq__"):
        method = getattr_static(cls, name)
        code = getattr(method, "__code__", None)
        # Code of Python itself, and code that `dataclasses` has generated, may run.
        is_generated = code is not None and code.co_filename == "<string>" and _is_dataclass(cls)
        if code is not None and not is_generated and method is not vars(Enum).get(name):
            walk.own_hashes += 1


def _encode_enum(value: Enum, encoder: Encoder) -> Tree:
    text = _class_text(value, encoder)
    if vars(type(value))["_member_map_"].get(value._name_) is not value:
        raise encoder.fail("an Enum member that its class does not have", found=text, remedy=REGISTER)
    return {"class": text, "name": value._name_}


def _enum(tree: Tree, decoder: Decoder) -> object:
    text, name = decoder.fields(tree, "class", "name")
    members = vars(_class(text, decoder, "Enum", _is_enum))["_member_map_"]
    if name not in members:
        raise UnknownClassError(
            "the Enum has no such member", where=decoder.place, expected=", ".join(members), found=name
        )
    return members[name]


def _encode_namedtuple(value: tuple[object, ...], encoder: Encoder) -> Tree:
    text = _class_text(value, encoder)
    names = type(value)._fields  # type: ignore[attr-defined]
    if getattr(value, "__dict__", None) or len(names) != len(value):
        raise encoder.fail("a namedtuple with more than its fields", found=text, remedy=REGISTER)
    return {"class": text, "fields": encoder.named(dict(zip(names, value, strict=True)))}


def _namedtuple(tree: Tree, decoder: Decoder) -> object:
    text, fields = decoder.fields(tree, "class", "fields")
    cls = _class(text, decoder, "namedtuple", _is_namedtuple)
    values = decoder.named(fields)
    names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
    _check_fields(names, values, text, decoder)
    return tuple.__new__(cls, [values[name] for name in names])


def _slots(cls: type) -> dict[str, MemberDescriptorType]:
    """The slots of a class by name."""
    slots: dict[str, MemberDescriptorType] = {}
    for base in reversed(cls.__mro__):
        slots |= {name: slot for name, slot in vars(base).items() if type(slot) is MemberDescriptorType}
    return slots


def _encode_dataclass(value: DataclassInstance, encoder: Encoder) -> Tree:
    cls = type(value)
    text = _class_text(value, encoder)
    slots = _slots(cls)
    state = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    names = [field.name for field in dataclasses.fields(cls)]
    for name in names:
        if name not in slots and hasattr(type(getattr_static(cls, name, None)), "__set__"):
            raise encoder.fail(f"a dataclass whose field {name!r} is a property", found=text, remedy=REGISTER)
        if not hasattr(value, name):
            raise encoder.fail(f"a dataclass whose field {name!r} has not been set", found=text, remedy=REGISTER)
    try:
        object.__new__(cls)
    except TypeError as error:
        raise encoder.fail("a dataclass that cannot be made empty", found=error, remedy=REGISTER) from error
    fields = {name: state.pop(name) if name in state else getattr(value, name) for name in names}
    tree = {"class": text, "fields": encoder.named(fields)}
    return {**tree, "attributes": encoder.named(state)} if state else tree


def _dataclass(tree: Tree, decoder: Decoder) -> object:
    extra = ("attributes",) if "attributes" in decoder.expect(tree, dict) else ()
    text, fields, *attributes = decoder.fields(tree, "class", "fields", *extra)
    cls = _class(text, decoder, "dataclass", _is_dataclass)
    values = decoder.named(fields)
    _check_fields([field.name for field in dataclasses.fields(cls)], values, text, decoder)
    for more in attributes:
        values |= decoder.named(more)
    value: object = object.__new__(cls)
    slots = _slots(cls)
    for name, content in values.items():
        if name in slots:
            slots[name].__set__(value, content)
        elif name.startswith("__"):
            raise decoder.fail("an attribute that is not for values", found=name[:80])
        else:
            object.__getattribute__(value, "__dict__")[name] = content
    return value


def _check_fields(names: Collection[str], values: Collection[str], text: str, decoder: Decoder) -> None:
    missing = [name for name in names if name not in values]
    unknown = [name for name in values if name not in names]
    if missing or unknown:
        raise UnknownClassError(
            f"the fields of {text} are not those that were saved: "
            f"{len(missing)} missing, {len(unknown)} that the class does not have",
            where=decoder.place,
            expected=", ".join(names),
            found=", ".join(values)[:500],
            remedy="use the class as it was when the file was written, or write the file again; "
            "ms.register_codec gives a class an encoding that can change with it",
        )


# Registered classes.


class Codec(msgspec.Struct, frozen=True):
    """The encoding that was registered for a class."""

    cls: type
    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_CODECS: dict[str, Codec] = {}
"""By name."""


def _codec_of(cls: type) -> Codec | None:
    return next((codec for codec in [*_CODECS.values()] if codec.cls is cls), None)


def _encode_object(value: object, encoder: Encoder) -> Tree:
    codec = _codec_of(type(value))
    assert codec is not None
    with code_errors(CodecError, f"the function that encodes {codec.name} raised", where=encoder.place):
        encoded = codec.encode(value)
    return {"codec": codec.name, "value": encoder.child(encoded, (FIELD, "encoded"))}


def _decode_object(tree: Tree, decoder: Decoder) -> object:
    name, inner = decoder.fields(tree, "codec", "value")
    codec = _CODECS.get(decoder.expect(name, str))
    if codec is None:
        raise UnknownClassError(
            f"nothing is registered under {name[:200]!r}",
            where=decoder.place,
            remedy="import what calls ms.register_codec for it, and read it again",
        )
    value = decoder.child(inner, (FIELD, "encoded"))
    with code_errors(CodecError, f"the function that decodes {codec.name} raised", where=decoder.place):
        result = codec.decode(value)
    if not isinstance(result, codec.cls):
        raise decoder.fail(
            f"the function that decodes {codec.name} returned something else",
            expected=codec.cls.__qualname__,
            found=type(result).__qualname__,
        )
    return result


# The kinds.


def _pairs(value: Mapping[object, object], encoder: Encoder) -> list[list[Tree]]:
    return encoder.pairs(value)


KINDS: dict[type, ValueKind] = {
    str: _of_text(
        "str",
        lambda value: _as_base64(value.encode("utf-8", "surrogatepass")),
        lambda text: _from_base64(text).decode("utf-8", "surrogatepass"),
    ),
    int: _of_text("int", hex, lambda text: int(text, 16)),
    float: _of_text(
        "float", lambda value: struct.pack(">d", value).hex(), lambda text: struct.unpack(">d", bytes.fromhex(text))[0]
    ),
    bytes: _of_text("bytes", _as_base64, _from_base64),
    date: _of_text("date", date.isoformat, date.fromisoformat),
    torch.dtype: _of_text("torch.dtype", lambda value: str(value).removeprefix("torch."), _torch_dtype),
    torch.device: _of_text("torch.device", str, torch.device),
    complex: _of_items("complex", lambda value: (value.real, value.imag), complex),
    tuple: ValueKind(
        "tuple",
        lambda value, encoder: encoder.children(value),
        lambda tree, decoder: tuple(decoder.children(decoder.expect(tree, list))),
    ),
    range: _of_items("range", lambda value: (value.start, value.stop, value.step), range),
    timedelta: _of_items("timedelta", lambda value: (value.days, value.seconds, value.microseconds), timedelta),
    timezone: _of_items("timezone", lambda value: value.__getinitargs__(), timezone),
    torch.Size: _of_items("torch.Size", tuple, lambda *sizes: torch.Size(sizes)),
    set: ValueKind("set", _encode_set, lambda tree, decoder: set(decoder.keys(tree))),
    frozenset: ValueKind("frozenset", _encode_set, lambda tree, decoder: frozenset(decoder.keys(tree))),
    dict: ValueKind("dict", _pairs, lambda tree, decoder: decoder.pairs(tree, {})),
    OrderedDict: ValueKind("OrderedDict", _encode_ordered, _ordered),
    defaultdict: ValueKind("defaultdict", _encode_default, _default),
    Counter: ValueKind("Counter", _pairs, lambda tree, decoder: Counter(decoder.pairs(tree, {}))),
    datetime: _of_items(
        "datetime",
        lambda value: (value.replace(tzinfo=None, fold=0).isoformat(), value.fold, value.tzinfo),
        _datetime,
    ),
    type(Path()): _of_text("Path", str, Path),
    np.ndarray: ValueKind("numpy.array", _encode_array, _array),
    torch.Tensor: ValueKind(
        "requires_grad",
        lambda value, encoder: encoder.tensor(value),
        lambda tree, decoder: decoder.tensor(tree, False, True),
    ),
    nn.Parameter: ValueKind(
        "Parameter",
        lambda value, encoder: {"data": encoder.tensor(value), "requires_grad": value.requires_grad},
        _parameter,
    ),
    **{
        cls: ValueKind(
            cls.__name__,
            lambda value, encoder: encoder.named({"dtype": value.dtype, "requires_grad": value.requires_grad}),
            partial(_uninitialised, cls=cls),
        )
        for cls in (nn.UninitializedParameter, nn.UninitializedBuffer)
    },
}
"""By exact class."""

_RULES: tuple[tuple[Callable[[type], bool], ValueKind], ...] = (
    (lambda cls: _codec_of(cls) is not None, ValueKind("object", _encode_object, _decode_object)),
    (lambda cls: issubclass(cls, np.generic), ValueKind("numpy.scalar", _encode_scalar, _scalar)),
    (lambda cls: issubclass(cls, np.dtype), ValueKind("numpy.dtype", _encode_dtype, _dtype)),
    (_is_enum, ValueKind("enum", _encode_enum, _enum)),
    (_is_namedtuple, ValueKind("namedtuple", _encode_namedtuple, _namedtuple)),
    (_is_dataclass, ValueKind("dataclass", _encode_dataclass, _dataclass)),
)
"""For the classes that `KINDS` does not list. The first rule that applies wins."""

TAGS = {kind.tag: kind for kind in (*KINDS.values(), *(kind for _, kind in _RULES))}
"""All kinds by tag."""


def _kind_of(cls: type) -> ValueKind | None:
    return KINDS.get(cls) or next((kind for applies, kind in _RULES if applies(cls)), None)


# The functions.


def encode(value: object, where: str = "", *, leaf: Leaf | None = None) -> Tree:
    """Encodes a value as a tree of JSON types, in which the only other leaves are plain tensors.

    The tree shares no memory with the value: its tensors are detached copies, on the same devices, of the elements that
    the tensors of the value show. A tensor or an array that appears in several places is one
    tensor in the tree, and one object again when it is decoded; any other object is encoded once for each place. The
    tree can be saved with `torch.save` and loaded with `torch.load(weights_only=True)`.

    Args:
        value: The value.
        where: Precedes the place within the value in messages.
        leaf: Called with each tensor, which is not copied; returns a text or number that identifies it. The tree then
            contains JSON types only.

    Raises:
        CodecError: A value has no encoding, contains itself, is nested too deeply, or would take too long to
            decode (see `modelstate.codec.walk`).

    Examples:
        >>> encode({"shape": (2, 3)})
        {'shape': {'$tuple': [2, 3]}}
    """
    return _walked(Encoder(_kind_of, where, leaf), value)


def decode(tree: Tree, where: str = "", *, leaf: Leaf | None = None) -> Any:
    """Decodes a tree to a value that equals the encoded one in type and content. Its tensors have their own memory.

    No module is imported and no code of a user's class runs: enums, dataclasses and namedtuples are found in modules
    that have been imported, and filled without their constructors. Only functions that were given to `register_codec`
    run.

    Args:
        tree: The tree.
        where: Precedes the place within the tree in messages.
        leaf: Returns the tensor that a text or number identifies.

    Raises:
        CodecError: The tree is not an encoded value.
        UnknownClassError: A class does not exist, is of another kind, or has other fields.

    Examples:
        >>> decode({"shape": {"$tuple": [2, 3]}})
        {'shape': (2, 3)}
    """
    return _walked(Decoder(TAGS, where, leaf), tree)


def _walked(walk: Walk, value: object) -> Tree:
    try:
        return walk.value(value)
    except RecursionError as error:
        raise CodecError("this is nested too deeply for the stack that is left", where=walk.where) from error


def register_codec(
    cls: type[T], encode: Callable[[T], object], decode: Callable[[Any], T], name: str | None = None
) -> None:
    """Registers an encoding for the objects of exactly this class.

    Registering a class again replaces its encoding. So does registering another class of the same module, qualified
    name and `name`, such as the class that a notebook cell defines when it runs again.

    Args:
        cls: The class.
        encode: Converts an object to a value that has an encoding itself.
        decode: Converts that value back to an object, at every load.
        name: The name of the class in files; by default its module and qualified name. A class with an explicit name
            can be moved to another module.

    Raises:
        CodecError: The name belongs to another class.
        OptionError: An argument is not valid, or the class has an encoding already.

    Examples:
        >>> class Celsius:
        ...     def __init__(self, degrees): self.degrees = degrees
        >>> ms.register_codec(Celsius, lambda value: value.degrees, Celsius, name="celsius")
        >>> ms.save({"limit": Celsius(20.5)}, "limits.safetensors")
        >>> ms.open("limits.safetensors").extra["limit"].degrees
        20.5
    """
    if not isinstance(cls, type):
        raise OptionError("cls must be a class", found=short_repr(cls))
    if cls in KINDS or cls in (bool, list, type(None)):
        raise OptionError("a class that has an encoding already", found=cls.__qualname__)
    if not callable(encode) or not callable(decode):
        raise OptionError("encode and decode are functions", found=f"{encode!r}, {decode!r}")
    name = f"{cls.__module__}:{cls.__qualname__}" if name is None else name
    if not isinstance(name, str) or not name:
        raise OptionError("name= must be text, by which files refer to the class", found=short_repr(name))
    other = _CODECS.get(name)
    # A class of the same name is the same class after its module, or a cell of a notebook, has run again.
    names = [f"{named.__module__}:{named.__qualname__}" for named in (other.cls if other else cls, cls)]
    if names[0] != names[1]:
        raise CodecError(
            "the name belongs to another class",
            where=name,
            expected=names[0],
            found=names[1],
            remedy="give it a name of its own with name=",
        )
    before = _codec_of(cls)
    # Before the old name is removed: a background save always finds an encoding.
    _CODECS[name] = Codec(cls, name, encode, decode)
    if before is not None and before.name != name:
        del _CODECS[before.name]
