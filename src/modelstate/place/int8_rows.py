"""Rows of weights as int8 with a scale each, computed where they lie."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_HIGHEST, _LOWEST = 127, -128
_STEPS = (_HIGHEST - _LOWEST) / 2
_LEAST_SCALE = torch.finfo(torch.float32).eps
_MOST_COLUMNS = 1 << 16
"""Of which a sample is taken: 2 MB of it, and torchao's copies of them."""
_PARTS = {"qdata", "scale"}
_CONSTANT = "zero_point"


class Int8Rows:
    """What torchao makes of float32 rows, without its copies of them, which take most of the time.

    The operations are those of torchao's symmetric quantization, in its order, but write to the rows themselves.
    """

    def __init__(self, like: Any) -> None:
        """`like` is what torchao made of some rows."""
        self.like: torch.Tensor = like
        names, self._context = like.__tensor_flatten__()
        self._class: Any = type(like.data)
        self._parts = {name: getattr(like, name) for name in names}
        self._needs_grad: bool = like.requires_grad

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows that are overwritten."""
        parts = {
            name: torch.empty((len(rows), *part.shape[1:]), dtype=part.dtype, device="cpu")
            for name, part in self._parts.items()
        }
        self.write(rows, parts)
        made = self._class.__tensor_unflatten__(parts, self._context, rows.shape, rows.stride())
        return nn.Parameter(made, requires_grad=self._needs_grad)

    def write(self, rows: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """The same, to where its parts belong."""
        # Few operations: where several threads compute, each of them waits its turn for the interpreter.
        largest = torch.maximum(rows.amin(1, keepdim=True).neg_(), rows.amax(1, keepdim=True))
        scale = torch.clamp(largest.div_(_STEPS), min=_LEAST_SCALE, out=parts["scale"])
        parts["qdata"].copy_(rows.mul_(scale.reciprocal()).round_().clamp_(_LOWEST, _HIGHEST))
        if _CONSTANT in parts:
            parts[_CONSTANT].copy_(self._parts[_CONSTANT][:1])


def int8_rows(torchao: Callable[[torch.Tensor], torch.Tensor], columns: int) -> Int8Rows | None:
    """What makes of float32 rows of so many columns what `torchao` does.

    Both are compared on a sample, bit for bit: None where they differ.
    """
    if columns > _MOST_COLUMNS:
        return None
    sample = _sample(columns)
    try:
        expected: Any = torchao(sample.clone())
    except Exception:  # of a shape, for example, that torchao cannot take: whatever it is, it will say it again
        return None
    flatten = getattr(expected, "__tensor_flatten__", None)
    if flatten is None or not _PARTS <= set(flatten()[0]) <= {*_PARTS, _CONSTANT}:
        return None
    names, context = flatten()
    if expected.scale.shape != (len(sample), 1):  # several for each row
        return None
    made = Int8Rows(expected)
    found: Any = made(sample.clone())
    same = all(_same(getattr(found, name), getattr(expected, name)) for name in names)
    return made if same and repr(found.__tensor_flatten__()[1]) == repr(context) else None


def _sample(columns: int) -> torch.Tensor:
    """Rows of both signs, of one, of none, and of very large and very small numbers."""
    like: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the caller's defaults are
    waves = torch.arange(8 * columns, **like).mul(0.7).sin().view(8, columns)
    factors = torch.tensor([1.0, 0.02, 3e-8, 1e-38, 1e30, 1.0, 1.0, 0.0], **like).view(8, 1)
    rows = waves * factors
    rows[5].abs_()
    rows[6].abs_().neg_()
    return rows


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
