"""Walks through a value to encode it, and through a tree to decode it, within bounds on time and memory.

A tree consists of None, bool, int, finite float, str, lists, dicts with str keys, and plain tensors. Other values
are dicts with one key, its tag: `{"$tuple": [1, 2]}`. A dict of the user that looks like a tag is written with
`$dict`, so every tag in a tree is a tag.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from modelstate.errors import CodecError, ModelStateError
from modelstate.spec import is_tensor
from modelstate.text_format import is_unicode, printable

if TYPE_CHECKING:
    import torch

MAX_DEPTH = 100
"""Levels of containers. JSON needs up to four levels for one of these, and stays below Python's recursion limit."""
MAX_NODES = 5_000_000
"""The limit of values: a few lists that contain each other many times can stand for more values than fit in memory."""
MAX_PLAIN_INT = 2**53
"""Other readers of JSON round larger integers."""
MAX_SAME_HASH = 64
"""A dict and a set compare a member with all others of the same hash. The hashes of numbers are easy to choose."""
MAX_EXPANDED = 8
"""How many times the memory of a stored tensor its elements may be. A saved tensor has memory of its own."""

Tree = Any
"""JSON types and tensors; also a value that becomes a tree, or was one."""
Leaf = Callable[[Tree], Tree]
"""When encoding: from a tensor to the text or number that identifies it; raises `ValueError`. When decoding: the way
back; raises `LookupError`."""

ITEM, FIELD, KEY = "[{}]", ".{}", "[key {}]"
_Dict = TypeVar("_Dict", bound=dict[object, object])
Step = tuple[str, object]
"""One step of a path: its format, and the key, index or name."""
_SHOWN = (str, int, float, bool, bytes, tuple, list, type(None))
REGISTER = "give its class an encoding with ms.register_codec, or save something else in its place"
_GENERATOR = "save its {}, and set it at the load; or save it with ms.RNG"
_REMEDIES = {
    "torch._C.Generator": _GENERATOR.format("get_state()"),
    "numpy.random._generator.Generator": _GENERATOR.format("bit_generator.state"),
    "numpy.random.mtrand.RandomState": _GENERATOR.format("get_state()"),
    "collections.deque": "ms.register_codec(collections.deque, lambda queue: [list(queue), queue.maxlen], "
    "lambda saved: collections.deque(*saved))",
    "modelstate.spec.Refused": "the value was not read from its file: open the file with allow=, or leave it out",
    "modelstate.tensor_spec.TensorSpec": "it describes a stored tensor and has no values: save "
    "checkpoint.tensor(name), or the whole checkpoint: ms.save(checkpoint, path)",
}
"""What to do with values that have no encoding, by class."""


class ValueKind(msgspec.Struct, frozen=True):
    """A kind of value: its tag, and the functions that convert the value to the content of the tag and back."""

    tag: str
    encode: Callable[[Any, Encoder], Tree]
    decode: Callable[[Tree, Decoder], object]


class Walk:
    """The current place in a value or a tree, and the amount of it that has been visited."""

    def __init__(self, where: str, leaf: Leaf | None) -> None:
        self.where, self.leaf = where, leaf
        self.own_hashes = 0
        """The number of visited objects whose class defines `__hash__`, which would run if the object were a key."""
        self._path: list[Step] = []
        self._nodes = 0

    def value(self, value: Tree) -> Tree:
        """Converts a value, or a tree, at the current place. Raises `CodecError`."""
        raise NotImplementedError

    def child(self, value: Tree, step: Step) -> Tree:
        """Converts a value, or a tree, that is one step from the current place."""
        self._path.append(step)
        self._nodes += 1
        is_deep = len(self._path) > MAX_DEPTH
        if is_deep or self._nodes > MAX_NODES:
            raise self.fail(
                "this is nested too deeply" if is_deep else "these are too many values",
                expected=f"at most {MAX_DEPTH} levels and {MAX_NODES:,} values",
                remedy="save it flatter, or as one tensor or array",
            )
        result = self.value(value)
        self._path.pop()  # not after an error, whose text has the place
        return result

    def children(self, values: Iterable[object]) -> list[Tree]:
        """Converts the items of a sequence."""
        return [self.child(value, (ITEM, index)) for index, value in enumerate(values)]

    def named(self, values: Mapping[str, object]) -> dict[str, Tree]:
        """Converts the fields of an object by name."""
        return {name: self.child(value, (FIELD, name)) for name, value in values.items()}

    def key(self, key: object, place: object) -> Tree:
        """Converts a key or a member of a set, which is hashed when it is decoded."""
        own_hashes = self.own_hashes
        result = self.child(key, (KEY, place))
        if self.own_hashes != own_hashes:
            raise self.fail(
                "a key, or a member of a set, whose class has a __hash__ of its own: it would run at every load",
                found=_shown(place),
                remedy=REGISTER,
            )
        return result

    def check_hashes(self, members: Iterable[object]) -> None:
        """Raises where so many members of a set, or keys of a dict, have one hash that comparing them takes long."""
        most = max(Counter(map(hash, members)).values(), default=0)
        if most > MAX_SAME_HASH:
            raise self.fail(
                "too many keys, or members of a set, have the same hash",
                expected=f"at most {MAX_SAME_HASH}",
                found=f"{most:,}",
                remedy="save them as a list, or as one tensor or array",
            )

    def fail(self, what: str, *, expected: object = "", found: object = "", remedy: object = "") -> CodecError:
        """Creates an error with the current place."""
        return CodecError(what, where=self.place, expected=expected, found=found, remedy=remedy)

    @property
    def place(self) -> str:
        """The current place, as the code that would reach it."""
        steps = (form.format(key if form == FIELD else _shown(key)) for form, key in self._path)
        return printable(self.where + "".join(steps))


