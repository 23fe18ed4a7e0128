"""Checkpoints as trees of containers, tensors and plain values: flattening, subtrees, equality."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from modelstate.errors import (
    AmbiguousCheckpointError,
    CodecError,
    KeyNotFoundError,
    SourceTypeError,
    keep_interrupt,
)
from modelstate.io.files import FileFingerprint
from modelstate.spec import (
    ByteRange,
    Checksum,
    Combined,
    Described,
    Encoded,
    Refused,
    Stored,
    StoredTensor,
    StoredTensors,
    is_size,
    is_tensor,
    is_uninitialised,
    set_version_metadata,
    under_names,
    version_metadata,
)

if TYPE_CHECKING:
    import torch

EXTRA_STATE = "_extra_state"
"""The key under which torch stores the result of `Module.get_extra_state`."""

_MAX_DEPTH = 500
_MAX_LEVELS = 100
"""The levels of containers that `map_leaves` goes down."""
_MAX_NODES = 5_000_000


Checksums = Callable[[], Mapping[ByteRange, Checksum]]
"""Returns checksums by the bytes that they are of."""


class Contents(msgspec.Struct, frozen=True):
    """What the reader of a format returns for a file: the table of contents, without any tensor data."""

    format: str
    """"torch zip", "torch legacy", "safetensors", "dcp" or "mapping"."""
    tree: object
    """Dicts, lists and tuples, with `Stored`, `Encoded` and plain values as leaves. An `OrderedDict` may have torch's
    `_metadata` as an attribute."""
    files: Mapping[str, FileFingerprint] = msgspec.field(default_factory=dict)
    """Every file that was read, or that holds tensors, as it was before it was read."""
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """What the file stores about itself: text (the `__metadata__` of safetensors), or an `Encoded`."""
    checksums: Checksums = dict
    """Returns the checksums of whole storages, as far as the format stores them."""
    is_sealed: bool = False
    """Whether everything that the files state about their tensors has been verified with a checksum."""
    patched: Mapping[Combined, Patched] = msgspec.field(default_factory=dict)
    """The tensors with patches."""


class Patched(msgspec.Struct, frozen=True):
    """A tensor with patches, which have been checked."""

    tensor: Combined
    digests: Sequence[str]
    """Those of what is patched, and of the values after each patch."""
    checksums: Mapping[ByteRange, Checksum]
    """Those of what is patched, and of the payloads."""
    later: Callable[[Stored, int], Combined]
    """Returns the tensor, to be computed from the values that have the digest at a position."""


class FlatTree(msgspec.Struct):
    """The flat view of a tree."""

    tensors: Mapping[str, Stored] = msgspec.field(default_factory=dict)
    """The tensors by dotted path, in the order of the tree."""
    values: dict[str, object] = msgspec.field(default_factory=dict)
    """The largest parts of the tree without tensors, and every `_extra_state`, by dotted path."""
    containers: list[str] = msgspec.field(default_factory=list)
    """The paths of the mappings that contain tensors at any depth; the root is the empty path."""
    versions: dict[str, Mapping[str, object]] = msgspec.field(default_factory=dict)
    """torch's `_metadata`, the versions of modules by module path, by the path of the container that has it."""


def _is_tensor(node: object) -> bool:
    """Whether the node is a tensor. An uninitialised tensor of a lazy module is a value, since it has no shape."""
    return isinstance(node, Described) or (is_tensor(node) and not is_uninitialised(node))


def is_container(node: object) -> bool:
    """Whether the items of the node are parts of the tree. A `torch.Size` is a value."""
    return isinstance(node, Mapping | list | tuple) and not is_size(node)


def items_of(node: object) -> Iterator[tuple[str, object]]:
    """The children of a container, with their names in a path."""
    if isinstance(node, Mapping):
        return ((str(key), value) for key, value in node.items())
    assert isinstance(node, list | tuple)
    return ((str(index), value) for index, value in enumerate(node))


