"""`modelstate.inspect` and `modelstate.verify`: what a checkpoint contains, and whether its bytes are undamaged."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from modelstate.arguments import checked_call
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import Source, open as open_checkpoint
from modelstate.errors import CodecError
from modelstate.formats.manifest import CHANGES
from modelstate.formats.tree import decoded, leaves
from modelstate.html.page import Page, Shown
from modelstate.process import progress_bar
from modelstate.remote.cache import Cache
from modelstate.spec import Refused, StoredTensor, is_tensor, is_uninitialised
from modelstate.tensor_spec import TensorSpec
from modelstate.text_format import (
    columns,
    count,
    folded,
    folded_label,
    listed,
    printable,
    safe_repr,
    seconds,
    shorten,
    size,
)

if TYPE_CHECKING:
    import torch

    from modelstate.checkpoint.statistics import CheckpointStatistics

_VALUE_WIDTH = 72
_MAX_GROUPS = 20
_MOST_LEVELS = 100
"""Levels of containers of a value that are shown: a value in memory may hold itself."""
_MOST_BITS = 4096
"""A larger int is shown in hexadecimal: Python refuses to write one of over 4,300 decimal digits."""


class Verification(Shown, msgspec.Struct, frozen=True):
    """A checkpoint whose tensors have the digests that its files state. Returned by `modelstate.verify`."""

    source: str
    """The path, as it was passed to `modelstate.verify`."""
    format: str
    tensors: int
    """The number of tensor names; tied tensors count once for each name."""
    bytes: int
    """Bytes that were read and compared."""
    algorithms: tuple[str, ...]
    """The kinds of digests: "crc32", "xxh3-128"."""
    seconds: float
    """The duration of the comparison."""

    def __str__(self) -> str:
        return (
            f"{self.source}: {count(self.tensors, 'tensor')}, {size(self.bytes)}, equal to their "
            f"{', '.join(self.algorithms)} digests, {seconds(self.seconds)}"
        )

    def _page(self) -> Page:
        facts = {"Verified": size(self.bytes), "Tensors": f"{self.tensors:,}", "Digests": ", ".join(self.algorithms)}
        return Page(self.source, (*facts.items(), ("Time", seconds(self.seconds))))

    def to_json(self) -> str:
        """All fields as JSON."""
        return json.dumps(msgspec.structs.asdict(self), indent=2)


@checked_call("ms.verify")
def verify(
    source: Source,
    *,
    key: str | None = None,
    progress: bool | None = None,
    allow: Sequence[object] = (),
    skip_forbidden: bool = False,
    cache: Cache | None = None,
) -> Verification:
    """Reads every tensor of a checkpoint, and compares its bytes with the digests in the files.

    Files of `modelstate.save` and of `torch.save` have digests. Other safetensors files and mappings have none.

    Args:
        source: What `modelstate.open` accepts; usually a path.
        key: The dotted path of the part that is verified, such as "model_state".
        progress: Whether to show a progress bar. None shows one on a terminal after half a second.
        allow: Classes and functions that a pickle may use, as for `modelstate.open`.
        skip_forbidden: Whether other classes and functions are left out, instead of raising.
        cache: Where what is read of remote files is kept, a `Cache`.

    Returns:
        What was verified; prints as one line.

    Raises:
        ChecksumError: Tensors are damaged, and the error names them; or the files have no digests.
        OpenError: The source cannot be opened.
        ReadFailedError: A file cannot be read.

    Examples:
        >>> import modelstate, torch
        >>> _ = modelstate.save({"weight": torch.zeros(4)}, "weight.safetensors")
        >>> modelstate.verify("weight.safetensors").bytes
        16
    """
    with open_checkpoint(source, key=key, allow=allow, skip_forbidden=skip_forbidden, cache=cache) as checkpoint:
        begin = perf_counter()
        verification = checkpoint.verification()
        storages = verification.names_of
        with progress_bar(progress, sum(storage.nbytes for storage in storages), "verifying") as advance:
            nbytes = verification.run(advance)
        algorithms = tuple(sorted({verification.checksums[storage].algorithm for storage in storages}))
        return Verification(
            checkpoint.source, checkpoint.format, len(checkpoint), nbytes, algorithms, perf_counter() - begin
        )


class InspectedValue(msgspec.Struct, frozen=True):
    """A value of a checkpoint that is not a tensor."""

    path: str
    kind: str
    """The name of its class; "?" where it cannot be decoded."""
    value: object
    """The value with JSON types. Anything that JSON cannot represent is text; a tensor is its shape and dtype."""


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(Shown):
    """The names, shapes, sizes and values of a checkpoint. Returned by `modelstate.inspect`.

    `print` shows the names with shapes, dtypes and sizes, the tied tensors, and the other values.
    """

    source: str
    """The path, as it was passed to `modelstate.inspect`."""
    key: str
    """The dotted path of the part; empty for the whole checkpoint."""
    format: str
    files: tuple[str, ...]
    """The files that were read."""
    metadata: Mapping[str, object]
    """The metadata with JSON types: see `Checkpoint.metadata`."""
    tensors: tuple[TensorSpec, ...]
    """The tensors, in the order of the file."""
    aliases: tuple[tuple[str, ...], ...]
    """Groups of names whose tensors are the same bytes: tied tensors."""
    values: tuple[InspectedValue, ...]
    """The values that are not tensors."""
    bytes: int
    """Bytes of all tensors; the bytes that tied tensors share count once."""
    left_out: tuple[str, ...]
    """The classes and functions whose objects `skip_forbidden` has left out."""
    checkpoint: Checkpoint = field(compare=False)
    """What was inspected."""

    @property
    def elements(self) -> int:
        """The number of elements of all tensors; tied tensors count once."""
        repeated = {name for group in self.aliases for name in group[1:]}
        return sum(math.prod(spec.shape) for spec in self.tensors if spec.name not in repeated)

    @property
    def dtypes(self) -> Mapping[torch.dtype, int]:
        """The number of tensors of each dtype, the most frequent first."""
        specs = {spec.dtype_name: spec for spec in self.tensors}
        return {specs[name].dtype: number for name, number in self._dtype_names.items()}

    @property
    def _dtype_names(self) -> Mapping[str, int]:
        return dict(Counter(spec.dtype_name for spec in self.tensors).most_common())

    def __repr__(self) -> str:
        return f"<Inspection of {self.source!r}: {count(len(self.tensors), 'tensor')}, {size(self.bytes)}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, *, fold: bool = True) -> str:
        """Returns what `print` shows.

        Args:
            fold: Whether similar tensors whose names differ in numbers only share a row.

        Examples:
            >>> print(modelstate.inspect("model.safetensors").text(fold=False))
        """
        parts = [_heading(self), _tensors(self, fold), _ties(self), _values(self), _metadata(self)]
        return "\n\n".join(part for part in parts if part)

    def _page(self) -> Page:
        page = self.checkpoint._page()
        details = "\n\n".join(part for part in (_ties(self), _values(self), _metadata(self)) if part)
        elements = ("Elements", f"{self.elements:,}")
        facts = (*page.facts, elements, ("Files", f"{len(self.files):,}"))
        return msgspec.structs.replace(page, facts=facts, text=details)

    def stats(self, *, only: Iterable[str] = (), progress: bool | None = None) -> CheckpointStatistics:
        """Reads the tensors, and returns the statistics of each: least and greatest value, mean, zeros, NaN, ...

        The tensors are read block by block on several threads, with tens of megabytes of memory.

        Args:
            only: Patterns of names; other tensors are left out.
            progress: Whether to show a progress bar. None shows one on a terminal after half a second.

        Returns:
            The statistics; `print` shows them, and `to_json` returns them for other programs.

        Raises:
            ComparisonError: A tensor has no values, as one on the meta device.
            ReadFailedError: A file cannot be read, or has changed since it was opened.
            OptionError: No name matches `only`, or an argument is not valid.

        Examples:
            >>> stats = modelstate.inspect({"w": torch.tensor([0.0, 3.0])}).stats()
            >>> stats.tensors[0].statistics.std
            1.5
        """
        from modelstate.checkpoint.statistics import statistics_of

        return statistics_of(self.checkpoint, only=only, progress=progress)

    def to_json(self) -> str:
        """All fields as JSON, with every tensor by itself."""
        return json.dumps(
            {
                "source": self.source,
                "key": self.key or None,
                "format": self.format,
                "files": list(self.files),
                "metadata": self.metadata,
                "tensors": [_tensor_json(spec) for spec in self.tensors],
                "aliases": [list(group) for group in self.aliases],
                "extra": {entry.path: entry.value for entry in self.values},
                "left_out": list(self.left_out),
                "totals": {
                    "tensors": len(self.tensors),
                    "elements": self.elements,
                    "bytes": self.bytes,
                    "dtypes": self._dtype_names,
                },
            },
            indent=2,
        )


@checked_call("ms.inspect")
def inspect(
    source: Source,
    *,
    key: str | None = None,
    allow: Sequence[object] = (),
    skip_forbidden: bool = False,
    cache: Cache | None = None,
) -> Inspection:
    """Describes the content of a checkpoint, without reading its tensors.

    Args:
        source: What `modelstate.open` accepts; usually a path.
        key: The dotted path of the part that is described, such as "model_state".
        allow: Classes and functions that a pickle may use, as for `modelstate.open`.
        skip_forbidden: Whether other classes and functions are left out, instead of raising.
        cache: Where what is read of remote files is kept, a `Cache`.

    Returns:
        The description; `print` shows it, and `to_json` returns it for other programs.

    Raises:
        OpenError: The source cannot be opened.
        KeyNotFoundError: There is nothing under `key`.

    Examples:
        >>> import modelstate, torch
        >>> print(modelstate.inspect({"layer.weight": torch.zeros(2, 3)}))
        mapping
        mapping, 1 tensor, 6 elements, 24 B
        dtypes: float32
        <BLANKLINE>
        name          shape   dtype    size
        layer.weight  [2, 3]  float32  24 B
    """
    with open_checkpoint(source, allow=allow, skip_forbidden=skip_forbidden, cache=cache) as whole:
        checkpoint = whole if key is None else whole.select(key)
        versions = {} if checkpoint.versions is None else {"versions": checkpoint.versions}
        metadata = {**checkpoint.contents.metadata, **versions}
        return Inspection(
            source=checkpoint.source,
            key=checkpoint.key,
            format=checkpoint.format,
            files=checkpoint.files,
            metadata={
                name: _inspected(name, partial(decoded, value, checkpoint.read)).value
                for name, value in metadata.items()
            },
            tensors=tuple(checkpoint.specs()),
            aliases=checkpoint.aliases,
            values=tuple(_inspected(path, partial(checkpoint.extra.__getitem__, path)) for path in checkpoint.extra),
            bytes=checkpoint.nbytes,
            left_out=tuple(sorted({leaf.name for _, leaf in leaves(whole.contents.tree) if isinstance(leaf, Refused)})),
            checkpoint=checkpoint,
        )


def _inspected(path: str, decode: Callable[[], object]) -> InspectedValue:
    """Describes what a function decodes. A value whose class is not imported does not hide the others."""
    try:
        value = decode()
    except CodecError as error:
        return InspectedValue(path, "?", f"not decoded: {printable(error.what)}")
    return InspectedValue(path, type(value).__name__, plain_value(value))


# The text.


def _heading(inspection: Inspection) -> str:
    where = inspection.source + (f", key {inspection.key!r}" if inspection.key else "")
    files = f", {count(len(inspection.files), 'file')}" if len(inspection.files) > 1 else ""
    totals = [
        inspection.format + files,
        count(len(inspection.tensors), "tensor"),
        count(inspection.elements, "element"),
        size(inspection.bytes),
    ]
    dtypes = inspection._dtype_names
    named = ", ".join(name + (f" ({number:,})" if len(dtypes) > 1 else "") for name, number in dtypes.items())
    lines = [printable(where), ", ".join(totals), *([f"dtypes: {named}"] if named else [])]
    if isinstance(changes := inspection.metadata.get(CHANGES), Mapping):
        parts = [
            f"{step} ({int(changed) / max(inspection.elements, 1):.2%} of the elements)"
            for step, changed in changes.items()
        ]
        lines.append(
            f"delta: changes of {listed(reversed(parts))}" if parts else "full: no changes of a step before it"
        )
    return "\n".join(lines)


def _tensors(inspection: Inspection, fold: bool) -> str:
    if not inspection.tensors:
        return ""
    tied_to = {name: group[0] for group in inspection.aliases for name in group[1:]}
    groups: dict[object, list[TensorSpec]] = {}
    for spec in inspection.tensors:
        pattern = folded([spec.name])[0] if fold else spec.name
        groups.setdefault((pattern, spec.shape, spec.dtype_name, spec.kind, spec.name in tied_to), []).append(spec)
    lines = [("name", "shape", "dtype", "size", "")]
    for group in groups.values():
        spec, nbytes = group[0], sum(spec.nbytes for spec in group)
        notes = [spec.kind] if spec.kind != "strided" else []
        notes += [f"= {tied_to[spec.name]}"] if spec.name in tied_to else []
        label = folded_label([spec.name for spec in group])
        lines.append((label, str(list(spec.shape)), spec.dtype_name, size(nbytes), ", ".join(notes)))
    return columns(lines, right=(3,))


def _ties(inspection: Inspection) -> str:
    groups = inspection.aliases
    if not groups:
        return ""
    lines = [f"tied ({count(len(groups), 'group')} of names that are the same bytes):"]
    lines += ["  " + printable(shorten(" = ".join(group), 200)) for group in groups[:_MAX_GROUPS]]
    if len(groups) > _MAX_GROUPS:
        lines.append(f"  and {len(groups) - _MAX_GROUPS:,} more, which --json lists")
    return "\n".join(lines)


def _values(inspection: Inspection) -> str:
    if not inspection.values:
        return ""
    similar: dict[tuple[str, str, str], list[str]] = {}
    for entry in inspection.values:
        pattern = folded([entry.path])[0]
        is_text = isinstance(entry.value, str) and entry.kind != "str"
        text = str(entry.value) if is_text else repr(entry.value)
        similar.setdefault((pattern, entry.kind, shorten(text, _VALUE_WIDTH)), []).append(entry.path)
    table = [(f"  {folded_label(paths)}", kind, text) for (_, kind, text), paths in similar.items()]
    return f"values that are not tensors ({len(inspection.values):,}):\n{columns(table)}"


def _metadata(inspection: Inspection) -> str:
    metadata = dict(inspection.metadata)
    versions, _ = metadata.pop("versions", None), metadata.pop(CHANGES, None)
    lines = [(f"  {key}", shorten(str(value), _VALUE_WIDTH)) for key, value in metadata.items()]
    if isinstance(versions, Mapping):
        lines.append(("  versions", f"of {count(len(versions), 'module')} (torch's _metadata)"))
    return f"metadata:\n{columns(lines)}" if lines else ""


def _tensor_json(spec: TensorSpec) -> dict[str, object]:
    entry: dict[str, object] = {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype_name,
        "bytes": spec.nbytes,
        "kind": spec.kind,
    }
    if isinstance(spec.stored, StoredTensor) and not spec.stored.is_contiguous:
        entry["stride"] = list(spec.stride)
    if spec.location is not None:
        entry |= {"file": spec.location.path, "offset": spec.location.start}
    return entry


def plain_value(value: object, levels: int = _MOST_LEVELS) -> object:
    """The value with JSON types; anything that JSON cannot represent, or that is nested deeper, becomes text."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return shorten(hex(value), 1000)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if is_tensor(value):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"without a shape yet, {dtype}" if is_uninitialised(value) else f"tensor({list(value.shape)}, {dtype})"
    if isinstance(value, Mapping | Sequence | set | frozenset) and not levels:
        return "..."
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else safe_repr(key): plain_value(v, levels - 1) for key, v in value.items()}
    is_whole = isinstance(value, bytes | bytearray | memoryview | range)
    if isinstance(value, Sequence | set | frozenset) and not is_whole:
        return [plain_value(item, levels - 1) for item in value]
    return shorten(safe_repr(value), 1000)
