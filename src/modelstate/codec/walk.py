"""Walks through a value to encode it, and through a tree to decode it, within bounds on time and memory.

A tree consists of None, bool, int, finite float, str, lists, dicts with str keys, and plain tensors. Any other value is
a dict with one key, its tag: `{"$tuple": [1, 2]}`. A dict of the user that looks like a tag is written with `$dict`, so
every tag in a tree is a tag.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from modelstate.errors import CodecError, ModelStateError
from modelstate.spec import Refused
from modelstate.tensor_spec import TensorSpec
from modelstate.text_format import is_unicode, printable
from modelstate.torch_compat.values import is_tensor

if TYPE_CHECKING:
    import torch

COMPARISONS_A_KEY = 20
FREE_COMPARISONS = 1000
MAX_DRAWN = 8
"""How many times the memory of a stored tensor may be copied. A saved tensor has memory of its own."""
FREE_DRAWN_BYTES = 1024

Fail = Callable[..., Exception]
"""Creates an error with the current place."""


class Collisions:
    """Limits the comparisons that it takes to put keys into a dict or a set: each key is compared to equal hashes.

    The writer of a file can choose keys with equal hashes, since the hashes of numbers are predictable.
    """

    def __init__(self, keys: int, fail: Fail) -> None:
        self._most = FREE_COMPARISONS + COMPARISONS_A_KEY * keys
        self._matters = keys * (keys - 1) // 2 > self._most
        self._fail = fail
        self._seen: dict[int, int] = {}
        self._comparisons = 0

    def add(self, key: object) -> None:
        """Counts a key. Raises where the keys so far take too many comparisons."""
        if not self._matters:
            return
        hashed = hash(key)
        before = self._seen.get(hashed, 0)
        self._seen[hashed] = before + 1
        self._comparisons += before
        if self._comparisons > self._most:
            raise self._fail(
                "too many keys, or members of a set, have the same hash",
                expected=f"at most {COMPARISONS_A_KEY} comparisons a key",
                found=f"{before + 1:,} of one hash",
                remedy="save them as a list, or as one tensor or array",
            )


MAX_DEPTH = 100
"""Levels of containers. JSON needs up to four levels for one of these, and stays below Python's recursion limit."""
MAX_NODES = 5_000_000
"""The limit of values: a few lists that contain each other many times can stand for more values than fit in memory."""
MAX_PLAIN_INT = 2**53
"""Other readers of JSON round larger integers."""

Tree = Any
"""JSON types and tensors."""
Leaf = Callable[[Any], Any]
"""When encoding: from a tensor to the text or number that identifies it; raises `ValueError`. When decoding: the way
back; raises `LookupError`."""

ITEM, FIELD, KEY = "[{}]", ".{}", "[key {}]"
Step = tuple[str, object]
"""One step of a path: its format, and the key, index or name."""
_SHOWN_KEYS = (str, int, float, bool, bytes, tuple, type(None))
REGISTER = "give its class an encoding with ms.register_codec, or save something else in its place"
STATEFUL = "save its state_dict() in its place; ms.save does so itself for the values of dicts, not for items of lists"
_GENERATORS = {
    "torch._C.Generator": "save its get_state(), and call set_state() at the load; or save it with ms.RNG",
    "numpy.random._generator.Generator": "save its bit_generator.state, and set it at the load; or save it with ms.RNG",
    "numpy.random.mtrand.RandomState": "save its get_state(), and call set_state() at the load; or save it with ms.RNG",
}
"""What to do with random generators, which have no encoding."""


class ValueKind(msgspec.Struct, frozen=True):
    """A kind of value: its tag, and the functions that convert the value to the content of the tag and back."""

    tag: str
    encode: Callable[[Any, Encoder], Tree]
    decode: Callable[[Any, Decoder], Any]


@dataclass(frozen=True, slots=True)
class ValueKinds:
    """All known kinds."""

    by_type: dict[type, ValueKind]
    """By exact class; derived classes do not match."""
    by_tag: dict[str, ValueKind] = field(repr=False)
    by_rule: tuple[tuple[Callable[[type], bool], ValueKind], ...]
    """For classes that are not listed. The first rule that applies wins."""

    def of(self, cls: type) -> ValueKind | None:
        kind = self.by_type.get(cls)
        return kind or next((kind for applies, kind in self.by_rule if applies(cls)), None)


