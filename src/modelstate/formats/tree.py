"""Checkpoints as trees of containers, tensors and plain values: flattening, subtrees, equality."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from modelstate.codec.array_values import another_uninitialised
from modelstate.codec.codec import decode
from modelstate.errors import DuplicateNameError, KeyNotFoundError, SourceTypeError
from modelstate.spec import Combined, Encoded, Stored, StoredComposite, StoredTensor

EXTRA_STATE = "_extra_state"
"""The name under which torch keeps what `Module.get_extra_state` returns."""

_TENSORS = (StoredTensor, StoredComposite, Combined, torch.Tensor)
_MAX_DEPTH = 500
_MAX_NODES = 5_000_000


@dataclass(slots=True)
class FlatTree:
    """The flat view of a tree."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    """In the order of the tree."""
    values: dict[str, Any] = field(default_factory=dict)
    """The largest parts of the tree without tensors, and every `_extra_state`, by their paths."""
    containers: list[str] = field(default_factory=list)
    """Paths of the mappings that hold tensors at any depth; the root is the empty path."""


def _is_tensor(node: object) -> bool:
    """Whether the node is a tensor. What has no shape yet, as in a lazy module that has not run, is a value."""
    return isinstance(node, _TENSORS) and not (isinstance(node, torch.Tensor) and is_lazy(node))


def is_container(node: object) -> bool:
    """Whether the node's items are parts of the tree. A `torch.Size` is a value."""
    return isinstance(node, Mapping | list | tuple) and not isinstance(node, torch.Size)


def items_of(node: object) -> Iterator[tuple[str, Any]]:
    """The children of a container with their names in a path."""
    if isinstance(node, Mapping):
        return ((str(key), value) for key, value in node.items())
    assert isinstance(node, list | tuple)
    return ((str(index), value) for index, value in enumerate(node))


def flatten(tree: object, where: str) -> FlatTree:
    """The flat view of `tree`.

    Raises `DuplicateNameError` where two leaves get one name, and `SourceTypeError` for a tree that holds itself, is
    nested deeper than 500, or has more than 5 million nodes (a few shared lists can stand for more than any memory).
    """
    flat = FlatTree()
    _Flattener(flat, where).visit(tree, "", 0)
    return flat


class _Flattener:
    def __init__(self, flat: FlatTree, where: str) -> None:
        self.flat, self.where = flat, where
        self.nodes = 0

    def visit(self, node: Any, path: str, depth: int) -> bool:
        """Adds what is below `node`; whether that includes a tensor."""
        if _is_tensor(node):
            self.add(self.flat.tensors, path if depth else "tensor", node)
            return True
        if not is_container(node):
            return False
        if depth > _MAX_DEPTH or self.nodes > _MAX_NODES:
            raise SourceTypeError(
                "a tree without end" if depth > _MAX_DEPTH else "a tree with too many values",
                where=f"{self.where}, at {path[:80]!r}",
                expected=f"at most {_MAX_DEPTH} levels and {_MAX_NODES} values",
                remedy="look for a container that holds itself, or the same list many times",
            )
        found: list[tuple[str, Any, bool]] = []
        has_tensors = False
        place = len(self.flat.containers)
        try:
            children = list(items_of(node))
        except Exception as error:  # of a key of any class
            raise SourceTypeError(
                "a key has no text, which is a part of names",
                where=f"{self.where}, at {path[:80]!r}",
                found=f"str() of it raises {type(error).__name__}",
            ) from error
        self.nodes += len(children)
        for name, child in children:
            below = f"{path}.{name}" if depth else name
            if _is_tensor(child):
                self.add(self.flat.tensors, below, child)
                has_tensors = True
                continue
            whole = name.endswith(EXTRA_STATE) and _is_extra_state(name) and is_container(child)
            found.append((below, child, not whole and self.visit(child, below, depth + 1)))
        has_tensors = has_tensors or any(below_has for _, _, below_has in found)
        if not has_tensors and depth and not _holds_extra_state(node):
            return False
        for below, child, below_has in found:
            if not below_has:
                self.add(self.flat.values, below, child)
        if isinstance(node, Mapping):
            self.flat.containers.insert(place, path)
        return True

    def add(self, into: dict[str, Any], path: str, leaf: Any) -> None:
        if path in self.flat.tensors or path in self.flat.values:
            raise DuplicateNameError(
                "two values have one name when their keys are joined with dots",
                where=self.where,
                found=path,
                remedy="open one part of the checkpoint alone, or rename a key",
            )
        into[path] = leaf


def _holds_extra_state(node: object) -> bool:
    return isinstance(node, Mapping) and any(_is_extra_state(str(key)) for key in node)


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


