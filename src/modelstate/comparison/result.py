"""The result of a comparison: what each tensor and value differs by, as text, as JSON and as a page."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

import msgspec
import torch

from modelstate.comparison.difference import Difference
from modelstate.errors import OptionError
from modelstate.html.page import Kind, Page, Shown
from modelstate.tensor_spec import TensorSpec
from modelstate.text_format import (
    as_given,
    columns,
    count,
    folded,
    listed,
    printable,
    seconds,
    short_repr,
    shorten,
    size,
)
from modelstate.torch_compat.dtypes import short

_TEXT_WIDTH = 72
_LISTED = 12
"""The number of names of a list that are printed."""
_TOP = 30
"""The number of rows of the table that are printed."""


class Match(Enum):
    """How two tensors were matched."""

    NAME = "name"
    """Their names are equal."""
    RULE = "rule"
    """A rule that was given leads from one name to the other."""


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


class TensorDiff(msgspec.Struct, frozen=True):
    """Two tensors that were matched, or the same part of each: of quantized tensors, the payload and the scales."""

    name: str
    """The name in the second checkpoint."""
    source_names: tuple[str, ...]
    """The names in the first checkpoint. Several where a rule joins tensors."""
    match: Match
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
        found = "equal" if self.is_equal else ", ".join(self._counts())
        return f"<{type(self).__name__} of {self.a!r} and {self.b!r}: {found}>"

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
        if top is not None and top < 0:
            raise OptionError(
                "top= must be a number of rows", expected="an integer >= 0, or None", found=short_repr(top)
            )
        found = "equal" if self.is_equal else ", ".join(self._counts())
        parts = ["\n".join([printable(f"{as_given(self.a)} and {as_given(self.b)}: {found}"), self._cost()])]
        for what, specs in (("only in the first", self.removed), ("only in the second", self.added)):
            parts += [_names(what, specs)] if specs else []
        parts += [_table(self.tensors, top, fold, width), _values(self.values)]
        return "\n\n".join(part for part in parts if part)

    def to_json(self) -> str:
        """Returns everything as JSON, with every tensor by itself.

        Examples:
            >>> json.loads(modelstate.diff({"w": torch.ones(2)}, {"w": torch.ones(2)}).to_json())["equal"]
            True
        """
        return json.dumps(
            {
                "a": as_given(self.a),
                "b": as_given(self.b),
                "equal": self.is_equal,
                "tensors": [_tensor_json(tensor) for tensor in self.tensors],
                "removed": [_spec_json(spec) for spec in self.removed],
                "added": [_spec_json(spec) for spec in self.added],
                "values": [
                    {"path": value.path, "in_a": value.is_in[0], "in_b": value.is_in[1]}
                    | {"a": value.values[0], "b": value.values[1]}
                    for value in self.values
                ],
                "totals": {
                    "statuses": {
                        status.value: number
                        for status in Status
                        if (number := sum(tensor.status is status for tensor in self.tensors))
                    },
                    "read_bytes": self.read_bytes,
                    "skipped_bytes": self.skipped_bytes,
                    "seconds": self.seconds,
                },
            },
            indent=1,
        )

    def _page(self) -> Page:
        measures = ("changed", "max_abs", "relative_l2")
        rows: list[list[str | int | float | None]] = []
        for tensor in sorted(self.tensors, key=lambda tensor: -tensor.change):
            a, b = tensor.shapes
            matched = "" if tensor.match is Match.NAME else f"{listed(tensor.source_names)} ({tensor.match.value})"
            rows.append(
                [
                    f"{tensor.name}.{tensor.part}".rstrip("."),
                    tensor.status.value,
                    str(list(b)) if a == b else f"{list(a)} -> {list(b)}",
                    " -> ".join(dict.fromkeys(short(dtype) for dtype in tensor.dtypes)),
                    tensor.bytes,
                    *[getattr(tensor.difference, measure, None) for measure in measures],
                    matched,
                ]
            )
        for status, specs in (("removed", self.removed), ("added", self.added)):
            rows += [[spec.name, status, str(list(spec.shape)), spec.dtype_name, spec.nbytes] for spec in specs]
        return Page(
            f"{as_given(self.a)} and {as_given(self.b)}",
            (
                ("Result", "equal" if self.is_equal else ", ".join(self._counts())),
                ("Read", size(self.read_bytes)),
                ("Time", seconds(self.seconds)),
            ),
            (
                ("Name", Kind.TEXT),
                ("Status", Kind.TEXT),
                ("Shape", Kind.TEXT),
                ("Dtype", Kind.TEXT),
                ("Bytes", Kind.BYTES),
                ("Changed", Kind.SHARE),
                *[(name, Kind.MEASURE) for name in ("Max abs", "Rel. L2")],
                ("Matched with", Kind.TEXT),
            ),
            rows,
            text=_values(self.values),
        )

    def _counts(self) -> list[str]:
        numbers = Counter(tensor.status for tensor in self.tensors)
        counts = [f"{numbers[status]:,} {status.value}" for status in Status if numbers[status]]
        counts += [f"{len(self.removed):,} removed"] if self.removed else []
        counts += [f"{len(self.added):,} added"] if self.added else []
        return counts + ([f"{count(len(self.values), 'other value')} changed"] if self.values else [])

    def _cost(self) -> str:
        skipped = f", {size(self.skipped_bytes)} not read, since it is known to be equal" if self.skipped_bytes else ""
        return f"{count(len(self.tensors), 'tensor')} compared, {size(self.read_bytes)} read{skipped}, " + seconds(
            self.seconds
        )


def _names(what: str, specs: Sequence[TensorSpec]) -> str:
    groups: dict[tuple[str, tuple[int, ...], torch.dtype], list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault((folded([spec.name])[0], spec.shape, spec.dtype), []).append(spec)
    rows = [
        (f"  {_times(pattern, [spec.name for spec in group])}", str(list(shape)), short(dtype))
        for (pattern, shape, dtype), group in groups.items()
    ]
    more = [f"  and {len(rows) - _LISTED:,} more"] if len(rows) > _LISTED else []
    return "\n".join([f"{what} ({len(specs):,}):", columns(rows[:_LISTED]), *more])


def _times(pattern: str, names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{pattern} ({len(names)} ×)"


def _values(values: Sequence[ValueDiff]) -> str:
    if not values:
        return ""
    rows = []
    for value in values[:_LISTED]:
        sides = [
            shorten(repr(side), _TEXT_WIDTH) if is_in else "none"
            for side, is_in in zip(value.values, value.is_in, strict=True)
        ]
        rows.append((f"  {value.path}", sides[0], "->", sides[1]))
    more = [f"  and {len(values) - _LISTED:,} more"] if len(values) > _LISTED else []
    return "\n".join([f"values that are not tensors ({len(values):,}):", columns(rows), *more])


_HEADS = ("name", "shape", "dtype", "changed", "max abs", "rel. L2", "")


def _table(tensors: Sequence[TensorDiff], top: int | None, fold: bool, width: int | None) -> str:
    """The tensors that differ, those with the largest change first."""
    differing = []
    for tensor in tensors:
        found = tensor.difference
        has_nonfinite = found is not None and any((*(found.nan or ()), *(found.infinite or ())))
        if tensor.status not in (Status.EQUAL, Status.NOT_COMPARED) or has_nonfinite:
            differing.append(tensor)
    groups: dict[object, list[TensorDiff]] = {}
    for tensor in differing:
        pattern = folded([tensor.name])[0] if fold else tensor.name
        sides = (tensor.shapes, tensor.dtypes, tensor.kinds)
        groups.setdefault((pattern, tensor.part, tensor.status, tensor.match, sides), []).append(tensor)
    if not groups:
        return ""
    ordered = sorted(groups.values(), key=lambda group: -max(tensor.change for tensor in group))
    shown = ordered if top is None else ordered[:top]
    more = [f"and {len(ordered) - len(shown):,} more rows"] if len(ordered) > len(shown) else []
    worst = "; of folded tensors, the largest difference" if any(len(group) > 1 for group in shown) else ""
    heading = f"tensors that differ, the largest change first{worst}:"
    table = columns([_HEADS, *map(_row, shown)], right=range(3, 6), width=width, optional=(1, 2, 6))
    return "\n".join([heading, table, *more])


def _row(group: Sequence[TensorDiff]) -> tuple[str, ...]:
    first = group[0]
    pattern = folded([first.name])[0]
    name = _times(pattern, [tensor.name for tensor in group])
    if first.part:
        name += f", {first.part}"
    found = [tensor.difference for tensor in group if tensor.difference is not None]
    shares = [difference.changed for difference in found if difference.changed is not None]
    changed = f"{100 * math.fsum(shares) / len(shares):.3g}%" if shares else ""
    return (
        name,
        _both(first.shapes, lambda shape: str(list(shape))),
        _both(first.dtypes, short),
        changed,
        _most(found, "max_abs"),
        _most(found, "relative_l2"),
        "; ".join(_remarks(group, found)),
    )


_Side = TypeVar("_Side")


def _both(sides: tuple[_Side, _Side], text: Callable[[_Side], str]) -> str:
    return text(sides[0]) if sides[0] == sides[1] else f"{text(sides[0])} -> {text(sides[1])}"


def _most(found: Sequence[Difference], name: str) -> str:
    values = [value for difference in found if (value := getattr(difference, name)) is not None]
    return f"{max(values):.3g}" if values else ""


def _remarks(group: Sequence[TensorDiff], found: Sequence[Difference]) -> list[str]:
    first = group[0]
    remarks = [first.status.value] if first.status is not Status.CHANGED else []
    if first.kinds[0] != first.kinds[1]:
        remarks.append(f"{first.kinds[0]} -> {first.kinds[1]}")
    if first.source_names != (first.name,):
        remarks.append(f"from {listed(first.source_names, 3)}")
    for what, name in (("NaN", "nan"), ("infinite", "infinite")):
        counts = [getattr(difference, name) or (0, 0) for difference in found]
        a, b = (sum(side) for side in zip(*counts, strict=True)) if counts else (0, 0)
        if a or b:
            remarks.append(f"{what}: {a:,} -> {b:,}")
    return remarks


def _tensor_json(tensor: TensorDiff) -> dict[str, object]:
    found = tensor.difference
    measures = {} if found is None else {name: getattr(found, name) for name in found.__struct_fields__}
    return {
        "name": tensor.name,
        "source_names": list(tensor.source_names),
        "match": tensor.match.value,
        "part": tensor.part,
        "status": tensor.status.value,
        "shapes": [list(shape) for shape in tensor.shapes],
        "dtypes": [short(dtype) for dtype in tensor.dtypes],
        "kinds": list(tensor.kinds),
        "bytes": tensor.bytes,
        "read": tensor.is_read,
        "difference": measures or None,
    }


def _spec_json(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "shape": list(spec.shape), "dtype": short(spec.dtype)}
