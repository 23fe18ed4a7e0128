"""Enum members, dataclasses and namedtuples of classes that the program has already imported.

A class is looked up and never imported; its objects are filled, not constructed. Nothing here asks a class or a module
for an attribute in the usual way, which could run code of theirs.
"""

import dataclasses
import sys
from enum import Enum, Flag
from types import MemberDescriptorType, ModuleType
from typing import Any

from modelstate.codec.bounds import MAX_BITS, check_bits
from modelstate.codec.walk import REGISTER, Decoder, Encoder, Kind, Tree
from modelstate.errors import UnknownClassError


def attribute(cls: type, name: str) -> Any:
    """What a class or its bases have under a name, without running a descriptor or a metaclass; None for nothing."""
    return next((vars(base)[name] for base in _mro(cls) if name in vars(base)), None)


def _mro(cls: type) -> tuple[type, ...]:
    mro: tuple[type, ...] = type.__dict__["__mro__"].__get__(cls)
    return mro


def find(text: str) -> type | None:
    """The class called `module:qualname`, if its module has been imported and has it."""
    module_name, _, qualname = text.partition(":")
    module = sys.modules.get(module_name)
    if not isinstance(module, ModuleType):
        return None
    names = object.__getattribute__(module, "__dict__")
    found: Any = None
    for part in qualname.split("."):
        found = names.get(part)
        if not issubclass(type(found), type):
            return None
        names = vars(found)
    return found if isinstance(found, type) else None


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
    """Takes down what would run without being called."""
    if attribute(cls, "__del__") is not None:
        raise walk.fail("a class with a __del__, which would run", found=cls.__qualname__, remedy=REGISTER)
    if not _hashes_plainly(cls):
        walk.own_hashes += 1


def _hashes_plainly(cls: type) -> bool:
    """Whether hashing and comparing runs only what Python or `dataclasses` has made."""
    for name in ("__hash__", "__eq__"):
        method = attribute(cls, name)
        code = getattr(method, "__code__", None)
        made = code is not None and code.co_filename == "<string>" and is_dataclass(cls)
        if code is not None and not made and method is not vars(Enum).get(name):
            return False
    return True


def _class(tree: Tree, decoder: Decoder, what: str, applies: Any) -> type:
    text = decoder.expect(tree, str)
    found = find(text)
    if found is None:
        raise UnknownClassError(
            f"the class {text[:200]!r} is not there",
            where=decoder.place,
            remedy=f"import {text.partition(':')[0][:200]!r} first: decoding imports nothing by itself",
        )
    if not applies(found):
        raise UnknownClassError(f"a class that is no {what}", where=decoder.place, expected=what, found=text[:200])
    _check(found, decoder)
    return found


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
    cls = _class(text, decoder, "Flag", lambda found: issubclass(found, Flag))
    if vars(cls)["_member_type_"] not in (object, int):
        raise decoder.fail("a Flag of another kind than int", found=text)
    number = decoder.expect(decoder.value(value), int)
    check_bits(decoder.fail, MAX_BITS, number)
    known = vars(cls)["_value2member_map_"].get(number)
    # What `cls(number)` does, less what the class may have put in its place.
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
    return [one.name for one in dataclasses.fields(cls)]


def _slots(cls: type) -> dict[str, Any]:
    """The places for values that the class has beside, or in place of, a `__dict__`."""
    found: dict[str, Any] = {}
    for base in reversed(_mro(cls)):
        found |= {name: place for name, place in vars(base).items() if type(place) is MemberDescriptorType}
    return found


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
    made: Any = object.__new__(cls)
    slots = _slots(cls)
    for name, value in values.items():
        if name in slots:
            slots[name].__set__(made, value)
        elif name.startswith("__"):
            raise decoder.fail("an attribute that is not for values", found=name[:80])
        else:
            object.__getattribute__(made, "__dict__")[name] = value
    return made


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
