"""The result of a comparison: what each tensor and value differs by, as text, as JSON and as a page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TypeVar

import msgspec
import torch

from modelstate.arguments import check_integer
from modelstate.comparison.difference import Difference
from modelstate.html.page import Page, Shown
from modelstate.tensor_spec import TensorSpec
from modelstate.text_format import (
    as_given,
    columns,
    count,
    folded,
    folded_label,
    listed,
    printable,
    seconds,
    shorten,
    size,
)
from modelstate.torch_compat.dtypes import short

_TEXT_WIDTH = 72
_LISTED = 12
"""The number of names of a list that are printed."""
_TOP = 30
"""The number of rows of the table that are printed."""


class Status(Enum):
    """What a comparison of two tensors has found."""

    EQUAL = "equal"
    """All bits are equal."""
    CHANGED = "changed"
    """Values differ."""
    OTHER_DTYPE = "other dtype"
    OTHER_SHAPE = "other shape"
    OTHER_KIND = "other kind"
    """One is a plain tensor and the other one is not, or they are of two classes."""
    NOT_COMPARED = "not compared"
    """Shapes and dtypes are equal, and `values=False` was given."""


class TensorDiff(msgspec.Struct, frozen=True, rename={"is_read": "read"}):
    """Two tensors that were matched, or the same part of each: of quantized tensors, the payload and the scales."""

    name: str
    """The name in the second checkpoint."""
    source_names: tuple[str, ...]
    """The names in the first checkpoint, before the rules. Several where a rule joins tensors."""
    part: str
    """Which part of a tensor that consists of several; empty for a plain tensor."""
    status: Status
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """The shapes in the first and in the second checkpoint, after the rules."""
    dtypes: tuple[torch.dtype, torch.dtype]
    kinds: tuple[str, str]
    """ "strided" for a plain tensor; otherwise the layout or the class."""
    bytes: int
    """Bytes of both tensors."""
    is_read: bool
    """Whether the bytes were read. Bytes whose digests agree are not."""
    difference: Difference | None
    """The measures; None where the shapes or kinds differ, and where values of such dtypes cannot be compared."""

    @property
    def change(self) -> float:
        """The measure that tensors are sorted by: the relative L2 difference, or else the share that has changed.

        Infinite where the numbers of NaN or of infinite elements differ, which no measure of finite elements shows.
        """
        found = self.difference
        if found is None:
            return 0.0 if self.status in (Status.EQUAL, Status.NOT_COMPARED) else math.inf
        if any(sides is not None and sides[0] != sides[1] for sides in (found.nan, found.infinite)):
            return math.inf
        if found.relative_l2 is None:
            return found.changed or 0.0 if not found.max_abs else math.inf
        return max(found.relative_l2, 1e-30 * (found.changed or 0.0))

    @property
    def _is_listed(self) -> bool:
        """Whether the tensors differ, or have elements that are not finite."""
        found = self.difference
        has_nonfinite = found is not None and any((*(found.nan or ()), *(found.infinite or ())))
        return self.status not in (Status.EQUAL, Status.NOT_COMPARED) or has_nonfinite


class ValueDiff(msgspec.Struct, frozen=True):
    """A value other than a tensor that differs. Values are given with JSON types, or as text."""

    path: str
    """The path in the second checkpoint."""
    is_in: tuple[bool, bool]
    """Whether the first and the second checkpoint have it."""
    values: tuple[object, object]


class Diff(Shown, msgspec.Struct, frozen=True):
    """The differences of two checkpoints. Returned by `modelstate.diff`.

    `print` shows a summary, and the tensors that differ, the largest change first.

    Examples:
        >>> diff = modelstate.diff({"w": torch.ones(4)}, {"w": torch.tensor([1.0, 1.0, 1.0, 2.0])})
        >>> diff.is_equal, diff.tensors[0].difference.changed
        (False, 0.25)
    """

    a: str
    """The first checkpoint: its path, with the key of the part that was compared."""
    b: str
    """The second checkpoint."""
    tensors: tuple[TensorDiff, ...]
    """The tensors of both, in the order of the second checkpoint."""
    removed: tuple[TensorSpec, ...]
    """The tensors that only the first checkpoint has."""
    added: tuple[TensorSpec, ...]
    """The tensors that only the second checkpoint has."""
    values: tuple[ValueDiff, ...]
    """The values other than tensors that differ."""
    read_bytes: int
    """Bytes that were read and compared."""
    skipped_bytes: int
    """Bytes that were not read: their digests agree, or both are the same bytes of one file."""
    seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether names, shapes, dtypes, bits and values are equal."""
        matched = all(tensor.status in (Status.EQUAL, Status.NOT_COMPARED) for tensor in self.tensors)
        return matched and not (self.removed or self.added or self.values)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.a!r} and {self.b!r}: {self._outcome()}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, *, top: int | None = _TOP, fold: bool = True, width: int | None = None) -> str:
        """Returns what `print` shows.

        Args:
            top: The number of rows of the table of tensors; None for all.
            fold: Whether tensors whose names differ in numbers only are one row.
            width: The most characters of a row; columns that do not fit are left out. None for any number.

        Raises:
            OptionError: `top` is negative.

        Examples:
            >>> print(modelstate.diff({"w": torch.ones(2)}, {"w": torch.ones(2)}).text(top=5).splitlines()[0])
            mapping and mapping: equal
        """
        check_integer("top", top, least=0, accepts_none=True)
        skipped = f", {size(self.skipped_bytes)} not read, since it is known to be equal" if self.skipped_bytes else ""
        parts = [
            printable(f"{as_given(self.a)} and {as_given(self.b)}: {self._outcome()}")
            + f"\n{count(len(self.tensors), 'tensor')} compared, {size(self.read_bytes)} read{skipped}, "
            + seconds(self.seconds),
            _names("only in the first", self.removed),
            _names("only in the second", self.added),
            _table([tensor for tensor in self.tensors if tensor._is_listed], top, fold, width),
            _values(self.values),
        ]
        return "\n\n".join(part for part in parts if part)

    def to_json(self) -> str:
        """Returns everything as JSON, with every tensor by itself.

        Examples:
            >>> json.loads(modelstate.diff({"w": torch.ones(2)}, {"w": torch.ones(2)}).to_json())["equal"]
            True
        """
        statuses = Counter(tensor.status.value for tensor in self.tensors)
        removed, added = (
            [{"name": spec.name, "shape": list(spec.shape), "dtype": short(spec.dtype)} for spec in specs]
            for specs in (self.removed, self.added)
        )
        return json.dumps(
            {
                "a": as_given(self.a),
                "b": as_given(self.b),
                "equal": self.is_equal,
                "tensors": msgspec.to_builtins(self.tensors, enc_hook=short),
                "removed": removed,
                "added": added,
                "values": [
                    {"path": value.path, "in_a": value.is_in[0], "in_b": value.is_in[1]}
                    | {"a": value.values[0], "b": value.values[1]}
                    for value in self.values
                ],
                "totals": {
                    "statuses": statuses,
                    "read_bytes": self.read_bytes,
                    "skipped_bytes": self.skipped_bytes,
                    "seconds": self.seconds,
                },
            },
            indent=1,
        )

    def _page(self) -> Page:
        rows: list[list[str | int | float | None]] = []
        for tensor in sorted(self.tensors, key=lambda tensor: -tensor.change):
            found = tensor.difference or Difference()
            rows.append(
                [
                    f"{tensor.name}.{tensor.part}".rstrip("."),
                    tensor.status.value,
                    _both(tensor.shapes, lambda shape: str(list(shape))),
                    _both(tensor.dtypes, short),
                    tensor.bytes,
                    *(found.changed, found.max_abs, found.relative_l2),
                    listed(tensor.source_names) if tensor.source_names != (tensor.name,) else "",
                ]
            )
        for status, specs in (("removed", self.removed), ("added", self.added)):
            rows += [[spec.name, status, str(list(spec.shape)), spec.dtype_name, spec.nbytes] for spec in specs]
        return Page(
            f"{as_given(self.a)} and {as_given(self.b)}",
            (("Result", self._outcome()), ("Read", size(self.read_bytes)), ("Time", seconds(self.seconds))),
            ("Name", "Status", "Shape", "Dtype", "Bytes", "Changed", "Max abs", "Rel. L2", "Matched with"),
            rows,
            text=_values(self.values),
        )

    def _outcome(self) -> str:
        if self.is_equal:
            return "equal"
        numbers = Counter(tensor.status for tensor in self.tensors)
        counts = [f"{numbers[status]:,} {status.value}" for status in Status if numbers[status]]
        counts += [f"{len(self.removed):,} removed"] if self.removed else []
        counts += [f"{len(self.added):,} added"] if self.added else []
        return ", ".join(counts + ([f"{count(len(self.values), 'other value')} changed"] if self.values else []))


