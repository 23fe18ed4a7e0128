"""Statistics of the tensors of a checkpoint, and of its modules: `modelstate.inspect(source).stats()`.

Accumulation: values of at most 16 bits and float32 are added up in float32 within a chunk of 262,144 elements; wider
integers and float64 in float64. The chunks are combined exactly (`exact_sum`), with the mean and the sum of squared
deviations of each, so that a large mean does not cancel a small deviation. Minima and maxima are exact.
"""

import json
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from time import perf_counter

import msgspec
import torch
from msgspec.structs import replace

from modelstate.arguments import check_integer
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import check_budget_option, patterns_of
from modelstate.checkpoint.reduction import (
    CONVERTIBLE,
    Chunk,
    Operand,
    exact_sum,
    if_finite,
    kind_of,
    operand_of,
    plain_parts,
    read_dtype,
    reduce,
    scratch,
)
from modelstate.errors import MissingValuesError, OptionError, UnsupportedTensorError
from modelstate.formats.block_writer import check_expanded
from modelstate.html.page import Kind, Page, Shown, area_chart
from modelstate.io.engine import read_ranges
from modelstate.io.tensors import read_tensor
from modelstate.spec import Stored, bytes_key, pieces
from modelstate.tensor_spec import TensorSpec
from modelstate.text_format import columns, count, folded, listed, printable, seconds, short_repr, size
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.plain import has_its_memory, is_plain, remedies_for

_TINY = 1e-20
"""A smaller sum of squared deviations is computed in float64."""


class Statistics(msgspec.Struct, frozen=True):
    """The statistics of some elements.

    A measure that does not apply is None, and so is one whose computation leaves the range of float64.

    Minimum, maximum, mean and standard deviation are those of the finite elements.
    """

    elements: int
    finite: int | None
    """The number of elements that are neither NaN nor infinite."""
    min: float | int | None
    max: float | int | None
    mean: float | None
    std: float | None
    """The standard deviation of the elements themselves, not the estimate of one that they are a sample of."""
    zeros: float | None
    """The share of zeros among all elements, from 0 to 1."""
    nan: int | None
    infinite: int | None


_UNKNOWN = (None,) * 8