class Walk:
    """The current place in a value or a tree, and the amount of it that has been visited."""

    def __init__(self, kinds: ValueKinds, where: str, leaf: Leaf | None) -> None:
        self.kinds, self.where, self.leaf = kinds, where, leaf
        self.own_hashes = 0
        """The number of visited objects whose class defines `__hash__`, which would run if the object were a key."""
        self._path: list[Step] = []
        self._nodes = 0

    def value(self, value: Any) -> Any:
        """Converts a value, or a tree, at the current place. Raises `CodecError`."""
        raise NotImplementedError

    def child(self, value: Any, step: Step) -> Any:
        """Converts a value, or a tree, that is one step from the current place."""
        self._path.append(step)
        self._nodes += 1
        deep = len(self._path) > MAX_DEPTH
        if deep or self._nodes > MAX_NODES:
            raise self.fail(
                "this is nested too deeply" if deep else "these are too many values",
                expected=f"at most {MAX_DEPTH} levels and {MAX_NODES:,} values",
                remedy="save it flatter, or as one tensor or array",
            )
        result = self.value(value)
        self._path.pop()  # not after an error, whose text has the place
        return result

    def check_key(self, key: object, own_hashes: int) -> None:
        """Raises for a key that must not be hashed and compared, given the count from before the key."""
        if self.own_hashes != own_hashes:
            raise self.fail(
                "a key, or a member of a set, whose class has a __hash__ of its own: it would run at every load",
                found=_shown(key),
                remedy=REGISTER,
            )

    def fail(self, what: str, *, expected: object = "", found: object = "", remedy: object = "") -> CodecError:
        return CodecError(what, where=self.place, expected=expected, found=found, remedy=remedy)

    @property
    def place(self) -> str:
        """The current place, as the code that would reach it."""
        steps = (form.format(key if form == FIELD else _shown(key)) for form, key in self._path)
        return printable(self.where + "".join(steps))