def _names(what: str, specs: Sequence[TensorSpec]) -> str:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for spec in specs:
        groups.setdefault((folded([spec.name])[0], str(list(spec.shape)), short(spec.dtype)), []).append(spec.name)
    rows = [(f"  {folded_label(names)}", shape, dtype) for (_, shape, dtype), names in groups.items()]
    return _section(f"{what} ({len(specs):,}):", rows) if rows else ""


def _values(values: Sequence[ValueDiff]) -> str:
    rows = []
    for value in values:
        a, b = (
            shorten(repr(side), _TEXT_WIDTH) if is_in else "none"
            for side, is_in in zip(value.values, value.is_in, strict=True)
        )
        rows.append((f"  {value.path}", a, "->", b))
    return _section(f"values that are not tensors ({len(values):,}):", rows) if rows else ""


def _section(heading: str, rows: Sequence[tuple[str, ...]]) -> str:
    more = [f"  and {len(rows) - _LISTED:,} more"] if len(rows) > _LISTED else []
    return "\n".join([heading, columns(rows[:_LISTED]), *more])


_HEADS = ("name", "shape", "dtype", "changed", "max abs", "rel. L2", "")


def _table(tensors: Sequence[TensorDiff], top: int | None, fold: bool, width: int | None) -> str:
    """Returns the table of the tensors that differ, those with the largest change first."""
    groups: dict[object, list[TensorDiff]] = {}
    for tensor in tensors:
        pattern = folded([tensor.name])[0] if fold else tensor.name
        sides = (tensor.shapes, tensor.dtypes, tensor.kinds)
        groups.setdefault((pattern, tensor.part, tensor.status, sides), []).append(tensor)
    if not groups:
        return ""
    ordered = sorted(groups.values(), key=lambda group: -max(tensor.change for tensor in group))
    listed_groups = ordered[:top]
    more = [f"and {len(ordered) - len(listed_groups):,} more rows"] if len(ordered) > len(listed_groups) else []
    worst = "; of folded tensors, the largest difference" if any(len(group) > 1 for group in listed_groups) else ""
    table = columns([_HEADS, *map(_row, listed_groups)], right=range(3, 6), width=width, optional=(1, 2, 6))
    return "\n".join([f"tensors that differ, the largest change first{worst}:", table, *more])