class TensorStatistics(msgspec.Struct, frozen=True):
    """A tensor with its statistics."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    """ "strided"; or the layout or class of a tensor that consists of several, which have the statistics."""
    bytes: int
    """Bytes of the elements; 0 for a tied tensor, whose bytes count under the first of its names."""
    statistics: Statistics
    parts: "tuple[TensorStatistics, ...]" = ()
    """The plain tensors that a sparse or quantized one consists of, such as the payload and the scales."""


class ModuleStatistics(msgspec.Struct, frozen=True):
    """The tensors under a common prefix."""

    name: str
    """The prefix; with `*` for numbers where several modules are folded, and empty for the whole checkpoint."""
    tensors: int
    dtypes: Mapping[torch.dtype, int]
    """The number of tensors of each dtype, the most frequent first."""
    bytes: int
    statistics: Statistics
    """Of all elements of plain tensors; those of tied tensors count once. NaN and infinity are those of parts, too."""


class Sort(Enum):
    """The order of the rows of `CheckpointStatistics.text`."""

    FILE = "file"
    """That of the file."""
    NAME = "name"
    SIZE = "size"
    """The largest first."""


class CheckpointStatistics(Shown, msgspec.Struct, frozen=True):
    """The statistics of the tensors of a checkpoint. Returned by `Inspection.stats`.

    `print` shows a row for each tensor, folded where layers repeat, and one for the whole.

    Examples:
        >>> stats = modelstate.inspect({"a.w": torch.tensor([0.0, 4.0]), "a.b": torch.ones(2)}).stats()
        >>> stats.tensors[0].statistics.mean, stats.module("a").statistics.max
        (2.0, 4.0)
    """

    source: str
    tensors: tuple[TensorStatistics, ...]
    """The tensors, in the order of the file."""
    read_bytes: int
    seconds: float

    def module(self, name: str = "") -> ModuleStatistics:
        """Returns the statistics of the tensors of a module.

        Args:
            name: The path of the module; empty for the whole checkpoint.

        Raises:
            OptionError: No tensor is below this path.

        Examples:
            >>> modelstate.inspect({"a.w": torch.ones(2), "b.w": torch.ones(3)}).stats().module("b").tensors
            1
        """
        below = [tensor for tensor in self.tensors if not name or f"{tensor.name}.".startswith(f"{name}.")]
        if name and not below:
            raise OptionError("no tensor is below this path", where=self.source, found=name)
        return _module(name, below)

    def modules(self, depth: int) -> tuple[ModuleStatistics, ...]:
        """Returns the modules at a depth, in the order of the file.

        Args:
            depth: The number of parts of the names of the modules; shorter names of tensors are rows of their own.

        Examples:
            >>> stats = modelstate.inspect({"a.w": torch.ones(2), "b": torch.ones(1)}).stats()
            >>> [module.name for module in stats.modules(1)]
            ['a', 'b']
        """
        groups: dict[str, list[TensorStatistics]] = {}
        for tensor in self.tensors:
            groups.setdefault(".".join(tensor.name.split(".")[:depth]), []).append(tensor)
        return tuple(_module(name, members) for name, members in groups.items())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.source!r}: {count(len(self.tensors), 'tensor')}>"

    def __str__(self) -> str:
        return self.text()

    def text(
        self,
        *,
        depth: int | None = None,
        sort: Sort | str = Sort.FILE,
        fold: bool = True,
        width: int | None = None,
    ) -> str:
        """Returns what `print` shows.

        Args:
            depth: Rows are modules with as many parts in their names; None for a row for each tensor.
            sort: The order of the rows: a `Sort`, or its value.
            fold: Whether rows whose names differ in numbers only, with equal dtypes, are one row.
            width: The most characters of a line; columns that do not fit are left out. None for any number.

        Raises:
            OptionError: `sort` is none of the orders, or `depth` is negative.

        Examples:
            >>> print(modelstate.inspect({"w": torch.ones(2)}).stats().text(sort="size").splitlines()[0])
            mapping: 1 tensor, 8 B read
        """
        try:
            order = Sort(sort)
        except ValueError as error:
            raise OptionError(
                "sort= is no order of rows", expected=", ".join(order.value for order in Sort), found=short_repr(sort)
            ) from error
        check_integer("depth", depth, least=0, accepts_none=True)
        # Without a depth, each tensor has a row, and each part that it consists of has one below it.
        entries = [entry for tensor in self.tensors for entry in (tensor, *tensor.parts)] if depth is None else []
        rows = [_module(entry.name, [entry]) for entry in entries] if depth is None else self.modules(depth)
        shapes = {entry.name: str(list(entry.shape)) for entry in entries}
        table = [(row, shapes.get(row.name, "")) for row in rows]
        if fold:
            table = _folded(table)
        if order is not Sort.FILE:
            table.sort(key=lambda entry: entry[0].name if order is Sort.NAME else -entry[0].bytes)
        whole = self.module()
        tensors = f"{count(len(self.tensors), 'tensor')}, {size(self.read_bytes)} read"
        lines = [_HEADS, *(_row(row, shape) for row, shape in table)]
        if len(table) > 1:
            lines.append(_row(whole, "", "all"))
        dtypes = ", ".join(f"{short(dtype)} ({number:,})" for dtype, number in whole.dtypes.items())
        heading = f"{printable(self.source)}: {tensors}, {seconds(self.seconds)}\ndtypes: {dtypes}\n\n"
        return heading + columns(lines, right=range(3, 11), width=width, optional=(1, 2, 6, 7, 10, 9))

    def _page(self) -> Page:
        measures = (
            ("Min", "min", Kind.LEAST),
            ("Max", "max", Kind.MEASURE),
            ("Mean", "mean", Kind.OWN),
            ("Std", "std", Kind.OWN),
            ("Zeros", "zeros", Kind.SHARE),
            ("NaN", "nan", Kind.COUNT),
            ("Infinite", "infinite", Kind.COUNT),
        )
        return Page(
            f"Statistics of {self.source}",
            (("Tensors", f"{len(self.tensors):,}"), ("Read", size(self.read_bytes)), ("Time", seconds(self.seconds))),
            (
                ("Name", Kind.TEXT),
                ("Shape", Kind.TEXT),
                ("Dtype", Kind.TEXT),
                ("Bytes", Kind.BYTES),
                *[(title, kind) for title, _, kind in measures],
            ),
            [
                [
                    entry.name,
                    str(list(entry.shape)),
                    short(entry.dtype),
                    tensor.bytes if entry is tensor else None,  # those of parts are in their tensor's
                    *[getattr(entry.statistics, measure) for _, measure, _ in measures],
                ]
                for tensor in self.tensors
                for entry in (tensor, *tensor.parts)
            ],
            charts=(area_chart([(tensor.name, tensor.bytes) for tensor in self.tensors]),),
        )

    def to_json(self) -> str:
        """Returns everything as JSON, with every tensor by itself."""
        return json.dumps(
            {
                "source": self.source,
                "tensors": [
                    _tensor_json(tensor) | {"parts": [_tensor_json(part) for part in tensor.parts]}
                    for tensor in self.tensors
                ],
                "totals": {
                    "tensors": len(self.tensors),
                    "bytes": sum(tensor.bytes for tensor in self.tensors),
                    "dtypes": {short(dtype): number for dtype, number in self.module().dtypes.items()},
                    "read_bytes": self.read_bytes,
                    "seconds": self.seconds,
                }
                | _json(self.module().statistics),
            },
            indent=1,
        )


def statistics_of(
    checkpoint: Checkpoint,
    *,
    only: Iterable[str],
    max_memory_bytes: int | None,
    progress: bool | None,
) -> CheckpointStatistics:
    """Implements `Inspection.stats`."""
    begin = perf_counter()
    check_budget_option(max_memory_bytes, minimum=1)
    patterns = patterns_of("only", only)
    specs = [spec for name, spec in checkpoint.items() if not patterns or any(fnmatchcase(name, p) for p in patterns)]
    if patterns and not specs:
        raise OptionError(
            "no name matches the patterns",
            where=checkpoint.source,
            found=", ".join(patterns),
            remedy=f"patterns are those of whole names, such as {next(iter(checkpoint), '*')!r}",
        )
    _check_values(checkpoint, specs)
    read = partial(read_tensor, read_all=partial(read_ranges, fingerprints=checkpoint.fingerprints, threads=1))
    plain: dict[object, Stored] = {}
    parts: dict[str, dict[str, Stored]] = {}
    for spec in specs:
        parts[spec.name] = {"": spec.stored} if kind_of(spec.stored) == "strided" else plain_parts(spec.stored)
        for label, stored in parts[spec.name].items():
            if kind_of(stored) == "strided" and read_dtype(stored.dtype) in CONVERTIBLE:
                plain.setdefault(bytes_key(stored, f"{spec.name}.{label}"), stored)
    operands: list[tuple[Operand, ...]] = [(operand_of(stored, read),) for stored in plain.values()]
    accumulators = [_Accumulator(read_dtype(stored.dtype)) for stored in plain.values()]

    def fold(chunk: Chunk) -> None:
        accumulators[chunk.item].add(chunk.values[0])

    read_bytes = reduce(
        operands,
        fold,
        fingerprints=checkpoint.fingerprints,
        max_memory_bytes=max_memory_bytes,
        progress=progress,
        what="reading",
    )
    found = {key: accumulator.result() for key, accumulator in zip(plain, accumulators, strict=True)}
    counted: set[object] = set()
    tensors = []
    for spec in specs:
        key, kind = bytes_key(spec.stored, spec.name), kind_of(spec.stored)
        members: list[TensorStatistics] = []
        for label, stored in parts[spec.name].items():
            shape = tuple(stored.shape)
            statistics = found.get(bytes_key(stored, f"{spec.name}.{label}"))
            statistics = statistics or Statistics(math.prod(shape), *_UNKNOWN)
            nbytes = 0 if key in counted else math.prod(shape) * stored.dtype.itemsize
            name = f"{spec.name}, {label}" if label else spec.name
            members.append(TensorStatistics(name, shape, stored.dtype, "strided", nbytes, statistics))
        whole = Statistics(math.prod(spec.shape), *_UNKNOWN) if kind != "strided" else members[0].statistics
        counted.add(key)
        below = tuple(members) if kind != "strided" else ()
        nbytes = sum(member.bytes for member in members)
        tensors.append(TensorStatistics(spec.name, spec.shape, spec.dtype, kind, nbytes, whole, below))
    label = checkpoint.source + (f", key {checkpoint.key!r}" if checkpoint.key else "")
    return CheckpointStatistics(label, tuple(tensors), read_bytes, perf_counter() - begin)


def _check_values(checkpoint: Checkpoint, specs: Iterable[TensorSpec]) -> None:
    lacking = {
        spec.name: piece
        for spec in specs
        for piece in pieces(spec.stored)
        if isinstance(piece, torch.Tensor)
        and (piece.is_meta or remedies_for([piece]) or (is_plain(piece) and not has_its_memory(piece)))
    }
    if lacking:
        raise MissingValuesError(
            f"{count(len(lacking), 'tensor')} cannot be counted, since there are no values",
            where=checkpoint.source,
            found=listed(map(printable, lacking), 4),
            remedy="; ".join(remedies_for(lacking.values())) or "inspect without statistics, or load the model first",
            names=tuple(lacking),
        )
    expanded = UnsupportedTensorError(
        "expanded views have far more elements than are stored, and would take too long to count",
        remedy="leave the tensor out with only=[pattern, ...]",
    )
    check_expanded({spec.name: spec.stored for spec in specs}, expanded, checkpoint.source)


# Adding up.


class _Accumulator:
    """Adds up the chunks of one tensor. Any thread may add a chunk."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._lock = threading.Lock()
        self._elements = self._zeros = self._nan = self._infinite = 0
        self._least: list[float | int] = []
        self._greatest: list[float | int] = []
        self._moments: list[tuple[int, float, float]] = []
        """For each chunk the number of finite elements, their mean, and the sum of squared deviations from it."""

    def add(self, values: torch.Tensor) -> None:
        """Adds a chunk: a contiguous CPU tensor of one dimension."""
        elements = len(values)
        x = self._converted(values)
        zeros, nan, infinite = elements - int(torch.count_nonzero(x)), 0, 0
        limits: tuple[float | int, float | int] | None = None
        if x.is_complex():
            nan = int(torch.isnan(x).sum())
            infinite = elements - nan - int(torch.isfinite(x).sum())
            moments = (elements - nan - infinite, 0.0, 0.0)
        else:
            limits = _limits(x if values.dtype.is_floating_point or values.dtype is torch.bool else values)
            if not (math.isfinite(limits[0]) and math.isfinite(limits[1])):
                nan, finite = int(torch.isnan(x).sum()), x[torch.isfinite(x)]
                infinite, x = elements - nan - len(finite), finite
                limits = _limits(x) if len(x) else None
            moments = _moments(x)
        with self._lock:
            self._elements += elements
            self._zeros += zeros
            self._nan += nan
            self._infinite += infinite
            self._moments.append(moments)
            if limits is not None:
                self._least.append(limits[0])
                self._greatest.append(limits[1])

    def _converted(self, values: torch.Tensor) -> torch.Tensor:
        if self._dtype.is_complex:
            return values.to(torch.complex64) if self._dtype.itemsize == 4 else values
        is_small = self._dtype.itemsize <= (4 if self._dtype.is_floating_point else 2)
        to = torch.float32 if is_small else torch.float64
        return values if values.dtype == to else values.to(to)

    def result(self) -> Statistics:
        finite = sum(number for number, _, _ in self._moments)
        zeros = self._zeros / self._elements if self._elements else None
        if self._dtype.is_complex or not finite:
            return Statistics(self._elements, finite, None, None, None, None, zeros, self._nan, self._infinite)
        mean, squares = _combined(self._moments)
        least, greatest = min(self._least), max(self._greatest)
        std = math.sqrt(squares / finite)
        limits = least, greatest, if_finite(mean), if_finite(std)
        return Statistics(self._elements, finite, *limits, zeros, self._nan, self._infinite)


