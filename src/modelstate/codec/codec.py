"""`encode`, `decode` and `register_codec`."""

from collections.abc import Callable
from typing import Any, TypeVar

from modelstate.codec import builtin, classes, numpy_values, registry, torch_values
from modelstate.codec.walk import Decoder, Encoder, Kind, Kinds, Leaf, Tree
from modelstate.errors import EncodedValueError, OptionError, UnsupportedValueError

T = TypeVar("T")

_BY_TYPE = {**builtin.KINDS, **torch_values.KINDS, **numpy_values.KINDS}
_RULES: tuple[tuple[Callable[[type], bool], Kind], ...] = (
    (registry.is_registered, registry.OBJECT),
    *numpy_values.RULES,
    *classes.RULES,
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
    deeply, and those that take too long to decode (`modelstate.codec.bounds`).
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
    registry.register(cls, encode, decode, name)
