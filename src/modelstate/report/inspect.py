"""What is in a checkpoint, for `modelstate inspect`."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from modelstate.errors import CodecError
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.pickled import Refused
from modelstate.read.tree import is_container, items_of
from modelstate.report.text import columns, count, shorten
from modelstate.report.tree import MAX_RUNS, build, is_number, rows
from modelstate.spec import StoredTensor, TensorSpec
from modelstate.words import printable, size

_VALUE_WIDTH = 72
_MAX_GROUPS = 20


def inspect_text(checkpoint: Checkpoint) -> str:
    """The tree of a checkpoint with shapes, dtypes and sizes, its ties, and what in it is no tensor."""
    parts = [_heading(checkpoint), _tree(checkpoint), _ties(checkpoint), _values(checkpoint), _metadata(checkpoint)]
    return "\n\n".join(part for part in parts if part)


def inspect_json(checkpoint: Checkpoint) -> str:
    """The same as JSON, with every tensor by itself."""
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
    found: dict[str, None] = {}
    waiting = [checkpoint.contents.tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Refused):
            found[node.name] = None
        elif is_container(node):
            waiting += [value for _, value in items_of(node)]
    return sorted(found)


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
    """A value that cannot be decoded here."""

    def __init__(self, error: CodecError) -> None:
        self._error = error

    def __repr__(self) -> str:
        return f"not decoded: {printable(self._error.what)}"


def _extra(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """The values that are no tensors. One whose class is not imported does not hide the others."""
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
    found: dict[str, object] = {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": _dtype(spec.dtype),
        "bytes": spec.nbytes,
        "kind": spec.kind,
    }
    if isinstance(spec.stored, StoredTensor) and not spec.stored.is_contiguous:
        found["stride"] = list(spec.stride)
    if spec.location is not None:
        found |= {"file": spec.location.path, "offset": spec.location.start}
    return found


def _elements(checkpoint: Checkpoint) -> int:
    """Of all tensors, whatever they are for; those of tied names once."""
    repeated = {name for group in checkpoint.aliases for name in group[1:]}
    return sum(math.prod(spec.shape) for name, spec in checkpoint.items() if name not in repeated)


def _dtypes(checkpoint: Checkpoint) -> Counter[torch.dtype]:
    """How many tensors there are of each dtype, the most frequent first."""
    return Counter(dict(Counter(spec.dtype for spec in checkpoint.values()).most_common()))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(value: object) -> str:
    """The value on one line; of a tensor only shape and dtype."""
    plain = _plain(value)
    return plain if isinstance(plain, str) and not isinstance(value, str) else repr(plain)


def _plain(value: Any) -> Any:
    """The value as JSON can say it; what JSON has no word for, as text."""
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
    """The value as text; where its class fails to give one, its class and the error."""
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__qualname__}, whose repr raises {type(error).__name__}>"
