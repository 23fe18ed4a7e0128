"""Encodings for values of the standard library, and for enums, dataclasses and namedtuples.

A class is looked up in imported modules and never imported; its objects are filled without running their constructors.
The attributes of a class or a module are read without running its own code (`__getattr__`, descriptors, metaclasses).
"""

import base64
import dataclasses
import json
import pathlib
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import partial
from types import MemberDescriptorType, ModuleType
from typing import Any
from uuid import UUID

from modelstate.codec.walk import (
    MAX_BITS,
    MAX_RATIO_BITS,
    REGISTER,
    Collisions,
    Decoder,
    Encoder,
    Kind,
    Tree,
    check_bits,
)
from modelstate.errors import UnknownClassError
from modelstate.torch_compat.private import set_version_metadata

FACTORIES: dict[str, type] = {
    cls.__name__: cls
    for cls in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, OrderedDict, Counter, deque)
}
"""The factories that a `defaultdict` may have."""
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)


def _int(tree: Tree, decoder: Decoder) -> int:
    text = decoder.expect(tree, str)
    value = int(text, 16)
    if hex(value) != text:
        raise ValueError("not as hex() writes it")
    decoder.large_ints += value.bit_length() > MAX_BITS
    return value


def _text_of_bytes(value: bytes, encoder: Encoder) -> str:
    return base64.b64encode(value).decode()


def _bytes(tree: Tree, decoder: Decoder) -> bytes:
    return base64.b64decode(decoder.expect(tree, str), validate=True)


def _complex(tree: Tree, decoder: Decoder) -> complex:
    real, imag = (decoder.expect(part, float) for part in decoder.children(tree))
    return complex(real, imag)


def _members(value: Any, encoder: Encoder) -> list[Tree]:
    """Encodes the members of a set, in an order that does not depend on their hashes where that is possible."""
    trees, collisions = [], Collisions(len(value), encoder.fail)
    for member in value:
        trees.append(encoder.key(member))
        collisions.add(member)
    try:
        return sorted(trees, key=json.dumps)
    except TypeError:
        return trees


def _set(tree: Tree, decoder: Decoder) -> set[Any]:
    members = [decoder.key(member) for member in decoder.expect(tree, list)]
    collisions = Collisions(len(members), decoder.fail)
    for member in members:
        collisions.add(member)
    value = set(members)
    if len(value) != len(members):
        raise decoder.fail("a member of a set stands twice")
    return value


def _encode_ordered(value: Any, encoder: Encoder) -> Tree:
    attributes = vars(value)
    if not attributes:
        return encoder.pairs(value)
    if set(attributes) != {"_metadata"}:
        raise encoder.fail("an OrderedDict with attributes", found=", ".join(attributes), remedy="save a dict")
    # The versions of modules in a state dict.
    return {"items": encoder.pairs(value), **encoder.named(attributes)}


def _ordered(tree: Tree, decoder: Decoder) -> OrderedDict[Any, Any]:
    value: OrderedDict[Any, Any] = OrderedDict()
    if type(tree) is list:
        return decoder.pairs(tree, value)  # type: ignore[no-any-return]
    items, metadata = decoder.fields(tree, "items", "_metadata")
    decoder.pairs(items, value)
    set_version_metadata(value, decoder.named({"_metadata": metadata})["_metadata"])
    return value


def _encode_default(value: Any, encoder: Encoder) -> Tree:
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


def _default(tree: Tree, decoder: Decoder) -> defaultdict[Any, Any]:
    factory, items = decoder.fields(tree, "factory", "items")
    value: defaultdict[Any, Any] = defaultdict(None if factory is None else FACTORIES[factory])
    return decoder.pairs(items, value)  # type: ignore[no-any-return]


def _deque(tree: Tree, decoder: Decoder) -> deque[Any]:
    maxlen, items = decoder.fields(tree, "maxlen", "items")
    values = decoder.children(items)
    if maxlen is not None and (type(maxlen) is not int or len(values) > maxlen):
        raise decoder.fail("a deque with more items than it can have, or an impossible maxlen", found=maxlen)
    return deque(values, maxlen)


def _ints(tree: Tree, decoder: Decoder, count: int) -> list[int]:
    values = [decoder.expect(value, int) for value in decoder.children(tree)]
    if len(values) != count:
        raise decoder.fail("not as many numbers as there must be", expected=count, found=len(values))
    return values