def subtree(tree: object, path: str, where: str) -> Any:
    """The node at a dotted path; the empty path is the tree. Keys may have dots themselves."""
    found = _nodes_at(tree, path) if path else iter((tree,))
    try:
        return next(found)
    except StopIteration:
        raise KeyNotFoundError("the checkpoint has nothing under this path", where=where, found=path) from None


def _nodes_at(node: object, path: str) -> Iterator[Any]:
    """What the path can mean: long keys come before short ones."""
    if not is_container(node):
        return
    fitting = [(key, child) for key, child in items_of(node) if path == key or path.startswith(f"{key}.")]
    for key, child in sorted(fitting, key=lambda item: -len(item[0])):
        if key == path:
            yield child
        else:
            yield from _nodes_at(child, path[len(key) + 1 :])


def decoded(node: Any, tensor: Callable[[Stored], torch.Tensor]) -> Any:
    """The value of an `Encoded`, made anew; anything else as it is. Raises `CodecError`."""
    if not isinstance(node, Encoded):
        return node
    return decode(node.tree, node.where, leaf=lambda name: tensor(node.tensors[name]))


def referred_to(value: Encoded) -> Iterator[StoredTensor]:
    """The tensors that the encoding of a value speaks of; each text in it that is the name of one counts."""
    waiting = [value.tree]
    while waiting:
        node = waiting.pop()
        if type(node) is str and isinstance(stored := value.tensors.get(node), StoredTensor):
            yield stored
        elif isinstance(node, dict | list):
            waiting.extend(node.values() if isinstance(node, dict) else node)


def rebuild(
    node: object, tensor: Callable[[Stored], torch.Tensor], made: dict[int, tuple[object, Any]] | None = None
) -> Any:
    """A copy of the containers of a subtree, with `tensor` applied to its tensors.

    Whoever gets it can keep it: nothing in it is shared with the checkpoint but what is immutable, and objects of
    other classes than Python's own. A container that stands in several places, or in itself, does so in the copy;
    `made` has the copies so far.
    """
    if isinstance(node, torch.Tensor) and is_lazy(node):
        return another_uninitialised(node)
    if isinstance(node, _TENSORS):
        return tensor(node)
    if isinstance(node, Encoded):
        return decoded(node, tensor)
    if isinstance(node, set | bytearray):
        return copy(node)
    if not is_container(node):
        return node
    made = {} if made is None else made
    if id(node) in made:
        return made[id(node)][1]
    if isinstance(node, Mapping):
        mapping = _empty_like(node)
        made[id(node)] = node, mapping
        for key, value in node.items():
            mapping[key] = rebuild(value, tensor, made)
        versions = getattr(node, "_metadata", None)
        if isinstance(versions, Mapping) and type(mapping) is OrderedDict:
            mapping._metadata = rebuild(versions, tensor, made)  # type: ignore[attr-defined]
        return mapping
    assert isinstance(node, list | tuple)
    items: list[Any] = []
    if isinstance(node, list):
        made[id(node)] = node, items
    for value in node:
        # A comprehension would need a frame of the stack for each level.
        items.append(rebuild(value, tensor, made))
    if isinstance(node, list):
        return items
    return type(node)._make(items) if hasattr(node, "_make") else tuple(items)


def _empty_like(node: Mapping[Any, Any]) -> dict[Any, Any]:
    """Of the class of the mapping where it is one of the usual ones, which lose nothing by this."""
    if isinstance(node, defaultdict):
        return defaultdict(node.default_factory)
    if type(node) is OrderedDict:
        made = OrderedDict[Any, Any]()
        if isinstance(versions := getattr(node, "_metadata", None), Mapping):
            made._metadata = deepcopy(versions)  # type: ignore[attr-defined]
        return made
    return Counter() if type(node) is Counter else {}


_DEEPEST = 200


def same_value(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values are equal, NaN and all. False where they are nested too deep, or cannot be compared."""
    if one is other:
        return True
    if depth > _DEEPEST:
        return False
    if is_lazy(one) or is_lazy(other):
        return type(one) is type(other) and (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and same_tensor(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_value(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        same_kind = isinstance(one, list) == isinstance(other, list) and len(one) == len(other)
        return same_kind and all(same_value(a, b, depth + 1) for a, b in zip(one, other, strict=True))
    try:
        equal = one == other
        return bool(equal.all() if hasattr(equal, "all") else equal) or bool(one != one and other != other)
    except Exception:  # whatever the comparison of somebody's class raises
        return False


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; a tensor that is not strided only equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.layout is not torch.strided or other.layout is not torch.strided or one.is_quantized or other.is_quantized:
        return one is other
    a, b = (tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1) for tensor in (one, other))
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
