"""Statistics of the tensors of a checkpoint: `modelstate.inspect(source).stats()`.

Values of at most 16 bits and float32 are added up in float32 within a chunk of 262,144 elements; wider integers and
float64 in float64. The chunks are combined with the mean and the sum of squared deviations of each, so that a large
mean does not cancel a small deviation. Minima and maxima are exact.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import NamedTuple

import msgspec
import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import is_selected, nothing_selected, patterns_of
from modelstate.checkpoint.reduction import (
    check_readable,
    exact_sum,
    if_finite,
    kind_of,
    operand_of,
    parts_of,
    read_dtype,
    reader_of,
    reduce,
    scratch,
)
from modelstate.html.page import Page, Shown
from modelstate.spec import bytes_key
from modelstate.text_format import columns, count, folded, folded_label, printable, seconds, size
from modelstate.torch_compat.dtypes import is_numeric, short

_TINY = 1e-20
"""A smaller sum of squared deviations is computed in float64."""


class Statistics(msgspec.Struct, frozen=True):
    """The statistics of some elements.

    A measure that does not apply is None, and so is one whose computation leaves the range of float64.

    Minimum, maximum, mean and standard deviation are those of the finite elements.
    """

    elements: int
    finite: int | None = None
    """The number of elements that are neither NaN nor infinite."""
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    std: float | None = None
    """The standard deviation of the elements themselves, not the estimate of one that they are a sample of."""
    zeros: float | None = None
    """The share of zeros among all elements, from 0 to 1."""
    nan: int | None = None
    infinite: int | None = None


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
    parts: tuple[TensorStatistics, ...] = ()
    """The plain tensors that a sparse or quantized one consists of, such as the payload and the scales."""


class CheckpointStatistics(Shown, msgspec.Struct, frozen=True):
    """The statistics of the tensors of a checkpoint. Returned by `Inspection.stats`.

    `print` shows a row for each tensor, folded where layers repeat.

    Examples:
        >>> stats = modelstate.inspect({"a.w": torch.tensor([0.0, 4.0]), "a.b": torch.ones(2)}).stats()
        >>> stats.tensors[0].statistics.mean, stats.tensors[0].statistics.max
        (2.0, 4.0)
    """

    source: str
    tensors: tuple[TensorStatistics, ...]
    """The tensors, in the order of the file."""
    read_bytes: int
    seconds: float

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.source!r}: {count(len(self.tensors), 'tensor')}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, *, fold: bool = True, width: int | None = None) -> str:
        """Returns what `print` shows.

        Args:
            fold: Whether rows whose names differ in numbers only, with equal shapes and dtypes, are one row.
            width: The most characters of a line; columns that do not fit are left out. None for any number.

        Examples:
            >>> print(modelstate.inspect({"w": torch.ones(2)}).stats().text(fold=False).splitlines()[0])
            mapping: 1 tensor, 8 B read
        """
        groups: dict[object, list[TensorStatistics]] = {}
        for entry in self._entries():
            pattern = folded([entry.name])[0] if fold else entry.name
            groups.setdefault((pattern, entry.shape, entry.dtype), []).append(entry)
        lines = [_HEADS, *map(_row, groups.values())]
        numbers = Counter(short(tensor.dtype) for tensor in self.tensors)
        dtypes = ", ".join(f"{dtype} ({number:,})" for dtype, number in numbers.most_common())
        tensors = f"{count(len(self.tensors), 'tensor')}, {size(self.read_bytes)} read"
        heading = f"{printable(self.source)}: {tensors}, {seconds(self.seconds)}\ndtypes: {dtypes}\n\n"
        return heading + columns(lines, right=range(3, 11), width=width, optional=(1, 2, 6, 7, 10, 9))

    def _entries(self) -> list[TensorStatistics]:
        return [entry for tensor in self.tensors for entry in (tensor, *tensor.parts)]

    def _page(self) -> Page:
        measures = ("Min", "Max", "Mean", "Std", "Zeros", "NaN", "Infinite")
        return Page(
            f"Statistics of {self.source}",
            (("Tensors", f"{len(self.tensors):,}"), ("Read", size(self.read_bytes)), ("Time", seconds(self.seconds))),
            ("Name", "Shape", "Dtype", "Bytes", *measures),
            [
                [entry.name, str(list(entry.shape)), short(entry.dtype)]
                + [None if entry.parts else entry.bytes]  # the bytes of a tensor with parts are those of its parts
                + [getattr(entry.statistics, measure.lower()) for measure in measures]
                for entry in self._entries()
            ],
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
                    "nan": sum(entry.statistics.nan or 0 for entry in self._entries()),
                    "infinite": sum(entry.statistics.infinite or 0 for entry in self._entries()),
                    "read_bytes": self.read_bytes,
                    "seconds": self.seconds,
                },
            },
            indent=1,
        )


def statistics_of(checkpoint: Checkpoint, *, only: Iterable[str], progress: bool | None) -> CheckpointStatistics:
    """Implements `Inspection.stats`."""
    begin = perf_counter()
    patterns = patterns_of("only", only)
    specs = [spec for spec in checkpoint.specs() if is_selected(spec.name, patterns)]
    if patterns and not specs:
        raise nothing_selected(patterns, checkpoint, checkpoint.source)
    check_readable(
        ((spec.name, spec.stored) for spec in specs),
        where=checkpoint.source,
        remedy="inspect without statistics, or load the model first",
    )
    parts = [(spec, label, stored) for spec in specs for label, stored in parts_of(spec.stored).items()]
    keys = [bytes_key(stored, f"{spec.name}.{label}") for spec, label, stored in parts]
    plain = {
        key: stored
        for key, (_, _, stored) in zip(keys, parts, strict=True)
        if kind_of(stored) == "strided" and is_numeric(read_dtype(stored.dtype))
    }
    chunks: list[list[_Chunk]] = [[] for _ in plain]

    def fold(item: int, values: tuple[torch.Tensor, ...]) -> None:
        chunks[item].append(_measured(values[0]))

    read_bytes = reduce(
        [(operand_of(stored, reader_of(checkpoint)),) for stored in plain.values()],
        fold,
        fingerprints=checkpoint.fingerprints,
        progress=progress,
        what="reading",
    )
    measured = dict(zip(plain, map(_combined, chunks), strict=True))
    firsts = {bytes_key(spec.stored, spec.name): spec.name for spec in reversed(specs)}
    members: dict[str, list[TensorStatistics]] = {spec.name: [] for spec in specs}
    for (spec, label, stored), key in zip(parts, keys, strict=True):
        shape, name = tuple(stored.shape), f"{spec.name}, {label}" if label else spec.name
        is_tied = firsts[bytes_key(spec.stored, spec.name)] != spec.name
        nbytes = 0 if is_tied else math.prod(shape) * stored.dtype.itemsize
        statistics = measured.get(key) or Statistics(math.prod(shape))
        members[spec.name].append(TensorStatistics(name, shape, stored.dtype, "strided", nbytes, statistics))
    tensors: list[TensorStatistics] = []
    for spec in specs:
        own = members[spec.name]
        if (kind := kind_of(spec.stored)) != "strided":
            nbytes, whole = sum(member.bytes for member in own), Statistics(math.prod(spec.shape))
            own = [TensorStatistics(spec.name, spec.shape, spec.dtype, kind, nbytes, whole, tuple(own))]
        tensors += own
    label = checkpoint.source + (f", key {checkpoint.key!r}" if checkpoint.key else "")
    return CheckpointStatistics(label, tuple(tensors), read_bytes, perf_counter() - begin)


# Adding up.


class _Chunk(NamedTuple):
    """What is known of a chunk of a tensor."""

    elements: int
    zeros: int
    nan: int
    infinite: int
    limits: tuple[float | int, ...]
    """The least and the greatest finite element; empty where there is none, or the elements have no order."""
    finite: int
    mean: float
    """Of the finite elements."""
    squares: float
    """The sum of squared deviations from the mean."""


def _measured(values: torch.Tensor) -> _Chunk:
    """Measures a chunk: a contiguous CPU tensor of one dimension."""
    dtype, count = values.dtype, len(values)
    if dtype.is_complex:
        x = values.to(torch.complex64) if dtype.itemsize == 4 else values
    else:
        is_small = dtype.itemsize <= (4 if dtype.is_floating_point else 2)
        x = values.to(torch.float32 if is_small else torch.float64)
    zeros, nan, infinite = count - int(torch.count_nonzero(x)), 0, 0
    limits: tuple[float | int, ...] = ()
    if not x.is_complex():
        limits = _limits(values if not dtype.is_floating_point and dtype is not torch.bool else x)
    if not limits or not all(map(math.isfinite, limits)):
        nan, finite = int(torch.isnan(x).sum()), x[torch.isfinite(x)]
        infinite, x = count - nan - len(finite), finite
        limits = _limits(x) if len(x) and not x.is_complex() else ()
    return _Chunk(count, zeros, nan, infinite, limits, len(x), *(_moments(x) if limits else (0.0, 0.0)))


def _combined(chunks: Sequence[_Chunk]) -> Statistics:
    elements, finite = sum(chunk.elements for chunk in chunks), sum(chunk.finite for chunk in chunks)
    nan, infinite = sum(chunk.nan for chunk in chunks), sum(chunk.infinite for chunk in chunks)
    share = sum(chunk.zeros for chunk in chunks) / elements if elements else None
    limits = [limit for chunk in chunks for limit in chunk.limits]
    if not limits:
        return Statistics(elements, finite, zeros=share, nan=nan, infinite=infinite)
    mean = exact_sum(chunk.finite / finite * chunk.mean for chunk in chunks)
    # A power would raise where this product is infinite.
    squares = exact_sum(chunk.squares + chunk.finite * (chunk.mean - mean) * (chunk.mean - mean) for chunk in chunks)
    std = if_finite(math.sqrt(squares / finite))
    return Statistics(elements, finite, min(limits), max(limits), if_finite(mean), std, share, nan, infinite)


def _limits(values: torch.Tensor) -> tuple[float | int, float | int]:
    """Returns the least and the greatest element; NaN where one is NaN."""
    if values.dtype in (torch.uint16, torch.uint32, torch.uint64):
        array = values.numpy()  # torch has no order of these
        return int(array.min()), int(array.max())
    limits = torch.aminmax(values)
    return limits.min.item(), limits.max.item()


def _moments(x: torch.Tensor) -> tuple[float, float]:
    """Returns the mean, and the sum of squared deviations from it."""
    mean = float(x.sum()) / len(x)
    centred = torch.sub(x, mean, out=scratch("deviations", len(x), x.dtype))
    squares = float(torch.dot(centred, centred))
    if x.dtype is torch.float32 and not (math.isfinite(mean) and math.isfinite(squares) and squares > _TINY):
        return _moments(x.double())
    return mean, squares


# The text.

_HEADS = ("name", "shape", "dtype", "size", "min", "max", "mean", "std", "zeros", "NaN", "infinite")


def _row(group: list[TensorStatistics]) -> tuple[str, ...]:
    """Returns the row of tensors whose names differ in numbers only: their limits, and the sums of their counts."""
    first, found = group[0], [entry.statistics for entry in group]
    limits = (
        min((each.min for each in found if each.min is not None), default=None),
        max((each.max for each in found if each.max is not None), default=None),
        *((first.statistics.mean, first.statistics.std) if len(group) == 1 else (None, None)),
    )
    shares = [each.zeros for each in found if each.zeros is not None]
    counts = (sum(each.nan or 0 for each in found), sum(each.infinite or 0 for each in found))
    return (
        folded_label([entry.name for entry in group]),
        str(list(first.shape)),
        short(first.dtype),
        size(sum(entry.bytes for entry in group)),
        *(f"{value:.4g}" if value is not None else "" for value in limits),
        f"{100 * sum(shares) / len(shares):.3g}%" if shares else "",
        *(f"{number:,}" if number else "" for number in counts),
    )


def _tensor_json(tensor: TensorStatistics) -> dict[str, object]:
    fields: dict[str, object] = {"name": tensor.name, "shape": list(tensor.shape), "dtype": short(tensor.dtype)}
    return fields | {"kind": tensor.kind, "bytes": tensor.bytes} | msgspec.structs.asdict(tensor.statistics)
