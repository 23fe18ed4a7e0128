"""`encode`, `decode` and `register_codec`: convert plain values to JSON and tensors, and back."""

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
    """The encoding that was registered for a class."""

    cls: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_BY_CLASS: dict[type, Codec] = {}
_BY_NAME: dict[str, Codec] = {}
_REPLACED: WeakSet[type] = WeakSet()
"""Classes that were registered, and whose name in files belongs to another class now."""


def is_registered(cls: type) -> bool:
    """Whether the class is, or was, registered."""
    return cls in _BY_CLASS or cls in _REPLACED


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


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
        result = codec.decode(value)
    except ModelStateError:
        raise
    except Exception as error:
        raise decoder.fail(
            f"the function that decodes {codec.name} raised {type(error).__name__}", found=error
        ) from error
    if not isinstance(result, codec.cls):
        raise decoder.fail(
            f"the function that decodes {codec.name} returned something else",
            expected=codec.cls.__qualname__,
            found=type(result).__qualname__,
        )
    return result


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
    """Encodes a value as a tree of JSON types, in which the only other leaves are plain tensors.

    The tree shares no memory with the value: its tensors are detached copies, on the same devices, of the elements that
    the tensors of the value show. A tensor, an array or a `torch.Generator` that appears in several places is one
    tensor in the tree, and one object again when it is decoded; any other object is encoded once for each place. The
    tree can be saved with `torch.save` and loaded with `torch.load(weights_only=True)`.

    Args:
        value: The value.
        where: Precedes the place within the value in messages.
        leaf: Called with each tensor, which is not copied; returns a text or number that identifies it. The tree then
            contains JSON types only.

    Raises:
        UnsupportedValueError: A value has no encoding, contains itself, is nested too deeply, or would take too long to
            decode (see `modelstate.codec.walk`).

    Example:
        >>> encode({"shape": (2, 3)})
        {'shape': {'$tuple': [2, 3]}}
    """
    encoder = Encoder(KINDS, where, leaf)
    try:
        return encoder.value(value)
    except RecursionError as error:
        raise UnsupportedValueError("this is nested too deeply for the stack that is left", where=where) from error


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
        EncodedValueError: The tree is not an encoded value.
        UnknownClassError: A class does not exist, is of another kind, or has other fields.

    Example:
        >>> decode({"shape": {"$tuple": [2, 3]}})
        {'shape': (2, 3)}
    """
    decoder = Decoder(KINDS, where, leaf)
    try:
        return decoder.value(tree)
    except RecursionError as error:
        raise EncodedValueError("this is nested too deeply for the stack that is left", where=where) from error


def register_codec(
    cls: type[T], encode: Callable[[T], Any], decode: Callable[[Any], T], name: str | None = None
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
        CodecNameError: The name belongs to another class.
        OptionError: An argument is not valid, or the class has an encoding already.

    Example:
        >>> class Celsius:
        ...     def __init__(self, degrees): self.degrees = degrees
        >>> register_codec(Celsius, lambda value: value.degrees, Celsius, name="celsius")
        >>> encode(Celsius(20.5))
        {'$object': {'codec': 'celsius', 'value': 20.5}}
    """
    if not isinstance(cls, type):
        raise OptionError("what is registered is a class", found=repr(cls))
    if cls in _BY_TYPE or cls in (bool, list, type(None)):
        raise OptionError("a class that has an encoding already", found=cls.__qualname__)
    if not callable(encode) or not callable(decode):
        raise OptionError("encode and decode are functions", found=f"{encode!r}, {decode!r}")
    name = _name_of(cls) if name is None else name
    if not isinstance(name, str) or not name:
        raise OptionError("name= is the text that files have for the class", found=repr(name))
    other = _BY_NAME.get(name)
    # A class of the same name is the same class after its module, or a cell of a notebook, has run again.
    if other is not None and other.cls is not cls and _name_of(other.cls) != _name_of(cls):
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
