"""`Dequantize`: multiplies quantized weights by their scales."""

import math
from collections.abc import Sequence

import msgspec
import torch

from modelstate.rules.expression import Derived, Scaling, Source, cast, reshaped
from modelstate.rules.rule import (
    NamedEntry,
    PatternRule,
    RuleContext,
    check_sizes,
    irreversible,
    matching,
    same_stars,
    template,
)

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""The dtypes of weights of 8 bits with an exponent."""
SCALABLE = (*FLOAT8, torch.int8)
"""The dtypes of weights that `Dequantize` multiplies by scales."""


class Dequantize(PatternRule, msgspec.Struct, frozen=True):
    """Multiplies quantized weights by their scales: float8, or int8 without zero points.

    The result is float32, computed in float32. A load casts it to the dtype of the model.

    Args:
        pattern: the names of the weights, in which each `*` matches any run of characters. A weight without a scale in
            the checkpoint, such as that of a norm, stays as it is.
        scale: the names of the scales, with as many `*`. A scale is a number for the whole weight, or a tensor with the
            dimensions of the weight, each of size 1 or of the size of the weight. Dimensions that it lacks at the end
            have size 1: a vector has a scale for each row. A scale that is used is left out of the result.
        block: the sizes of the blocks in the last dimensions that have one scale each. Blocks at the end of a dimension
            may be smaller.

    The rule cannot be reversed.

    Raises:
        RuleError: The two names have different numbers of `*`, or `block` is not a sequence of sizes.

    Examples:
        >>> ms.load(model, "fp8.safetensors", rules=ms.rules.Dequantize("*.weight", scale="*.weight_scale"))
        >>> blocks = ms.rules.Dequantize("*.weight", scale="*.weight_scale_inv", block=[128, 128])
    """

    pattern: str
    scale: str
    block: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        same_stars(self.pattern, self.scale)
        if self.block is not None:
            msgspec.structs.force_setattr(self, "block", check_sizes(self, "block", self.block, least=1))

    def _read_patterns(self) -> tuple[str, ...]:
        return (self.pattern, self.scale)

    def rename(self, name: str) -> str | None:
        return None if template(self.pattern).match(name) is None else name

    def apply(self, context: RuleContext) -> None:
        scale_of: dict[str, str] = {}
        for name, _, parts in matching(self.pattern, context.entries):
            scale = "" if parts is None else template(self.scale).fill(parts)
            if scale in context.entries and scale != name:
                scale_of[name] = scale
        used = {*scale_of.values()}
        for name, entry in context.entries.items():
            if name in scale_of:
                scale = scale_of[name]
                self._multiply(context, (name, entry), (scale, context.entries[scale]))
            elif name not in used:
                context.keep(name, entry)

    def _multiply(self, context: RuleContext, weight: NamedEntry, scale: NamedEntry) -> None:
        tensors: list[Source] = []
        for name, entry in (weight, scale):
            if entry.tensor is None or entry.why_not_plain:
                return context.fail(name, entry.why_not_plain)
            tensors.append(entry.tensor)
        try:
            result = dequantized(tensors[0], tensors[1], self.block)
        except ValueError as error:
            return context.fail(weight[0], f"{error}; its scale is {scale[0]}")
        return context.make(weight[0], result, [weight, scale])

    def reverse(self) -> "Dequantize":
        raise irreversible(self, "the scales are lost")


def dequantized(weight: Source, scale: Source, block: Sequence[int] | None = None) -> Derived:
    """Returns the float32 product of a weight and its scales. Raises `ValueError` where they do not fit."""
    shape, sizes = tuple(weight.shape), tuple(scale.shape)
    if weight.dtype not in SCALABLE:
        raise ValueError(f"it is {weight.dtype}, not float8 or int8")
    if not scale.dtype.is_floating_point:
        raise ValueError(f"the scales are {scale.dtype}, not floating-point numbers")
    sizes += (1,) * (len(shape) - len(sizes))
    if math.prod(sizes) == 1:
        sizes, blocks = (1,) * len(shape), shape
    elif block is None:
        blocks = tuple(1 if count == size else size for count, size in zip(sizes, shape, strict=False))
    else:
        blocks = (*(1,) * (len(shape) - len(block)), *block)
    needed = tuple(-(-size // max(of, 1)) for size, of in zip(shape, blocks, strict=False))
    if sizes != needed or len(blocks) != len(shape):
        hint = "block= says how many elements have one scale" if block is None else f"block={list(block)} does not fit"
        raise ValueError(f"its shape is {list(shape)}, and that of the scales {list(scale.shape)}: {hint}")
    parts = (cast(weight, torch.float32), cast(reshaped(scale, sizes), torch.float32))
    return Derived(torch.float32, shape, parts, Scaling(blocks, (0,) * len(shape)))
