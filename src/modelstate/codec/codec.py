"""`encode`, `decode` and `register_codec`: convert plain values to JSON and tensors, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from modelstate.codec import values
from modelstate.codec.walk import FIELD, Decoder, Encoder, Leaf, Tree, ValueKind, ValueKinds, Walk
from modelstate.errors import (
    CodecError,
    ModelStateError,
    OptionError,
    UnknownClassError,
)
from modelstate.text_format import short_repr


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


def _encode(value: object, encoder: Encoder) -> Tree:
    codec = _codec_of(type(value))
    assert codec is not None
    encoded = _called(codec.encode, value, f"encodes {codec.name}", encoder)
    return {"codec": codec.name, "value": encoder.child(encoded, (FIELD, "encoded"))}


def _decode(tree: Tree, decoder: Decoder) -> object:
    name, inner = decoder.fields(tree, "codec", "value")
    codec = _CODECS.get(decoder.expect(name, str))
    if codec is None:
        raise UnknownClassError(
            f"nothing is registered under {name[:200]!r}",
            where=decoder.place,
            remedy="import what calls ms.register_codec for it, and read it again",
        )
    value = decoder.child(inner, (FIELD, "encoded"))
    result = _called(codec.decode, value, f"decodes {codec.name}", decoder)
    if not isinstance(result, codec.cls):
        raise decoder.fail(
            f"the function that decodes {codec.name} returned something else",
            expected=codec.cls.__qualname__,
            found=type(result).__qualname__,
        )
    return result


def _called(function: Callable[[Any], object], value: object, what: str, walk: Walk) -> object:
    try:
        return function(value)
    except ModelStateError:
        raise
    except Exception as error:
        raise walk.fail(f"the function that {what} raised {type(error).__name__}", found=error) from error


T = TypeVar("T")

_RULES = ((lambda cls: _codec_of(cls) is not None, ValueKind("object", _encode, _decode)), *values.RULES)
_ALL = (*values.KINDS.values(), *(kind for _, kind in _RULES))
KINDS = ValueKinds(values.KINDS, {kind.tag: kind for kind in _ALL}, _RULES)


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
    return _walked(Encoder(KINDS, where, leaf), value)


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
    return _walked(Decoder(KINDS, where, leaf), tree)


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
    if cls in KINDS.by_type or cls in (bool, list, type(None)):
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
