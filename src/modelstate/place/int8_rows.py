"""Rows of weights as int8 with a scale each, computed where they lie."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Change = Callable[[torch.Tensor], torch.Tensor]
_HIGHEST, _LOWEST = 127, -128


def int8_rows(torchao: Change, columns: int) -> Change | None:
    """What `torchao` makes of float32 rows of so many columns, without its copies of them, which take most of the time.

    The operations are those of torchao's symmetric quantization, in its order, but write to the rows themselves. Both
    are compared on a sample, bit for bit: None where they differ.
    """
    sample = _sample(columns)
    try:
        expected: Any = torchao(sample.clone())
    except Exception:  # of a shape, for example, that torchao cannot take: whatever it is, it will say it again
        return None
    flatten = getattr(expected, "__tensor_flatten__", None)
    if flatten is None or not {"qdata", "scale"} <= set(flatten()[0]) <= {"qdata", "scale", "zero_point"}:
        return None
    names, context = flatten()
    zero_point = expected.zero_point[:1].clone() if "zero_point" in names else None
    cls: Any = type(expected.data)

    def change(rows: torch.Tensor) -> torch.Tensor:
        scale, data = _quantized(rows)
        parts = {"qdata": data, "scale": scale}
        if zero_point is not None:
            parts["zero_point"] = zero_point.repeat(len(rows), 1)
        made = cls.__tensor_unflatten__(parts, context, rows.shape, rows.stride())
        return nn.Parameter(made, requires_grad=expected.requires_grad)

    found: Any = change(sample.clone())
    same = all(_same(getattr(found, name), getattr(expected, name)) for name in names)
    return change if same and repr(found.__tensor_flatten__()[1]) == repr(context) else None


def _quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    zero = torch.zeros_like(low)
    largest = torch.max(-torch.min(low, zero), torch.max(high, zero))
    scale = torch.clamp(largest / ((_HIGHEST - _LOWEST) / 2), min=torch.finfo(torch.float32).eps)
    return scale, rows.mul_(1.0 / scale).round_().clamp_(_LOWEST, _HIGHEST).to(torch.int8)


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