def _row(group: Sequence[TensorDiff]) -> tuple[str, ...]:
    first = group[0]
    found = [tensor.difference for tensor in group if tensor.difference is not None]
    shares = [difference.changed for difference in found if difference.changed is not None]
    return (
        folded_label([tensor.name for tensor in group]) + (f", {first.part}" if first.part else ""),
        _both(first.shapes, lambda shape: str(list(shape))),
        _both(first.dtypes, short),
        f"{100 * math.fsum(shares) / len(shares):.3g}%" if shares else "",
        _largest(difference.max_abs for difference in found),
        _largest(difference.relative_l2 for difference in found),
        "; ".join(_remarks(first, found)),
    )


_Side = TypeVar("_Side")


def _both(sides: tuple[_Side, _Side], text: Callable[[_Side], str]) -> str:
    return text(sides[0]) if sides[0] == sides[1] else f"{text(sides[0])} -> {text(sides[1])}"


def _largest(measures: Iterable[float | None]) -> str:
    known = [measure for measure in measures if measure is not None]
    return f"{max(known):.3g}" if known else ""


def _remarks(first: TensorDiff, found: Sequence[Difference]) -> list[str]:
    remarks = [first.status.value] if first.status is not Status.CHANGED else []
    if first.kinds[0] != first.kinds[1]:
        remarks.append(f"{first.kinds[0]} -> {first.kinds[1]}")
    if first.source_names != (first.name,):
        remarks.append(f"from {listed(first.source_names, 3)}")
    for what, counts in (("NaN", [each.nan for each in found]), ("infinite", [each.infinite for each in found])):
        a, b = (sum(sides[index] for sides in counts if sides is not None) for index in (0, 1))
        if a or b:
            remarks.append(f"{what}: {a:,} -> {b:,}")
    return remarks
