"""A pickle's value is looked through before anything of it is made: what was refused, and where it stands."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from modelstate.errors import OpenError, PickleError, UnsupportedTensorError
from modelstate.read.pickled import Allowed, Flawed, Known, Recipe, Refused, Storage, TensorRecipe
from modelstate.read.rebuild import QUANTIZED
from modelstate.spec import StoredTensor

MAX_DEPTH = 100

TENSOR, INERT, UNFINISHED = 1, 2, 4
"""What a value has in it: tensors, refused or flawed parts, something that has still to be made."""

_PLAIN = frozenset(
    {str, int, float, bool, type(None), bytes, bytearray, complex, torch.dtype, torch.device, torch.Size, torch.layout}
)
_SEQUENCES = frozenset({list, tuple, set, frozenset})
MAPPINGS = frozenset({dict, OrderedDict, Counter})

Path = tuple[Any, ...]
"""The parent's path and a key; the root is empty. It is text only where an error needs it."""


@dataclass(slots=True)
class Audit:
    """What was found in a value."""

    refused: list[tuple[str, Path]] = field(default_factory=list)
    flawed: list[tuple[OpenError, Path]] = field(default_factory=list)
    holds: dict[int, int] = field(default_factory=dict)
    """The flags of each container, by its id."""
    keep: list[object] = field(default_factory=list)
    """Keeps every id from being used again."""

    def flags(self, node: object) -> int:
        """What `node` has in it."""
        return self.holds.get(id(node), TENSOR if type(node) is StoredTensor else 0)


def dotted(path: Path) -> str:
    """The path as text: keys joined with dots."""
    names: list[str] = []
    while path:
        path, key = path
        names.append(key if isinstance(key, str) else str(key)[:100])
    return ".".join(reversed(names))


def audit(value: object, data_nbytes: int) -> Audit:
    """Looks through the value of a pickle of `data_nbytes` bytes.

    Raises `PickleError` where containers hold themselves, are nested deeper than 100, or are shared so often that the
    value stands for far more than the file has bytes.
    """
    walker = _Walker()
    nodes, characters, _ = walker.visit(value, (), 0)
    if nodes > 100_000 + data_nbytes or characters > 1_000_000 + 16 * data_nbytes:
        raise PickleError(
            "the pickle stands for more than any memory: it holds the same containers again and again",
            found=f"{nodes:.3g} values, {characters:.3g} characters of names, from {data_nbytes} bytes",
            remedy="do not trust this file",
        )
    return walker.found


class _Walker:
    def __init__(self) -> None:
        self.found = Audit()
        self.sizes: dict[int, tuple[int, int, int]] = {}
        self.open: set[int] = set()

    def visit(self, node: Any, path: Path, depth: int, bare: bool = False) -> tuple[int, int, int]:
        """Nodes, characters of names and flags of what is below `node`, as if nothing was shared.

        The items of a `bare` sequence, such as the arguments of a call, have the path of the sequence.
        """
        kind = type(node)
        if kind in _PLAIN:
            return 1, 0, 0
        if kind is StoredTensor and not node.attributes:
            return 1, 0, TENSOR
        key = id(node)
        if key in self.sizes:
            return self.sizes[key]
        if key in self.open:
            raise PickleError(
                "a container in the pickle holds itself",
                where=dotted(path)[:1000],
                remedy="load it where it was written, and save the state dicts in it alone",
            )
        if depth > MAX_DEPTH:
            raise PickleError(
                "containers in the pickle are nested too deep",
                expected=f"at most {MAX_DEPTH} levels",
                remedy="load it where it was written, and save the state dicts in it alone",
            )
        self.open.add(key)
        nodes, characters, flags = 1, 0, self.own_flags(node, path)
        for name, child in _children(node, bare):
            if type(child) is StoredTensor and not child.attributes:
                below = (1, 0, TENSOR)
            else:
                below = self.visit(child, path if name is _SAME else (path, name), depth + 1, name is _SAME)
            nodes += below[0]
            characters += below[1] + below[0] * (1 + len(name) if type(name) is str else 8)
            flags |= below[2]
        self.open.discard(key)
        self.sizes[key] = nodes, characters, flags
        self.found.holds[key] = flags
        self.found.keep.append(node)
        return nodes, characters, flags

    def own_flags(self, node: Any, path: Path) -> int:
        kind = type(node)
        if kind is Refused:
            self.found.refused.append((node.name, path))
            return INERT if node.module_fields is None else INERT | UNFINISHED
        if kind is Flawed:
            self.found.flawed.append((node.error, path))
            return INERT
        if kind is StoredTensor:
            return TENSOR
        if kind is Storage:
            if node.dtype in QUANTIZED:
                self.found.flawed.append((_quantized_storage(node.dtype), path))
            return TENSOR | UNFINISHED
        if kind is TensorRecipe:
            return TENSOR | UNFINISHED
        if kind in (Recipe, Allowed, Known):
            return UNFINISHED
        return 0


def _quantized_storage(dtype: torch.dtype) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"a quantized storage ({dtype}) is not supported", remedy="save the dequantize()d form of its tensor"
    )


_SAME = object()
"""In place of a key: the path stays that of the node."""


def _children(node: Any, bare: bool) -> Iterator[tuple[Any, Any]]:
    """What is directly in a node, with its part of the path."""
    kind = type(node)
    if kind in MAPPINGS:
        for key, value in node.items():
            if type(key) not in _PLAIN:
                yield _SAME, key
            yield key, value
        if hasattr(node, "_metadata"):
            yield "_metadata", node._metadata
    elif kind in _SEQUENCES:
        yield from ((_SAME, item) for item in node) if bare else enumerate(node)
    elif kind is StoredTensor:
        yield _SAME, node.attributes
    elif kind is Refused:
        yield _SAME, node.held
    elif kind is TensorRecipe:
        yield _SAME, node.parts
    elif kind is Recipe:
        for piece in (node.args, node.kwargs, node.states, node.appended, node.inserted):
            yield _SAME, piece
