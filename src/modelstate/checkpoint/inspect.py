"""Formats the names, shapes, sizes and values of a checkpoint as text and JSON, for `modelstate inspect`."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import CodecError
from modelstate.formats.pickled import Refused
from modelstate.formats.tree import is_container, items_of
from modelstate.spec import StoredTensor, TensorSpec
from modelstate.text_format import columns, count, printable, shorten, size

_MAX_DEPTH = 60
"""The parts of a name that become levels of the tree; the rest of a longer name is one level."""
MAX_RUNS = 8
"""The most runs of consecutive, similar children that are shown separately. Where there are more, all similar children
are folded into one row: the state of an optimizer, whose numbers are those of parameters, or layers of two kinds."""


@dataclass(slots=True)
class Node:
    """A module, a tensor, or (where a name is also a prefix) both."""

    name: str
    children: dict[str, "Node"] = field(default_factory=dict)
    spec: TensorSpec | None = None
    nbytes: int = 0
    """Bytes of everything below, without tied tensors, which count elsewhere."""
    shape: int = 0
    """Equal for similar nodes: the same names, shapes, dtypes and kinds below."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the tree."""

    depth: int
    label: str
    spec: TensorSpec | None
    nbytes: int
    """Bytes of everything that the row stands for."""
    times: int
    """The number of similar siblings that the row stands for."""


def build(specs: Mapping[str, TensorSpec], tied: frozenset[str] = frozenset()) -> Node:
    """Builds the tree of the names. Names in `tied` share the bytes of others: they count nothing, and are not folded
    with names that count."""
    root = Node("")
    for name, spec in specs.items():
        node = root
        for part in name.split(".", _MAX_DEPTH):
            node = node.children.setdefault(part, Node(part))
        node.spec = spec
    _measure(root, {}, tied)
    return root


def _measure(node: Node, known: dict[object, int], tied: frozenset[str]) -> None:
    own: object = None
    if node.spec is not None:
        spec = node.spec
        own = (spec.shape, spec.dtype, spec.kind, spec.name in tied)
        node.nbytes = 0 if spec.name in tied else spec.nbytes
    for child in node.children.values():
        _measure(child, known, tied)
        node.nbytes += child.nbytes
    below = frozenset((name, child.shape) for name, child in node.children.items())
    node.shape = known.setdefault((own, below), len(known))


def rows(root: Node) -> Iterator[Row]:
    """The rows of the tree, from top to bottom."""
    yield from _below(root, 0)


def _below(node: Node, depth: int) -> Iterator[Row]:
    for alike in _runs(node):
        prefix, group = _follow(alike)
        first, last = group[0], group[-1]
        label = prefix + first.name
        if len(group) > 1:
            is_consecutive = int(last.name) - int(first.name) == len(group) - 1
            to = f"{prefix[prefix[:-1].rfind('.') + 1 :]}{last.name} " if is_consecutive else ""
            label += f" … {to}({len(group)} ×)"
        yield Row(depth, label, first.spec, sum(child.nbytes for child in group), len(group))
        yield from _below(first, depth + 1)


def _follow(group: list[Node]) -> tuple[str, list[Node]]:
    """Descends while there is only one group below, so that a chain of modules takes one row."""
    prefix = ""
    while len(group) == 1 and group[0].spec is None and len(below := _runs(group[0])) == 1:
        prefix += group[0].name + "."
        group = below[0]
    return prefix, group


def _runs(node: Node) -> list[list[Node]]:
    """The children in groups: similar ones with consecutive numbers form one group. Numbers are in numeric order."""
    numbered = sorted((int(name), child) for name, child in node.children.items() if is_number(name))
    groups: list[list[Node]] = []
    for name, child in node.children.items():
        if not is_number(name):
            groups.append([child])
        elif numbered:
            runs = list(_numbered_runs(numbered))
            groups += _similar(runs) if len(runs) > MAX_RUNS else runs
            numbered = []
    return groups