class Encoder(Walk):
    """Converts a value to its tree. `kind_of` returns the kind of the objects of exactly a class."""

    def __init__(self, kind_of: Callable[[type], ValueKind | None], where: str, leaf: Leaf | None) -> None:
        super().__init__(where, leaf)
        self._kind_of = kind_of
        self._open: set[int] = set()
        self._tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        """The class of tensors; None before torch is imported, when there are none."""
        self._snapshots: dict[int, tuple[torch.Tensor, Tree]] = {}
        self._arrays: dict[int, tuple[object, torch.Tensor]] = {}

    def pairs(self, mapping: Mapping[object, object]) -> list[list[Tree]]:
        """Encodes a dict with any keys."""
        self.check_hashes(mapping)
        return [[self.key(key, key), self.child(value, (ITEM, key))] for key, value in mapping.items()]

    def tensor(self, tensor: torch.Tensor) -> Tree:
        """Encodes a tensor as a copy of the elements that it shows; the same tensor becomes the same tree."""
        from modelstate.torch_compat.plain import own_copy, why_not_plain

        if id(tensor) not in self._snapshots:
            if problem := why_not_plain(tensor):
                raise self.fail(problem, remedy="save its parts, or tensor.dense() or the like; " + REGISTER)
            try:
                tree = own_copy(tensor) if self.leaf is None else {"$tensor": self.leaf(tensor.detach())}
            except (RuntimeError, ValueError) as error:
                what = f"a tensor of {tensor.dtype} that cannot be stored: {error}"
                raise self.fail(what, remedy="convert it; " + REGISTER) from error
            self._snapshots[id(tensor)] = tensor, tree
        return self._snapshots[id(tensor)][1]

    def array(self, value: object, data: Callable[[], torch.Tensor]) -> Tree:
        """Encodes an array by the tensor of its bytes; the same array becomes the same tree."""
        if id(value) not in self._arrays:
            self._arrays[id(value)] = value, data()
        return self.tensor(self._arrays[id(value)][1])

    def value(self, value: Tree) -> Tree:
        cls = type(value)
        if (
            value is None
            or cls is bool
            or (cls is str and is_unicode(value))
            or (cls is int and -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT)
            or (cls is float and math.isfinite(value))
        ):
            return value
        if cls is self._tensor and not value.requires_grad:
            return self.tensor(value)
        if id(value) in self._open:
            raise self.fail("a value that holds itself", found=cls.__qualname__, remedy="save it without the loop")
        self._open.add(id(value))
        tree = self._container(cls, value)
        self._open.discard(id(value))
        return tree

    def _container(self, cls: type, value: Tree) -> Tree:
        if cls is list:
            return self.children(value)
        if cls is dict and all(type(key) is str and is_unicode(key) for key in value) and not looks_like_tag(value):
            return {key: self.child(item, (ITEM, key)) for key, item in value.items()}
        kind = self._kind_of(cls)
        if kind is None:
            name = f"{cls.__module__}.{cls.__qualname__}"
            remedy = _REMEDIES.get(name, REGISTER)
            if hasattr(value, "state_dict"):
                remedy = (
                    "save its state_dict() in its place; ms.save does so itself for the values of dicts, not for items "
                    "of lists"
                )
            raise self.fail(f"there is no encoding for values of {name}", found=_shown(value), remedy=remedy)
        return {f"${kind.tag}": kind.encode(value, self)}


