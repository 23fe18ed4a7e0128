"""`encode`, `decode` and `register_codec`: plain values as JSON and tensors, and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

from modelstate.codec import array_values, python_values
from modelstate.codec.walk import FIELD, Decoder, Encoder, Kind, Kinds, Leaf, Tree
from modelstate.errors import (
    CodecNameError,
    EncodedValueError,
    ModelStateError,
    OptionError,
    UnknownClassError,
    UnsupportedValueError,
)


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


T = TypeVar("T")

_BY_TYPE = {**python_values.KINDS, **array_values.TORCH_KINDS, **array_values.NUMPY_KINDS}
_RULES: tuple[tuple[Callable[[type], bool], Kind], ...] = (
    (is_registered, OBJECT),
    *array_values.RULES,
    *python_values.RULES,
)
_ALL = (*_BY_TYPE.values(), *(kind for _, kind in _RULES))
KINDS = Kinds(_BY_TYPE, {kind.tag: kind for kind in _ALL}, _RULES)


def encode(value: Any, where: str = "", *, leaf: Leaf | None = None) -> Tree:
    """The value as a tree of JSON types in which the only other leaves are plain tensors.

    The tree shares nothing with the value: its tensors are copies, detached, on their devices, of what they show and
    no more. A tensor that stands in several places is one tensor in the tree as well, and so are the bytes of an array
    and the state of a `torch.Generator`, which are one object again when they are decoded; other objects that do are
    written several times. The tree can go through `torch.save` and `torch.load(weights_only=True)`.

    `where` is what messages put before the place within the value. `leaf` is given each tensor, not copied, and
    returns a text or number that refers to it and to no other: then the tree is JSON alone. Raises
    `UnsupportedValueError` for values without an encoding, those that hold themselves, those that are nested too
    deeply, and those that take too long to decode (`modelstate.codec.walk`).
    """
    encoder = Encoder(KINDS, where, leaf)
    try:
        return encoder.value(value)
    except RecursionError as error:
        raise UnsupportedValueError("this is nested too deeply for the stack that is left", where=where) from error


def decode(tree: Tree, where: str = "", *, leaf: Leaf | None = None) -> Any:
    """The value of a tree, equal to the one that was encoded in type and content. Its tensors have their own memory.

    Nothing is imported, no class of a user's is called: enums, dataclasses and namedtuples are found among the modules
    that have been imported, and filled. Only functions given to `register_codec` run. `leaf` finds the tensor that a
    text or number refers to. Raises `EncodedValueError` for what is no encoded value and `UnknownClassError` where its
    class is not there, is of another kind, or has other fields.
    """
    decoder = Decoder(KINDS, where, leaf)
    try:
        return decoder.value(tree)
    except RecursionError as error:
        raise EncodedValueError("this is nested too deeply for the stack that is left", where=where) from error


def register_codec(
    cls: type[T], encode: Callable[[T], Any], decode: Callable[[Any], T], name: str | None = None
) -> None:
    """Gives the objects of exactly this class an encoding.

    `encode` makes a value of the object that has an encoding itself; `decode` makes the object of that value, at every
    load. `name` is what files have for the class, its module and qualified name unless given: with a name of its own
    the class can move. Registering a class again replaces what was there; so does another class of the same module,
    qualified name and `name`, as a cell of a notebook makes one when it runs again. Raises `CodecNameError` where the
    name belongs to another class, and `OptionError` for what cannot be registered.
    """
    if not isinstance(cls, type):
        raise OptionError("what is registered is a class", found=repr(cls))
    if cls in _BY_TYPE or cls in (bool, list, type(None)):
        raise OptionError("a class that has an encoding already", found=cls.__qualname__)
    register(cls, encode, decode, name)