class Encoder(Walk):
    """Converts a value to its tree."""

    def __init__(self, kinds: ValueKinds, where: str, leaf: Leaf | None) -> None:
        super().__init__(kinds, where, leaf)
        self._open: set[int] = set()
        self._tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        """The class of tensors; None before torch is imported, when there are none."""
        self._snapshots: dict[int, tuple[torch.Tensor, Tree]] = {}
        self._arrays: dict[int, tuple[object, torch.Tensor]] = {}

    def children(self, values: Iterable[object]) -> list[Tree]:
        trees = []
        for index, value in enumerate(values):
            trees.append(self.child(value, (ITEM, index)))
        return trees

    def named(self, values: Mapping[str, object]) -> dict[str, Tree]:
        """Encodes the fields of an object by name."""
        trees = {}
        for name, value in values.items():
            trees[name] = self.child(value, (FIELD, name))
        return trees

    def pairs(self, mapping: Mapping[Any, object]) -> list[list[Tree]]:
        trees, collisions = [], Collisions(len(mapping), self.fail)
        for key, value in mapping.items():
            tree = self.key(key)
            collisions.add(key)
            trees.append([tree, self.child(value, (ITEM, key))])
        return trees

    def key(self, key: object) -> Tree:
        """Encodes a key, which is hashed when it is decoded."""
        before = self.own_hashes
        tree = self.child(key, (KEY, key))
        self.check_key(key, before)
        return tree

    def tensor(self, tensor: torch.Tensor) -> Tree:
        """Encodes a tensor as a copy of the elements that it shows; the same tensor becomes the same tree."""
        from modelstate.torch_compat.plain import own_copy, why_not_plain

        entry = self._snapshots.get(id(tensor))
        if entry is None:
            if problem := why_not_plain(tensor):
                raise self.fail(problem, remedy="save its parts, or tensor.dense() or the like; " + REGISTER)
            tree: Tree
            if self.leaf is None:
                try:
                    tree = own_copy(tensor)
                except RuntimeError as error:
                    what = f"torch cannot copy a tensor of {tensor.dtype}"
                    raise self.fail(what, found=error, remedy=REGISTER) from error
            else:
                try:
                    tree = {"$tensor": self.leaf(tensor.detach())}
                except ValueError as error:
                    what = f"a tensor that cannot be stored: {error}"
                    raise self.fail(what, remedy="convert it; " + REGISTER) from error
            entry = self._snapshots[id(tensor)] = tensor, tree
        return entry[1]

    def array(self, value: object, data: Callable[[], torch.Tensor]) -> Tree:
        """Encodes an array by the tensor of its bytes; the same array becomes the same tree."""
        entry = self._arrays.get(id(value))
        if entry is None:
            entry = self._arrays[id(value)] = value, data()
        return self.tensor(entry[1])

    def value(self, value: Any) -> Tree:
        cls = type(value)
        if value is None or cls is bool:
            return value
        if cls is str:
            return (
                value if is_unicode(value) else {"$str": self.value(value.encode("utf-8", "surrogatepass"))["$bytes"]}
            )
        if cls is int:
            return value if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT else {"$int": hex(value)}
        if cls is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if cls is self._tensor and not value.requires_grad:
            return self.tensor(value)
        if id(value) in self._open:
            raise self.fail("a value that holds itself", found=cls.__qualname__, remedy="save it without the loop")
        self._open.add(id(value))
        tree = self._container(cls, value)
        self._open.discard(id(value))
        return tree

    def _container(self, cls: type, value: Any) -> Tree:
        if cls is list:
            return self.children(value)
        if cls is dict and all(type(key) is str and is_unicode(key) for key in value) and not looks_like_tag(value):
            trees = {}
            for key, item in value.items():
                trees[key] = self.child(item, (ITEM, key))
            return trees
        if cls is Refused:
            raise self.fail(
                "a placeholder for a value that was not read from its file",
                found=_shown(value),
                remedy="open the file with allow=, or leave the value out",
            )
        if cls is TensorSpec:
            raise self.fail(
                "a TensorSpec, which describes a stored tensor and has no values",
                found=_shown(value),
                remedy=f"save checkpoint.tensor({value.name!r}), or the whole checkpoint: ms.save(checkpoint, path)",
            )
        kind = self.kinds.of(cls)
        if kind is None:
            name = f"{cls.__module__}.{cls.__qualname__}"
            raise self.fail(
                f"there is no encoding for values of {name}",
                found=_shown(value),
                remedy=STATEFUL if hasattr(value, "state_dict") else _GENERATORS.get(name, REGISTER),
            )
        return {f"${kind.tag}": kind.encode(value, self)}