class Decoder(Walk):
    """Converts a tree to its value. `tags` has the kinds by their tags."""

    def __init__(self, tags: Mapping[str, ValueKind], where: str, leaf: Leaf | None) -> None:
        super().__init__(where, leaf)
        self._tags = tags
        self._leaves: dict[str | int, object] = {}
        self._copies: dict[tuple[int, bool, bool], tuple[torch.Tensor, torch.Tensor]] = {}
        self._arrays: dict[int, tuple[torch.Tensor, object, object]] = {}

    def pairs(self, trees: Tree, into: _Dict) -> _Dict:
        """Decodes pairs of keys and values into an empty dict, and returns it."""
        pairs = [self.expect(pair, list) for pair in self.expect(trees, list)]
        keys = self.keys([key for key, _ in pairs])
        for key, (_, tree) in zip(keys, pairs, strict=True):
            into[key] = self.child(tree, (ITEM, key))
        return into

    def keys(self, trees: Tree) -> list[Tree]:
        """Decodes the keys of a dict or the members of a set, which differ."""
        keys = [self.key(tree, "…") for tree in self.expect(trees, list)]
        self.check_hashes(keys)
        if len(set(keys)) < len(keys):
            raise self.fail("a key, or a member of a set, stands twice")
        return keys

    def expect(self, tree: Tree, cls: type) -> Tree:
        """Returns the tree if it is of the class. Raises `CodecError`."""
        if type(tree) is not cls:
            raise self.fail("this is not what a tag needs", expected=cls.__name__, found=_shown(tree))
        return tree

    def fields(self, tree: Tree, *names: str) -> list[Tree]:
        """The values of a dict with exactly these keys."""
        if set(self.expect(tree, dict)) != set(names):
            raise self.fail("the fields of a tag are wrong", expected=", ".join(names), found=_shown(list(tree)))
        return [tree[name] for name in names]

    def tensor(self, tree: Tree, parameter: bool = False, requires_grad: bool = False) -> torch.Tensor:
        """A tensor in memory of its own; the same tensor of the tree becomes the same tensor."""
        import torch

        from modelstate.torch_compat.plain import own_copy

        stored = self._stored(tree)
        key = id(stored), parameter, requires_grad
        if key not in self._copies:
            copy = own_copy(stored)
            tensor = torch.nn.Parameter(copy, requires_grad) if parameter else copy.requires_grad_(requires_grad)
            self._copies[key] = stored, tensor
        return self._copies[key][1]

    def array(self, tree: Tree, description: object, make: Callable[[torch.Tensor], object]) -> object:
        """An array that is created from a tensor of bytes; the same tensor of the tree becomes the same array.

        `make` must not keep the tensor, which belongs to the tree.
        """
        stored = self._stored(tree)
        if id(stored) not in self._arrays:
            self._arrays[id(stored)] = stored, description, make(stored.detach())
        _, known, array = self._arrays[id(stored)]
        if known != description:
            raise self.fail("two arrays that differ are made of one tensor")
        return array

    def _stored(self, tree: Tree) -> torch.Tensor:
        """The tensor of a tree, which may be copied."""
        from modelstate.torch_compat.plain import why_not_plain

        if self.leaf and type(tree) is dict and list(tree) == ["$tensor"]:
            reference = tree["$tensor"]
            if type(reference) not in (str, int):
                raise self.fail("this refers to no tensor", found=_shown(reference))
            if reference not in self._leaves:
                try:
                    self._leaves[reference] = self.leaf(reference)
                except (LookupError, TypeError) as error:
                    raise self.fail("it refers to a tensor that is not there", found=_shown(reference)) from error
            tree = self._leaves[reference]
        if not is_tensor(tree):
            raise self.fail("this is no tensor", found=_shown(tree))
        if problem := why_not_plain(tree):
            raise self.fail(problem)
        memory_bytes = tree.untyped_storage().nbytes()
        if tree.nbytes > MAX_EXPANDED * memory_bytes:
            raise self.fail(
                "a tensor that shows the same memory over and over",
                expected=f"at most {MAX_EXPANDED} times {memory_bytes:,} bytes",
                found=f"{tree.nbytes:,} bytes",
            )
        return tree

    def value(self, tree: Tree) -> Tree:
        cls = type(tree)
        if tree is None or cls in (bool, int, str) or (cls is float and math.isfinite(tree)):
            return tree
        if cls is list:
            return self.children(tree)
        if cls is dict:
            if looks_like_tag(tree):
                return self._tagged(tree)
            return {self.expect(key, str): self.child(item, (ITEM, key)) for key, item in tree.items()}
        if is_tensor(tree):
            return self.tensor(tree)
        raise self.fail("an encoded value cannot hold this", found=_shown(tree))

    def _tagged(self, tree: dict[str, Tree]) -> object:
        ((name, payload),) = tree.items()
        if name == "$tensor":
            return self.tensor(tree)
        kind = self._tags.get(name[1:])
        if kind is None:
            raise self.fail("an unknown tag", found=_shown(name), remedy="a newer version may know it")
        try:
            return kind.decode(payload, self)
        except (ModelStateError, MemoryError, RecursionError):
            raise
        except Exception as error:
            what = f"what stands behind {name} makes no value"
            raise self.fail(what, found=f"{_shown(payload)}: {type(error).__name__}") from error


def looks_like_tag(tree: Mapping[object, object]) -> bool:
    return len(tree) == 1 and all(type(key) is str and key.startswith("$") for key in tree)


def _shown(value: object) -> str:
    """A value for a message. Of objects only the class is shown, since their `__repr__` is foreign code."""
    if type(value) not in _SHOWN:
        return f"a {type(value).__qualname__}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}" if value else repr(value)
    if type(value) is int and abs(value) > 10**40:
        return "a large int"
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