def _encode_range(value: range, encoder: Encoder) -> Tree:
    check_bits(encoder.fail, MAX_RATIO_BITS, value.start, value.stop, value.step)
    return encoder.children([value.start, value.stop, value.step])


def _range(tree: Tree, decoder: Decoder) -> range:
    start, stop, step = _ints(tree, decoder, 3)
    check_bits(decoder.fail, MAX_RATIO_BITS, start, stop, step)
    return range(start, stop, step)


def _slice(tree: Tree, decoder: Decoder) -> slice:
    start, stop, step = decoder.children(tree)
    return slice(start, stop, step)


def _path(tree: Tree, decoder: Decoder, cls: type) -> Any:
    return cls(decoder.expect(decoder.value(tree), str))


def _encode_clock(value: datetime | time, encoder: Encoder) -> Tree:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, *encoder.children([value.tzinfo])]


def _clock(tree: Tree, decoder: Decoder, cls: Any) -> Any:
    text, fold, zone = decoder.expect(tree, list)
    value = cls.fromisoformat(decoder.expect(text, str))
    tzinfo = None if zone is None else decoder.expect(decoder.children([zone])[0], timezone)
    return value.replace(fold=decoder.expect(fold, int), tzinfo=tzinfo)


def _timedelta(tree: Tree, decoder: Decoder) -> timedelta:
    days, seconds, microseconds = _ints(tree, decoder, 3)
    return timedelta(days, seconds, microseconds)


def _encode_timezone(value: timezone, encoder: Encoder) -> Tree:
    return encoder.children(value.__getinitargs__())  # type: ignore[attr-defined]


def _encode_fraction(value: Fraction, encoder: Encoder) -> Tree:
    check_bits(encoder.fail, MAX_RATIO_BITS, value.numerator, value.denominator)
    return encoder.children([value.numerator, value.denominator])


def _fraction(tree: Tree, decoder: Decoder) -> Fraction:
    numerator, denominator = _ints(tree, decoder, 2)
    check_bits(decoder.fail, MAX_RATIO_BITS, numerator, denominator)
    return Fraction(numerator, denominator)


def _items(value: Any, encoder: Encoder) -> Tree:
    return encoder.children(value)


def _pairs(value: Any, encoder: Encoder) -> Tree:
    return encoder.pairs(value)


def _by_value_of(get: Callable[[Any], Any]) -> Callable[[Any, Encoder], Tree]:
    return lambda value, encoder: encoder.value(get(value))


def _never(value: Any, encoder: Encoder) -> Tree:
    raise AssertionError("the encoder itself encodes values of this type")


KINDS: dict[type, Kind] = {
    str: Kind("str", _never, lambda tree, decoder: _bytes(tree, decoder).decode("utf-8", "surrogatepass")),
    int: Kind("int", _never, _int),
    float: Kind(
        "float", _never, lambda tree, decoder: struct.unpack(">d", bytes.fromhex(decoder.expect(tree, str)))[0]
    ),
    complex: Kind("complex", lambda value, encoder: encoder.children([value.real, value.imag]), _complex),
    bytes: Kind("bytes", _text_of_bytes, _bytes),
    bytearray: Kind("bytearray", _text_of_bytes, lambda tree, decoder: bytearray(_bytes(tree, decoder))),
    tuple: Kind("tuple", _items, lambda tree, decoder: tuple(decoder.children(tree))),
    set: Kind("set", _members, _set),
    frozenset: Kind("frozenset", _members, lambda tree, decoder: frozenset(_set(tree, decoder))),
    dict: Kind("dict", _pairs, lambda tree, decoder: decoder.pairs(tree, {})),
    OrderedDict: Kind("OrderedDict", _encode_ordered, _ordered),
    defaultdict: Kind("defaultdict", _encode_default, _default),
    Counter: Kind("Counter", _pairs, lambda tree, decoder: decoder.pairs(tree, Counter())),
    deque: Kind("deque", lambda value, encoder: {"maxlen": value.maxlen, "items": encoder.children(value)}, _deque),
    range: Kind("range", _encode_range, _range),
    slice: Kind("slice", lambda value, encoder: encoder.children([value.start, value.stop, value.step]), _slice),
    datetime: Kind("datetime", _encode_clock, partial(_clock, cls=datetime)),
    date: Kind(
        "date", _by_value_of(date.isoformat), lambda tree, decoder: date.fromisoformat(decoder.expect(tree, str))
    ),
    time: Kind("time", _encode_clock, partial(_clock, cls=time)),
    timedelta: Kind("timedelta", lambda value, encoder: [value.days, value.seconds, value.microseconds], _timedelta),
    timezone: Kind("timezone", _encode_timezone, lambda tree, decoder: timezone(*decoder.children(tree))),
    Decimal: Kind("Decimal", _by_value_of(str), lambda tree, decoder: Decimal(decoder.expect(tree, str))),
    Fraction: Kind("Fraction", _encode_fraction, _fraction),
    UUID: Kind("UUID", _by_value_of(str), lambda tree, decoder: UUID(decoder.expect(tree, str))),
    **{cls: Kind(cls.__name__, _by_value_of(str), partial(_path, cls=cls)) for cls in _PATHS},
}