class Decoder(Walk):
    """Converts a tree to its value."""

    def __init__(self, kinds: ValueKinds, where: str, leaf: Leaf | None) -> None:
        super().__init__(kinds, where, leaf)
        self._leaves: dict[str | int, object] = {}
        self._copies: dict[tuple[int, bool, bool], tuple[torch.Tensor, torch.Tensor]] = {}
        self._arrays: dict[int, tuple[torch.Tensor, object, object]] = {}
        self._drawn: dict[int, int] = {}

    def children(self, trees: Tree) -> list[Any]:
        values = []
        for index, tree in enumerate(self.expect(trees, list)):
            values.append(self.child(tree, (ITEM, index)))
        return values

    def named(self, trees: Tree) -> dict[str, Any]:
        values = {}
        for name, tree in self.expect(trees, dict).items():
            values[self.expect(name, str)] = self.child(tree, (FIELD, name))
        return values

    def pairs(self, trees: Tree, into: Any) -> Any:
        """Decodes pairs of keys and values into an empty dict, and returns it."""
        collisions = Collisions(len(self.expect(trees, list)), self.fail)
        for pair in trees:
            if type(pair) is not list or len(pair) != 2:
                raise self.fail("no pair of key and value", expected="[key, value]", found=_shown(pair))
            key = self.key(pair[0])
            collisions.add(key)
            if key in into:
                raise self.fail("a key stands twice", found=_shown(key))
            into[key] = self.child(pair[1], (ITEM, key))
        return into

    def key(self, tree: Tree) -> Any:
        before = self.own_hashes
        key = self.child(tree, (KEY, "…"))
        self.check_key(key, before)
        return key

    def expect(self, tree: Tree, cls: type) -> Any:
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

        tree = self._stored(tree)
        entry = self._copies.get((id(tree), parameter, requires_grad))
        if entry is None:
            self._draw(tree)
            copy = own_copy(tree)
            value = torch.nn.Parameter(copy, requires_grad) if parameter else copy.requires_grad_(requires_grad)
            entry = self._copies[id(tree), parameter, requires_grad] = tree, value
        return entry[1]

    def array(self, tree: Tree, description: object, make: Callable[[torch.Tensor], Any]) -> Any:
        """An array that is created from a tensor of bytes; the same tensor of the tree becomes the same array.

        `make` must not keep the tensor, which belongs to the tree.
        """
        tree = self._stored(tree)
        entry = self._arrays.get(id(tree))
        if entry is None:
            self._draw(tree)
            entry = self._arrays[id(tree)] = tree, description, make(tree.detach())
        elif entry[1] != description:
            raise self.fail("two arrays that differ are made of one tensor")
        return entry[2]

    def _stored(self, tree: Tree) -> torch.Tensor:
        if self.leaf and type(tree) is dict and list(tree) == ["$tensor"]:
            tree = self._referred(tree["$tensor"], self.leaf)
        if not is_tensor(tree):
            raise self.fail("this is no tensor", found=_shown(tree))
        return tree

    def _draw(self, tree: torch.Tensor) -> None:
        """Raises for a tensor that cannot be copied, and where the copies of one memory become many times as large."""
        from modelstate.torch_compat.plain import why_not_plain

        if problem := why_not_plain(tree):
            raise self.fail(problem)
        storage = tree.untyped_storage()
        drawn = self._drawn.get(storage.data_ptr(), 0) + tree.numel() * tree.itemsize
        self._drawn[storage.data_ptr()] = drawn
        if drawn > MAX_DRAWN * storage.nbytes() + FREE_DRAWN_BYTES:
            raise self.fail(
                "tensors that show the same memory over and over",
                expected=f"at most {MAX_DRAWN} times {storage.nbytes():,} bytes",
                found=f"{drawn:,} bytes",
                remedy="save them as tensors with memory of their own",
            )

    def _referred(self, reference: object, leaf: Leaf) -> object:
        if not isinstance(reference, str | int) or isinstance(reference, bool):
            raise self.fail("this refers to no tensor", found=_shown(reference))
        if reference not in self._leaves:
            try:
                self._leaves[reference] = leaf(reference)
            except (LookupError, TypeError) as error:
                raise self.fail("it refers to a tensor that is not there", found=_shown(reference)) from error
        return self._leaves[reference]

    def value(self, tree: Tree) -> Any:
        cls = type(tree)
        if tree is None or cls in (bool, int, str):
            return tree
        if cls is float and math.isfinite(tree):
            return tree
        if cls is list:
            return self.children(tree)
        if cls is dict:
            return self._tagged(tree) if looks_like_tag(tree) else self._dict(tree)
        if is_tensor(tree):
            return self.tensor(tree)
        raise self.fail("an encoded value cannot hold this", found=_shown(tree))

    def _dict(self, tree: dict[str, Tree]) -> dict[str, Any]:
        values = {}
        for key, item in tree.items():
            values[self.expect(key, str)] = self.child(item, (ITEM, key))
        return values

    def _tagged(self, tree: dict[str, Tree]) -> object:
        ((name, payload),) = tree.items()
        if name == "$tensor":
            return self.tensor(tree)
        kind = self.kinds.by_tag.get(name[1:])
        if kind is None:
            raise self.fail("an unknown tag", found=_shown(name), remedy="a newer version may know it")
        try:
            return kind.decode(payload, self)
        except (ModelStateError, MemoryError, RecursionError):
            raise
        except Exception as error:
            what = f"what stands behind {name} makes no value"
            raise self.fail(what, found=f"{_shown(payload)}: {type(error).__name__}") from error


def looks_like_tag(tree: Mapping[Any, object]) -> bool:
    return len(tree) == 1 and all(type(key) is str and key.startswith("$") for key in tree)


def _shown(value: object) -> str:
    """A value for a message. Of objects only the class is shown, since their `__repr__` is foreign code."""
    if type(value) not in _SHOWN_KEYS and type(value) is not list:
        return f"a {type(value).__qualname__}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}" if value else repr(value)
    if type(value) is int and abs(value) > 10**40:
        return "a large int"
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