def _numbered_runs(numbered: list[tuple[int, Node]]) -> Iterator[list[Node]]:
    run: list[Node] = []
    previous = -1
    for number, child in numbered:
        if run and (number != previous + 1 or child.shape != run[0].shape):
            yield run
            run = []
        run.append(child)
        previous = number
    if run:
        yield run


def _similar(runs: list[list[Node]]) -> list[list[Node]]:
    """Joins the runs that are similar, in the order of their first members."""
    groups: dict[int, list[Node]] = {}
    for run in runs:
        groups.setdefault(run[0].shape, []).extend(run)
    return list(groups.values())


def is_number(name: str) -> bool:
    """Whether a part of a name is a number, such as the index of a layer."""
    return name.isascii() and name.isdigit() and len(name) <= 18 and (name == "0" or name[0] != "0")


_VALUE_WIDTH = 72
_MAX_GROUPS = 20


def inspect_text(checkpoint: Checkpoint) -> str:
    """The tree of a checkpoint with shapes, dtypes and sizes, its tied tensors, and its other values, as text."""
    parts = [_heading(checkpoint), _tree(checkpoint), _ties(checkpoint), _values(checkpoint), _metadata(checkpoint)]
    return "\n\n".join(part for part in parts if part)


def inspect_json(checkpoint: Checkpoint) -> str:
    """The content of a checkpoint as JSON, with every tensor by itself."""
    return json.dumps(
        {
            "source": checkpoint.source,
            "key": checkpoint.key or None,
            "format": checkpoint.format,
            "files": list(checkpoint.files),
            "metadata": _plain(checkpoint.metadata),
            "tensors": [_tensor_json(spec) for spec in checkpoint.values()],
            "aliases": [list(group) for group in checkpoint.aliases],
            "extra": {path: _plain(value) for path, value in _extra(checkpoint)},
            "totals": {
                "tensors": len(checkpoint),
                "elements": _elements(checkpoint),
                "bytes": checkpoint.nbytes,
                "dtypes": {_dtype(dtype): number for dtype, number in _dtypes(checkpoint).items()},
            },
        },
        indent=2,
    )


def left_out(checkpoint: Checkpoint) -> list[str]:
    """The classes of the objects that `skip_forbidden` has left out of a checkpoint."""
    names: set[str] = set()
    waiting = [checkpoint.contents.tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Refused):
            names.add(node.name)
        elif is_container(node):
            waiting += [value for _, value in items_of(node)]
    return sorted(names)


def _heading(checkpoint: Checkpoint) -> str:
    where = checkpoint.source + (f", key {checkpoint.key!r}" if checkpoint.key else "")
    files = f", {count(len(checkpoint.files), 'file')}" if len(checkpoint.files) > 1 else ""
    totals = [
        checkpoint.format + files,
        count(len(checkpoint), "tensor"),
        count(_elements(checkpoint), "element"),
        size(checkpoint.nbytes),
    ]
    dtypes = _dtypes(checkpoint)
    named = ", ".join(_dtype(dtype) + (f" ({number:,})" if len(dtypes) > 1 else "") for dtype, number in dtypes.items())
    return "\n".join([printable(where), ", ".join(totals), *([f"dtypes: {named}"] if named else [])])


def _tree(checkpoint: Checkpoint) -> str:
    if not checkpoint:
        return ""
    tied_to = {name: group[0] for group in checkpoint.aliases for name in group[1:]}
    lines = [("name", "shape", "dtype", "size", "")]
    for row in rows(build(checkpoint, frozenset(tied_to))):
        label = "  " * row.depth + row.label
        spec = row.spec
        if spec is None:
            lines.append((label, "", "", size(row.nbytes), ""))
            continue
        notes = [spec.kind] if spec.kind != "strided" else []
        if spec.name in tied_to:
            notes.append(f"= {tied_to[spec.name]}")
        lines.append(
            (label, str(list(spec.shape)), _dtype(spec.dtype), size(spec.nbytes * row.times), ", ".join(notes))
        )
    return columns(lines, right=(3,))