def _limits(values: torch.Tensor) -> tuple[float | int, float | int]:
    """The least and the greatest element; NaN where one is NaN."""
    if values.dtype in (torch.uint16, torch.uint32, torch.uint64):
        # torch has no order of these: with the first bit flipped, the order is that of the signed integers.
        signed = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])
        half = 1 << (values.itemsize * 8 - 1)
        least, greatest = (int(value) for value in torch.aminmax(signed ^ -half))
        return least + half, greatest + half
    limits = torch.aminmax(values)
    return limits.min.item(), limits.max.item()


def _moments(x: torch.Tensor) -> tuple[int, float, float]:
    if not len(x):
        return 0, 0.0, 0.0
    mean = float(x.sum()) / len(x)
    centred = torch.sub(x, mean, out=scratch("deviations", len(x), x.dtype))
    squares = float(torch.dot(centred, centred))
    if x.dtype is torch.float32 and not (math.isfinite(mean) and math.isfinite(squares) and squares > _TINY):
        return _moments(x.double())
    return len(x), mean, squares


def _combined(moments: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """The mean and the sum of squared deviations of several groups of elements."""
    total = sum(number for number, _, _ in moments)
    mean = exact_sum(number / total * mean for number, mean, _ in moments)
    # A power would raise where this product is infinite.
    squares = exact_sum(squares + number * (own - mean) * (own - mean) for number, own, squares in moments)
    return mean, squares


def merged(statistics: Iterable[Statistics]) -> Statistics:
    """The statistics of all elements of several tensors; of those that have any."""
    statistics = [*statistics]
    groups = [group for group in statistics if group.finite is not None]
    counted = [group for group in statistics if group.nan is not None]  # also those whose parts are counted only
    elements = sum(group.elements for group in groups)
    zeros = math.fsum(group.elements * (group.zeros or 0.0) for group in groups)
    filled = [group for group in groups if group.finite and group.min is not None]
    mean = std = None
    if filled:
        moments = []
        for group in filled:
            number = group.finite or 0
            own_mean, own_std = (math.nan if measure is None else measure for measure in (group.mean, group.std))
            moments.append((number, own_mean, number * own_std * own_std))
        exact_mean, squares = _combined(moments)
        mean = if_finite(exact_mean)
        std = if_finite(math.sqrt(squares / sum(number for number, _, _ in moments)))
    return Statistics(
        elements,
        sum(group.finite or 0 for group in groups) if groups else None,
        min((group.min for group in filled if group.min is not None), default=None),
        max((group.max for group in filled if group.max is not None), default=None),
        mean,
        std,
        zeros / elements if elements else None,
        sum(group.nan or 0 for group in counted) if counted else None,
        sum(group.infinite or 0 for group in counted) if counted else None,
    )


# The text.

_HEADS = ("name", "shape", "dtype", "size", "min", "max", "mean", "std", "zeros", "NaN", "infinite")


def _module(name: str, tensors: Sequence[TensorStatistics]) -> ModuleStatistics:
    # The elements of a tied tensor count once, unless it is the only one.
    counted = [tensor for tensor in tensors if tensor.bytes] or tensors
    statistics = merged(tensor.statistics for tensor in counted)
    if parts := [part.statistics for tensor in counted for part in tensor.parts]:
        below = merged(parts)
        statistics = replace(
            statistics,
            nan=(statistics.nan or 0) + (below.nan or 0),
            infinite=(statistics.infinite or 0) + (below.infinite or 0),
        )
    return ModuleStatistics(
        name,
        len(tensors),
        dict(Counter(tensor.dtype for tensor in tensors).most_common()),
        sum(tensor.bytes for tensor in tensors),
        statistics,
    )


def _folded(table: Iterable[tuple[ModuleStatistics, str]]) -> list[tuple[ModuleStatistics, str]]:
    """Joins the rows whose names differ in numbers only, and whose shapes and dtypes are equal."""
    groups: dict[object, list[tuple[ModuleStatistics, str]]] = {}
    for row, shape in table:
        dtypes = tuple(sorted(map(short, row.dtypes)))
        groups.setdefault((folded([row.name])[0], shape, dtypes), []).append((row, shape))
    joined = []
    for members in groups.values():
        rows, shape = [row for row, _ in members], members[0][1]
        if len(rows) == 1:
            joined.append((rows[0], shape))
            continue
        numbers: Counter[torch.dtype] = Counter()
        for row in rows:
            numbers.update(row.dtypes)
        whole = ModuleStatistics(
            f"{folded([rows[0].name])[0]} ({len(rows)} ×)",
            sum(row.tensors for row in rows),
            dict(numbers.most_common()),
            sum(row.bytes for row in rows),
            merged(row.statistics for row in ([row for row in rows if row.bytes] or rows)),
        )
        joined.append((whole, shape))
    return joined


def _row(row: ModuleStatistics, shape: str, name: str = "") -> tuple[str, ...]:
    found = row.statistics
    return (
        name or row.name,
        shape,
        ", ".join(map(short, row.dtypes)),
        size(row.bytes),
        *(f"{value:.4g}" if value is not None else "" for value in (found.min, found.max, found.mean, found.std)),
        f"{100 * found.zeros:.3g}%" if found.zeros is not None else "",
        f"{found.nan:,}" if found.nan else "",
        f"{found.infinite:,}" if found.infinite else "",
    )


def _tensor_json(tensor: TensorStatistics) -> dict[str, object]:
    fields: dict[str, object] = {"name": tensor.name, "shape": list(tensor.shape), "dtype": short(tensor.dtype)}
    return fields | {"kind": tensor.kind, "bytes": tensor.bytes} | _json(tensor.statistics)


def _json(statistics: Statistics) -> dict[str, object]:
    return {name: getattr(statistics, name) for name in statistics.__struct_fields__}
