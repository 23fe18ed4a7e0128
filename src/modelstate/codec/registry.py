"""Encodings that users give for classes of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from modelstate.codec.walk import FIELD, Decoder, Encoder, Kind, Tree
from modelstate.errors import CodecNameError, ModelStateError, OptionError, UnknownClassError


@dataclass(frozen=True, slots=True)
class Codec:
    """What was registered for a class."""

    cls: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_BY_CLASS: dict[type, Codec] = {}
_BY_NAME: dict[str, Codec] = {}
_REPLACED: WeakSet[type] = WeakSet()
"""Classes whose name in files has gone to another class of the same module and qualified name."""


def register(cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any], name: str | None) -> None:
    """See `modelstate.codec.codec.register_codec`, which has checked the class."""
    if not callable(encode) or not callable(decode):
        raise OptionError("encode and decode are functions", found=f"{encode!r}, {decode!r}")
    name = _name_of(cls) if name is None else name
    if not isinstance(name, str) or not name:
        raise OptionError("name= is the text that files have for the class", found=repr(name))
    other = _BY_NAME.get(name)
    if other is not None and not _is_same(other.cls, cls):
        raise CodecNameError(
            "the name belongs to another class",
            where=name,
            expected=_name_of(other.cls),
            found=_name_of(cls),
            remedy="give it a name of its own with name=",
        )
    for old in (_BY_CLASS.get(cls), other):
        if old is not None:
            _BY_CLASS.pop(old.cls, None)
            _BY_NAME.pop(old.name, None)
            _REPLACED.add(old.cls)
    _REPLACED.discard(cls)
    _BY_CLASS[cls] = _BY_NAME[name] = Codec(cls, name, encode, decode)


def is_registered(cls: type) -> bool:
    return cls in _BY_CLASS or cls in _REPLACED


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _is_same(a: type, b: type) -> bool:
    """Whether it is the same class, perhaps after its module, or a cell of a notebook, has run again."""
    return a is b or _name_of(a) == _name_of(b)


def _encode(value: Any, encoder: Encoder) -> Tree:
    codec = _BY_CLASS.get(type(value))
    if codec is None:
        raise encoder.fail(
            "another class of the same module and name has been registered after the class of this object",
            found=_name_of(type(value)),
            remedy="give each of the classes a name of its own, register_codec(..., name=)",
        )
    try:
        encoded = codec.encode(value)
    except ModelStateError:
        raise
    except Exception as error:
        what = f"the function that encodes {codec.name} raised {type(error).__name__}"
        raise encoder.fail(what, found=error) from error
    return {"codec": codec.name, "value": encoder.child(encoded, (FIELD, "encoded"))}


def _decode(tree: Tree, decoder: Decoder) -> Any:
    name, inner = decoder.fields(tree, "codec", "value")
    codec = _BY_NAME.get(decoder.expect(name, str))
    if codec is None:
        raise UnknownClassError(
            f"nothing is registered under {name[:200]!r}",
            where=decoder.place,
            remedy="import what calls ms.register_codec for it, and read it again",
        )
    value = decoder.child(inner, (FIELD, "encoded"))
    try:
        made = codec.decode(value)
    except ModelStateError:
        raise
    except Exception as error:
        raise decoder.fail(
            f"the function that decodes {codec.name} raised {type(error).__name__}", found=error
        ) from error
    if not isinstance(made, codec.cls):
        raise decoder.fail(
            f"the function that decodes {codec.name} returned something else",
            expected=codec.cls.__qualname__,
            found=type(made).__qualname__,
        )
    return made


OBJECT = Kind("object", _encode, _decode)