def _ties(checkpoint: Checkpoint) -> str:
    groups = checkpoint.aliases
    if not groups:
        return ""
    lines = [f"tied ({count(len(groups), 'group')} of names that are the same bytes):"]
    lines += ["  " + printable(shorten(" = ".join(group), 200)) for group in groups[:_MAX_GROUPS]]
    if len(groups) > _MAX_GROUPS:
        lines.append(f"  and {len(groups) - _MAX_GROUPS:,} more, which --json lists")
    return "\n".join(lines)


def _values(checkpoint: Checkpoint) -> str:
    extra = list(_extra(checkpoint))
    if not extra:
        return ""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for path, value in extra:
        pattern = ".".join("*" if is_number(part) else part for part in path.split("."))
        alike.setdefault((pattern, _kind(value), shorten(_text(value), _VALUE_WIDTH)), []).append(path)
    table = []
    for (_, kind, text), paths in alike.items():
        folded = [f"{paths[0]} … ({len(paths)} ×)"] if len(paths) > MAX_RUNS else paths
        table += [(f"  {path}", kind, text) for path in folded]
    return f"values that are no tensors ({len(extra):,}):\n{columns(table)}"


def _kind(value: object) -> str:
    return "?" if isinstance(value, _Unknown) else type(value).__name__


class _Unknown:
    """A value that cannot be decoded."""

    def __init__(self, error: CodecError) -> None:
        self._error = error

    def __repr__(self) -> str:
        return f"not decoded: {printable(self._error.what)}"


def _extra(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """The values other than tensors. A value whose class is not imported does not hide the others."""
    for path in checkpoint.extra:
        try:
            yield path, checkpoint.extra[path]
        except CodecError as error:
            yield path, _Unknown(error)


def _metadata(checkpoint: Checkpoint) -> str:
    metadata = dict(checkpoint.metadata)
    versions = metadata.pop("versions", None)
    lines = [(f"  {key}", shorten(str(value), _VALUE_WIDTH)) for key, value in metadata.items()]
    if versions is not None:
        lines.append(("  versions", f"of {count(len(versions), 'module')} (torch's _metadata)"))
    return f"metadata:\n{columns(lines)}" if lines else ""


def _tensor_json(spec: TensorSpec) -> dict[str, object]:
    entry: dict[str, object] = {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": _dtype(spec.dtype),
        "bytes": spec.nbytes,
        "kind": spec.kind,
    }
    if isinstance(spec.stored, StoredTensor) and not spec.stored.is_contiguous:
        entry["stride"] = list(spec.stride)
    if spec.location is not None:
        entry |= {"file": spec.location.path, "offset": spec.location.start}
    return entry


def _elements(checkpoint: Checkpoint) -> int:
    """The number of elements of all tensors; tied tensors count once."""
    repeated = {name for group in checkpoint.aliases for name in group[1:]}
    return sum(math.prod(spec.shape) for name, spec in checkpoint.items() if name not in repeated)


def _dtypes(checkpoint: Checkpoint) -> Counter[torch.dtype]:
    """The number of tensors of each dtype, the most frequent first."""
    return Counter(dict(Counter(spec.dtype for spec in checkpoint.values()).most_common()))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(value: object) -> str:
    """The value on one line; for a tensor only its shape and dtype."""
    plain = _plain(value)
    return plain if isinstance(plain, str) and not isinstance(value, str) else repr(plain)


def _plain(value: Any) -> Any:
    """The value with JSON types; anything that JSON cannot represent becomes text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if is_lazy(value):
        return f"without a shape yet, {_dtype(value.dtype)}"
    if isinstance(value, torch.Tensor):
        return f"tensor({list(value.shape)}, {_dtype(value.dtype)})"
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item) for item in value]
    return shorten(_repr(value), 1000)


def _repr(value: object) -> str:
    """The repr of a value; where its class fails to return one, the class and the error."""
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__qualname__}, whose repr raises {type(error).__name__}>"