def attribute(cls: type, name: str) -> Any:
    """The attribute of a class or its bases, without running a descriptor or a metaclass; None if there is none."""
    return next((vars(base)[name] for base in _mro(cls) if name in vars(base)), None)


def _mro(cls: type) -> tuple[type, ...]:
    mro: tuple[type, ...] = type.__dict__["__mro__"].__get__(cls)
    return mro


def find(text: str) -> type | None:
    """The class named `module:qualname`, if its module has been imported and contains it."""
    module_name, _, qualname = text.partition(":")
    module = sys.modules.get(module_name)
    if not isinstance(module, ModuleType):
        return None
    names = object.__getattribute__(module, "__dict__")
    value: object = None
    for part in qualname.split("."):
        value = names.get(part)
        if not issubclass(type(value), type):
            return None
        names = vars(value)
    return value if isinstance(value, type) else None


def is_enum(cls: type) -> bool:
    return issubclass(cls, Enum)


def is_namedtuple(cls: type) -> bool:
    fields = attribute(cls, "_fields")
    return tuple in _mro(cls) and type(fields) is tuple and all(type(name) is str for name in fields)


def is_dataclass(cls: type) -> bool:
    return type(attribute(cls, "__dataclass_fields__")) is dict and not is_enum(cls)


def _class_text(value: Any, encoder: Encoder) -> str:
    cls = type(value)
    text = f"{cls.__module__}:{cls.__qualname__}"
    if find(text) is not cls:
        raise encoder.fail(
            "a class that cannot be found by its name, as one that is defined in a function",
            found=text,
            remedy="define it at the top of a module; " + REGISTER,
        )
    _check(cls, encoder)
    return text


def _check(cls: type, walk: Encoder | Decoder) -> None:
    """Refuses a class with `__del__`, and counts a class with its own `__hash__`: both would run without a call."""
    if attribute(cls, "__del__") is not None:
        raise walk.fail("a class with a __del__, which would run", found=cls.__qualname__, remedy=REGISTER)
    if not _hashes_plainly(cls):
        walk.own_hashes += 1


def _hashes_plainly(cls: type) -> bool:
    """Whether hashing and comparing runs only code of Python or code that `dataclasses` has generated."""
    for name in ("__hash__", "__eq__"):
        method = attribute(cls, name)
        code = getattr(method, "__code__", None)
        generated = code is not None and code.co_filename == "<string>" and is_dataclass(cls)
        if code is not None and not generated and method is not vars(Enum).get(name):
            return False
    return True


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
    _check(cls, decoder)
    return cls


def _encode_enum(value: Any, encoder: Encoder) -> Tree:
    cls = _class_text(value, encoder)
    name = value._name_
    if vars(type(value))["_member_map_"].get(name) is value:
        return {"class": cls, "name": name}
    if isinstance(value, Flag) and type(value._value_) is int:
        check_bits(encoder.fail, MAX_BITS, value._value_)
        return {"class": cls, "value": encoder.value(value._value_)}
    raise encoder.fail("an Enum member that its class does not have", found=cls, remedy=REGISTER)