def leaves(node: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """The values of a tree that are no containers, with their dotted paths; `path` is that of the node.

    Raises `CodecError` for a container that contains itself, or is nested deeper than 500 levels.
    """
    if not is_container(node):
        yield path, node
        return
    if depth > _MAX_DEPTH:
        raise _too_deep(path, _MAX_DEPTH)
    for name, child in items_of(node):
        yield from leaves(child, f"{path}.{name}" if path else name, depth + 1)


def _too_deep(path: str, levels: int) -> CodecError:
    what, remedy = "a value that holds itself, or is nested too deeply", "look for a container that holds itself"
    return CodecError(what, where=f"{path[:80]}...", expected=f"at most {levels} levels", remedy=remedy)


def nodes_of(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yields a node and everything in it with their dotted paths, containers before their items and in their order.

    Members of sets are included, tensors of a table are not. A container that is in several places, or in itself, has
    the first of its paths, and its items have theirs.
    """
    waiting, seen = [(path, node)], set[int]()
    while waiting:
        path, node = waiting.pop()
        yield path, node
        is_set = isinstance(node, set | frozenset)
        if id(node) in seen or isinstance(node, StoredTensors) or not (is_set or is_container(node)):
            continue
        seen.add(id(node))
        items = items_of([*node] if isinstance(node, set | frozenset) else node)
        waiting += reversed([(f"{path}.{name}" if path else name, child) for name, child in items])


def deep_copy(value: Any, copies: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """Returns what `copy.deepcopy` does, also for tensors in compressed sparse layouts, for which that raises.

    `copies` are the copies of objects that have been copied before, by their ids.
    """
    nodes = (node for _, node in nodes_of(value))
    sparse = {id(node): node.clone() for node in nodes if is_tensor(node) and "sparse_" in str(node.layout)}
    return deepcopy(value, {**sparse, **copies})


def map_leaves(node: Any, function: Callable[[tuple[object, ...], Any], Any], path: tuple[object, ...] = ()) -> Any:
    """Returns a copy of nested containers in which `function(path, leaf)` has taken the place of each leaf.

    Containers are the dicts, lists, tuples, namedtuples and deques of Python, whose classes stay. The path of a leaf
    has the keys and positions that lead to it. Raises `CodecError` for containers that are nested too deeply.
    """
    if len(path) > _MAX_LEVELS:
        raise _too_deep(".".join(map(str, path[:4])), _MAX_LEVELS)
    if type(node) in (dict, OrderedDict, defaultdict, Counter):
        new = copy(node)
        for key, child in node.items():
            new[key] = map_leaves(child, function, (*path, key))
        return new
    is_named = isinstance(node, tuple) and hasattr(node, "_fields")
    if type(node) not in (list, tuple, deque) and not is_named:
        return function(path, node)
    items = [map_leaves(child, function, (*path, index)) for index, child in enumerate(node)]
    if isinstance(node, deque):
        return deque(items, node.maxlen)
    return type(node)._make(items) if is_named else type(node)(items)


def leaf_paths(node: object) -> list[tuple[tuple[object, ...], Any]]:
    """Returns the leaves of nested containers with their paths, as `map_leaves` visits them."""
    leaves: list[tuple[tuple[object, ...], Any]] = []
    map_leaves(node, lambda path, leaf: leaves.append((path, leaf)))
    return leaves


def refused_in(node: object, path: str = "") -> dict[str, Refused]:
    """Returns the placeholders in a tree by their dotted paths; `path` is that of the node.

    Each has the path of the first container that holds it. A key that is a placeholder counts, too.
    """
    found: dict[str, Refused] = {}
    for place, below in nodes_of(node, path):
        if isinstance(below, Refused):
            found.setdefault(place, below)
        elif isinstance(below, Mapping) and not isinstance(below, StoredTensors):
            for key in below:
                if isinstance(key, tuple | Refused):
                    found = refused_in(key, f"{place}.{key}" if place else str(key)) | found
    return found


def flatten(tree: object, where: str) -> FlatTree:
    """Returns the flat view of a tree.

    Raises `AmbiguousCheckpointError` where two leaves have the same name, and `SourceTypeError` for a tree that
    contains itself, is nested deeper than 500 levels, or has more than 5 million nodes (a few shared lists can stand
    for more values than fit in memory).
    """
    flat = FlatTree()
    tensors: dict[str, Stored] = {}
    flat.tensors = tensors
    values, count = flat.values, 0

    def add(into: dict[str, Any], path: str, leaf: object) -> None:
        if path in tensors or path in values:
            raise AmbiguousCheckpointError(
                "two values have one name when their keys are joined with dots",
                where=where,
                found=path,
                remedy="rename a key; or give the part that is meant as a mapping, as torch.load returns it for a file",
            )
        into[path] = leaf

    def visit(node: object, path: str, depth: int) -> bool:
        """Adds the leaves below a container, and returns whether a tensor is among them."""
        nonlocal count
        if not is_container(node):
            return False
        if depth > _MAX_DEPTH or count > _MAX_NODES:
            raise SourceTypeError(
                "a tree that is nested too deeply" if depth > _MAX_DEPTH else "a tree with too many values",
                where=f"{where}, at {path[:80]!r}",
                expected=f"at most {_MAX_DEPTH} levels and {_MAX_NODES} values",
                remedy="look for a container that holds itself, or the same list many times",
            )
        rest: list[tuple[str, object, bool]] = []
        has_tensors = False
        place = len(flat.containers)
        try:
            children = list(items_of(node))
        except Exception as error:  # of a key of any class
            raise SourceTypeError(
                "a key has no text, which is a part of names",
                where=f"{where}, at {path[:80]!r}",
                found=f"str() of it raises {type(error).__name__}",
                remedy="use text or integers as keys",
            ) from error
        count += len(children)
        for name, child in children:
            below = f"{path}.{name}" if depth else name
            if type(child) is StoredTensor and below not in tensors and below not in values:
                tensors[below] = child  # the usual case, without a call
                has_tensors = True
            elif _is_tensor(child):
                add(tensors, below, child)
                has_tensors = True
            else:
                is_whole = name.endswith(EXTRA_STATE) and _is_extra_state(name)
                rest.append((below, child, not is_whole and visit(child, below, depth + 1)))
        has_tensors = has_tensors or any(below_has for _, _, below_has in rest)
        if not has_tensors and depth and not (isinstance(node, Mapping) and any(map(_is_extra_state, map(str, node)))):
            return False
        for below, child, below_has in rest:
            if not below_has:
                add(values, below, child)
        if isinstance(node, Mapping):
            flat.containers.insert(place, path)
            if (versions := version_metadata(node)) is not None:
                flat.versions[path] = versions
        return True

    if _is_tensor(tree):
        add(tensors, "tensor", tree)
    elif isinstance(tree, Refused):
        values["tensor"] = tree
    else:
        visit(tree, "", 0)
    return flat


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


def subtree(
    tree: object,
    path: str,
    where: str,
    decode: Callable[[Encoded], object] = lambda value: value,
    accepts: Callable[[object], bool] = lambda node: True,
) -> object:
    """The first node at a dotted path that `accepts` takes; the empty path is the whole tree.

    Keys may contain dots themselves. Where the path ends within the keys of a dict, the node is a dict of their values,
    under the rest of the keys. Values that `decode` decodes are searched, too.
    """
    exact, within = (_nodes_at(tree, path, decode, ends_within) for ends_within in (False, True))
    node = next(filter(accepts, chain(exact, within)), _NO_NODE) if path else tree
    if node is _NO_NODE:
        raise KeyNotFoundError(
            "the checkpoint has nothing under this path",
            where=where,
            found=path,
            remedy="print(modelstate.open(source)) shows what there is",
        )
    return node


_NO_NODE = object()


def _nodes_at(node: Any, path: str, decode: Callable[[Encoded], object], ends_within: bool) -> Iterator[object]:
    """The nodes that the path can mean, if it ends with a key, or within keys; long keys come before short ones."""
    node = decode(node) if isinstance(node, Encoded) else node
    if not is_container(node):
        return
    keys: dict[str, Any] = {str(key): key for key in (node if isinstance(node, Mapping) else range(len(node)))}
    for name in sorted((name for name in keys if f"{path}.".startswith(f"{name}.")), key=len, reverse=True):
        if name != path:
            yield from _nodes_at(node[keys[name]], path[len(name) + 1 :], decode, ends_within)
        elif not ends_within:
            yield node[keys[name]]
    cut = len(path) + 1
    if ends_within and (names := {name[cut:]: key for name, key in keys.items() if name.startswith(f"{path}.")}):
        part = under_names(node, names)
        part = part if isinstance(part, StoredTensors) else OrderedDict(part)
        if (versions := version_metadata(node)) is not None:
            of_part = (module for module in versions if f"{module}.".startswith(f"{path}."))
            set_version_metadata(part, {module[cut:]: versions[module] for module in of_part})
        yield part


def decoded(node: object, tensor: Callable[[Stored], torch.Tensor]) -> object:
    """Decodes an `Encoded`, anew at each call; returns any other value as it is. Raises `CodecError`."""
    if not isinstance(node, Encoded):
        return node
    from modelstate.codec.codec import decode

    return decode(node.tree, node.where, leaf=lambda name: tensor(node.tensors[name]))


def referred_to(value: Encoded) -> Iterator[StoredTensor]:
    """The tensors that an encoded value refers to: each text in its tree that is the name of a tensor counts."""
    waiting = [value.tree]
    while waiting:
        node = waiting.pop()
        if type(node) is str and isinstance(stored := value.tensors.get(node), StoredTensor):
            yield stored
        elif isinstance(node, dict | list):
            waiting.extend(node.values() if isinstance(node, dict) else node)


def rebuild(
    node: object, tensor: Callable[[Stored], torch.Tensor], copies: dict[int, tuple[object, object]] | None = None
) -> Any:
    """Copies the containers of a subtree, with `tensor` applied to its tensors.

    The copy shares nothing with the checkpoint but immutable values and objects of classes other than Python's own. A
    container that appears in several places, or in itself, does so in the copy.

    Args:
        node: The subtree.
        tensor: Converts a stored tensor to a tensor.
        copies: The copies so far, by the ids of the originals.
    """
    if is_tensor(node) and is_uninitialised(node):
        cls: Any = type(node)  # torch cannot copy a buffer without a shape
        return cls(node.requires_grad, node.device, node.dtype)
    if isinstance(node, Described) or is_tensor(node):
        return tensor(node)
    if isinstance(node, Encoded):
        return decoded(node, tensor)
    is_copied = isinstance(node, set | bytearray | getattr(sys.modules.get("numpy"), "ndarray", set))
    if not is_container(node) and not is_copied:
        return node
    copies = {} if copies is None else copies
    if id(node) in copies:
        return copies[id(node)][1]
    if is_copied:
        copies[id(node)] = node, copy(node)
    elif isinstance(node, Mapping):
        mapping = empty_like(node)
        copies[id(node)] = node, mapping
        for key, value in node.items():
            mapping[key] = rebuild(value, tensor, copies)
        versions = version_metadata(node)
        if versions is not None and type(mapping) is OrderedDict:
            set_version_metadata(mapping, rebuild(versions, tensor, copies))
    else:
        assert isinstance(node, list | tuple)
        items: list[object] = []
        if isinstance(node, list):
            copies[id(node)] = node, items
        for value in node:
            # A comprehension would need a stack frame for each level.
            items.append(rebuild(value, tensor, copies))
        if isinstance(node, tuple):
            copies[id(node)] = node, node._make(items) if hasattr(node, "_make") else tuple(items)
    return copies[id(node)][1]


def empty_like(node: Mapping[object, object]) -> dict[Any, Any]:
    """An empty mapping of the same class, where that is one of the usual classes; otherwise a dict.

    For the tensors of a file with the versions of modules it is an `OrderedDict`, which can have them.
    """
    if isinstance(node, defaultdict):
        return defaultdict(node.default_factory)
    if type(node) is OrderedDict:
        return OrderedDict()
    if isinstance(node, StoredTensors) and version_metadata(node) is not None:
        return OrderedDict()
    return Counter() if type(node) is Counter else {}


_DEEPEST = 200


def same_value(first: Any, second: Any, depth: int = 0) -> bool:
    """Whether two values are equal; NaN equals NaN. False if they are nested too deeply, or cannot be compared.

    Arrays of NumPy are equal if their dtypes and shapes are, too: none is broadcast to the shape of the other. Objects
    that do not compare as equal are so if they are saved as the same, such as dataclasses of arrays.
    """
    if first is second:
        return True
    if depth > _DEEPEST:
        return False
    if is_uninitialised(first) or is_uninitialised(second):
        return type(first) is type(second) and (first.dtype, first.requires_grad) == (
            second.dtype,
            second.requires_grad,
        )
    if is_tensor(first) or is_tensor(second):
        from modelstate.torch_compat.plain import same_values

        return is_tensor(first) and is_tensor(second) and same_values(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_value(first[key], second[key], depth + 1) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        same_kind = isinstance(first, list) == isinstance(second, list) and len(first) == len(second)
        return same_kind and all(same_value(a, b, depth + 1) for a, b in zip(first, second, strict=True))
    array = getattr(sys.modules.get("numpy"), "ndarray", ())
    try:
        if isinstance(first, array) or isinstance(second, array):
            is_like = type(first) is type(second) and (first.dtype, first.shape) == (second.dtype, second.shape)
            return is_like and bool(((first == second) | ((first != first) & (second != second))).all())
        equal = first == second
        if bool(equal.all() if hasattr(equal, "all") else equal) or bool(first != first and second != second):
            return True
    except Exception as error:  # the comparison of a foreign class may raise anything: what would be saved decides
        keep_interrupt(error)
    if type(first) is not type(second) or type(first) in _COMPARED:
        return False
    from modelstate.codec.codec import encode

    try:  # objects that hold arrays or NaN, for example, are the same where they are saved as the same
        return same_value(encode(first), encode(second), depth + 1)
    except Exception as error:  # a value that cannot be saved
        keep_interrupt(error)
        return False


_COMPARED = (str, bytes, bytearray, bool, int, float, complex, type(None))
"""Classes whose own comparison says whether two values are equal."""