def _enum(tree: Tree, decoder: Decoder) -> Any:
    if "name" in decoder.expect(tree, dict):
        text, name = decoder.fields(tree, "class", "name")
        cls = _class(text, decoder, "Enum", is_enum)
        members = vars(cls)["_member_map_"]
        if name not in members:
            raise UnknownClassError(
                "the Enum has no such member", where=decoder.place, expected=", ".join(members), found=name
            )
        return members[name]
    text, value = decoder.fields(tree, "class", "value")
    cls = _class(text, decoder, "Flag", lambda cls: issubclass(cls, Flag))
    if vars(cls)["_member_type_"] not in (object, int):
        raise decoder.fail("a Flag of another kind than int", found=text)
    number = decoder.expect(decoder.value(value), int)
    check_bits(decoder.fail, MAX_BITS, number)
    known = vars(cls)["_value2member_map_"].get(number)
    # The same as `cls(number)`, without the code that the class may define instead.
    return known if known is not None else Flag._missing_.__func__(cls, number)  # type: ignore[attr-defined]


def _encode_namedtuple(value: Any, encoder: Encoder) -> Tree:
    cls = _class_text(value, encoder)
    names = attribute(type(value), "_fields")
    if getattr(value, "__dict__", None) or len(names) != len(value):
        raise encoder.fail("a namedtuple with more than its fields", found=cls, remedy=REGISTER)
    return {"class": cls, "fields": encoder.named(dict(zip(names, value, strict=True)))}


def _namedtuple(tree: Tree, decoder: Decoder) -> Any:
    text, fields = decoder.fields(tree, "class", "fields")
    cls: Any = _class(text, decoder, "namedtuple", is_namedtuple)
    values = decoder.named(fields)
    names = attribute(cls, "_fields")
    _check_fields(names, values, text, decoder)
    return tuple.__new__(cls, [values[name] for name in names])


def _field_names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _slots(cls: type) -> dict[str, Any]:
    """The slots of a class by name."""
    slots: dict[str, Any] = {}
    for base in reversed(_mro(cls)):
        slots |= {name: slot for name, slot in vars(base).items() if type(slot) is MemberDescriptorType}
    return slots


def _encode_dataclass(value: Any, encoder: Encoder) -> Tree:
    cls = type(value)
    text = _class_text(value, encoder)
    state = dict(getattr(value, "__dict__", {}))
    slots = _slots(cls)
    state |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    names = _field_names(cls)
    for name in names:
        if name not in slots and hasattr(type(attribute(cls, name)), "__set__"):
            raise encoder.fail(f"a dataclass whose field {name!r} is a property", found=text, remedy=REGISTER)
        if name not in state:
            if not hasattr(value, name):
                raise encoder.fail(f"a dataclass whose field {name!r} has not been set", found=text, remedy=REGISTER)
            state[name] = getattr(value, name)
    try:
        object.__new__(cls)
    except TypeError as error:
        raise encoder.fail("a dataclass that cannot be made empty", found=error, remedy=REGISTER) from error
    tree = {"class": text, "fields": encoder.named({name: state.pop(name) for name in names})}
    return {**tree, "attributes": encoder.named(state)} if state else tree


def _dataclass(tree: Tree, decoder: Decoder) -> Any:
    extra = ("attributes",) if "attributes" in decoder.expect(tree, dict) else ()
    text, fields, *attributes = decoder.fields(tree, "class", "fields", *extra)
    cls = _class(text, decoder, "dataclass", is_dataclass)
    values = decoder.named(fields)
    _check_fields(_field_names(cls), values, text, decoder)
    for more in attributes:
        values |= decoder.named(more)
    value: Any = object.__new__(cls)
    slots = _slots(cls)
    for name, content in values.items():
        if name in slots:
            slots[name].__set__(value, content)
        elif name.startswith("__"):
            raise decoder.fail("an attribute that is not for values", found=name[:80])
        else:
            object.__getattribute__(value, "__dict__")[name] = content
    return value


def _check_fields(names: Any, values: dict[str, Any], text: str, decoder: Decoder) -> None:
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


ENUM = Kind("enum", _encode_enum, _enum)
NAMEDTUPLE = Kind("namedtuple", _encode_namedtuple, _namedtuple)
DATACLASS = Kind("dataclass", _encode_dataclass, _dataclass)
RULES = ((is_enum, ENUM), (is_namedtuple, NAMEDTUPLE), (is_dataclass, DATACLASS))
