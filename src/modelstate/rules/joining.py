"""Rules between one tensor and several: split, concatenate, multiply, fold a weight norm, multiply by scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import msgspec
import torch

from modelstate.errors import RuleError
from modelstate.rules.expression import Derived, Scaling, Source, cast, concatenated, narrowed, reshaped
from modelstate.rules.rule import (
    Entry,
    EntryRule,
    NamedEntry,
    PatternRule,
    Rule,
    RuleContext,
    check_sizes,
    irreversible,
    same_stars,
    template,
)
from modelstate.text_format import short_repr
from modelstate.torch_compat.private import weight_norm

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""The dtypes of weights of 8 bits with an exponent."""
SCALABLE = (*FLOAT8, torch.int8)
"""The dtypes of weights that `Dequantize` multiplies by scales."""


class Split(EntryRule, msgspec.Struct, frozen=True):
    """Cuts a tensor into several along one dimension: a fused QKV into three. Reads only the parts that are used.

    Args:
        pattern: A name in which each `*` matches any run of characters.
        into: The names of the parts, each with as many `*`.
        dim: The dimension to cut.
        sizes: The sizes of the parts in that dimension; equal by default.

    Raises:
        RuleError: The names have different numbers of `*`, or there are more or fewer sizes than parts.

    Examples:
        >>> ms.load(model, "fused.pt", rules=ms.rules.Split("*.qkv.*", ["*.q.*", "*.k.*", "*.v.*"]))
    """

    pattern: str
    into: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _set_names(self, "into", self.into)
        same_stars(self.pattern, *self.into)
        _set_sizes(self, len(self.into))

    def rename(self, name: str) -> str | None:
        parts = template(self.pattern).match(name)
        return None if parts is None else template(self.into[0]).fill(parts)

    def apply_to(self, context: RuleContext, name: str, entry: Entry, parts: tuple[str, ...]) -> None:
        if entry.tensor is None or entry.why_not_plain:
            return context.fail(name, entry.why_not_plain)
        shape = tuple(entry.tensor.shape)
        if why := self._why_not(shape):
            return context.fail(name, why)
        start = 0
        sizes = self.sizes or (shape[self.dim] // len(self.into),) * len(self.into)
        for target, size in zip(self.into, sizes, strict=True):
            part = narrowed(entry.tensor, self.dim, start, size)
            context.make(template(target).fill(parts), part, [(name, entry)])
            start += size
        return None

    def _why_not(self, shape: tuple[int, ...]) -> str:
        """Returns why a tensor of this shape cannot be split; empty if it can."""
        if not -len(shape) <= self.dim < len(shape):
            return f"it has no dimension {self.dim}: its shape is {list(shape)}"
        size = shape[self.dim]
        if self.sizes is not None and sum(self.sizes) != size:
            return f"the sizes add up to {sum(self.sizes)}, and dimension {self.dim} of {list(shape)} has {size}"
        if self.sizes is None and size % len(self.into):
            return f"{size} cannot be cut into {len(self.into)} parts of one size: give sizes="
        return ""

    def reverse(self) -> Concat:
        return Concat(self.into, self.pattern, self.dim, self.sizes)


class _JoiningRule(PatternRule):
    """A rule that makes one tensor of several, whose names its patterns match. A subclass defines `join`."""

    keeps_incomplete = False
    """Whether entries whose counterparts are not in the checkpoint stay as they are. For others they are a problem."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """The names of the parts."""
        raise NotImplementedError

    @property
    def into(self) -> str:
        """The name of the result."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        _set_names(self, "patterns", self.patterns)
        same_stars(self.into, *self.patterns)

    def rename(self, name: str) -> str | None:
        match = self._match(name)
        return None if match is None else match[1]

    def _match(self, name: str) -> tuple[int, str] | None:
        """Returns the index of the pattern that matches a name, and the name of the result."""
        for index, pattern in enumerate(self.patterns):
            parts = template(pattern).match(name)
            if parts is not None:
                return index, template(self.into).fill(parts)
        return None

    def apply(self, context: RuleContext) -> None:
        groups: dict[str, list[NamedEntry | None]] = {}
        for name in context.names_for(self):
            if (match := self._match(name)) is not None:
                index, target = match
                group = groups.setdefault(target, [None] * len(self.patterns))
                if (other := group[index]) is not None:  # two names whose wildcards are filled in to one name
                    context.fail(target, f"{other[0]} and {name} are both its part {self.patterns[index]}")
                group[index] = name, context.entries[name]
        for target, group in groups.items():
            if not (self.keeps_incomplete and None in group):
                self._join_entries(context, target, group)

    def _join_entries(self, context: RuleContext, target: str, group: Sequence[NamedEntry | None]) -> None:
        present = [part for part in group if part is not None]
        for name, _ in present:
            context.leave_out(name)
        if len(present) < len(group):
            absent = ", ".join(pattern for pattern, part in zip(self.patterns, group, strict=True) if part is None)
            names = ", ".join(name for name, _ in present)
            return context.fail(target, f"there is {names}, and nothing like {absent}")
        for name, entry in present:
            if entry.why_not_plain:
                return context.fail(name, entry.why_not_plain)
        try:
            result = self.join([entry.tensor for _, entry in present if entry.tensor is not None])
        except ValueError as error:
            return context.fail(target, str(error))
        return context.make(target, result, present)

    def join(self, tensors: Sequence[Source]) -> Source:
        """Returns the result. Raises `ValueError` that says why the tensors cannot be joined."""
        raise NotImplementedError


class Concat(_JoiningRule, msgspec.Struct, frozen=True):
    """Joins several tensors into one along one dimension: separate Q, K and V into a fused QKV.

    Args:
        patterns: The names of the parts, in which each `*` matches any run of characters.
        into: The name of the result, with as many `*`.
        dim: The dimension to join.
        sizes: The sizes of the parts in that dimension, which are checked; equal by default.

    Raises:
        RuleError: The names have different numbers of `*`, or there are more or fewer sizes than parts.

    Examples:
        >>> ms.load(model, "separate.pt", rules=ms.rules.Concat(["*.q.*", "*.k.*", "*.v.*"], "*.qkv.*"))
    """

    patterns: tuple[str, ...]
    into: str
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_sizes(self, len(self.patterns))

    def join(self, tensors: Sequence[Source]) -> Source:
        shapes = [list(tensor.shape) for tensor in tensors]
        if not all(-len(shape) <= self.dim < len(shape) for shape in shapes):
            raise ValueError(f"there is no dimension {self.dim} in the shapes {shapes}")
        sizes = [shape[self.dim] for shape in shapes]
        expected = list(self.sizes) if self.sizes is not None else sizes[:1] * len(sizes)
        if sizes != expected:
            raise ValueError(f"the parts have the sizes {sizes}, not {expected}: give sizes=")
        return concatenated(tensors, self.dim)

    def reverse(self) -> Split:
        return Split(self.into, self.patterns, self.dim, self.sizes)


class _FoldingRule(_JoiningRule, msgspec.Struct, frozen=True):
    """A rule that computes one tensor from the values of two."""

    patterns: tuple[str, ...]
    into: str
    moves: ClassVar[bool] = False
    """It does more than moving elements, so it is not applied to the state of an optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.patterns) != 2:
            raise RuleError("patterns= must be two names", where=type(self).__name__, found=short_repr(self.patterns))

    def reverse(self) -> Rule:
        raise irreversible(self, "the two tensors cannot be computed from the result")


class Multiply(_FoldingRule, frozen=True):
    """Multiplies two tensors of one shape, element by element, in the dtype of the first: a weight and its mask.

    The result is that of `torch.nn.utils.prune.remove`, bit for bit.

    Args:
        patterns: The names of the tensor and of the factor, in which each `*` matches any run of characters.
        into: The name of the result, with as many `*`.

    Raises:
        RuleError: The names have different numbers of `*`, or they are not two.

    Examples:
        >>> rule = ms.rules.Multiply(["*.weight_orig", "*.weight_mask"], "*.weight")
        >>> ms.load(model, "pruned.pt", rules=rule)
    """

    def join(self, tensors: Sequence[Source]) -> Source:
        tensor, factor = tensors
        if tuple(tensor.shape) != tuple(factor.shape):
            raise ValueError(f"the shapes {list(tensor.shape)} and {list(factor.shape)} differ")
        return Derived(tensor.dtype, tuple(tensor.shape), (tensor, factor), lambda a, b: b.to(a.dtype) * a)


class WeightNorm(_FoldingRule, frozen=True):
    """Computes the weight of a module with weight norm from its magnitude and its direction.

    The result is that of `torch.nn.utils.remove_weight_norm`, bit for bit. The shape of the magnitude says which
    dimension has a norm for each index.

    Args:
        patterns: The names of the magnitude and of the direction, in which each `*` matches any run of characters.
        into: The name of the weight, with as many `*`.

    Raises:
        RuleError: The names have different numbers of `*`, or they are not two.

    Examples:
        >>> rule = ms.rules.WeightNorm(["*.weight_g", "*.weight_v"], "*.weight")
        >>> ms.load(model, "weight_norm.pt", rules=rule)
    """

    def join(self, tensors: Sequence[Source]) -> Source:
        magnitude, direction = tensors
        sizes, shape = tuple(magnitude.shape), tuple(direction.shape)
        norms = {(): -1} | {
            (*(1,) * dim, size, *(1,) * (len(shape) - dim - 1)): dim for dim, size in reversed([*enumerate(shape)])
        }
        if sizes not in norms:
            raise ValueError(f"no weight norm has the shapes {list(sizes)} and {list(shape)}")
        if magnitude.dtype != direction.dtype or not direction.dtype.is_floating_point or direction.dtype.itemsize < 2:
            raise ValueError(f"no weight norm has the dtypes {magnitude.dtype} and {direction.dtype}")
        return Derived(direction.dtype, shape, (direction, magnitude), partial(weight_norm, dim=norms[sizes]))


class Dequantize(_JoiningRule, msgspec.Struct, frozen=True):
    """Multiplies quantized weights by their scales: float8, or int8 without zero points.

    The result is float32, computed in float32. A load casts it to the dtype of the model.

    Args:
        pattern: The names of the weights, in which each `*` matches any run of characters. A weight without a scale in
            the checkpoint, such as that of a norm, stays as it is.
        scale: The names of the scales, with as many `*`. A scale is a number for the whole weight, or a tensor with the
            dimensions of the weight, each of size 1 or of the size of the weight. Dimensions that it lacks at the end
            have size 1: a vector has a scale for each row. A scale that is used is left out of the result.
        block: The sizes of the blocks in the last dimensions that have one scale each. Blocks at the end of a dimension
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
    keeps_incomplete = True

    def __post_init__(self) -> None:
        same_stars(self.pattern, self.scale)
        if self.block is not None:
            msgspec.structs.force_setattr(self, "block", check_sizes(self, "block", self.block, least=1))

    @property
    def patterns(self) -> tuple[str, ...]:
        # The scale is first: its name may match the pattern of the weights, too.
        return (self.scale, self.pattern)

    @property
    def into(self) -> str:
        return self.pattern

    def rename(self, name: str) -> str | None:
        return None if template(self.pattern).match(name) is None else name

    def join(self, tensors: Sequence[Source]) -> Source:
        scale, weight = tensors
        return dequantized(weight, scale, self.block)

    def reverse(self) -> Rule:
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
    scales = cast(reshaped(scale, sizes), torch.float32)
    return Scaling(blocks, (0,) * len(shape)).of(cast(weight, torch.float32), scales)


def _set_names(rule: PatternRule, argument: str, names: object) -> None:
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise RuleError(f"{argument}= takes several names", where=type(rule).__name__, found=short_repr(names))
    if len(set(names)) != len(names):
        raise RuleError(f"{argument}= has a name twice", where=type(rule).__name__, found=short_repr(names))
    msgspec.structs.force_setattr(rule, argument, tuple(names))  # type: ignore[arg-type]


def _set_sizes(rule: Split | Concat, count: int) -> None:
    if not isinstance(rule.dim, int):
        raise RuleError("dim= must be an integer", where=rule, found=short_repr(rule.dim))
    if rule.sizes is None:
        return
    sizes = check_sizes(rule, "sizes", rule.sizes, least=0)
    if len(sizes) != count:
        raise RuleError("sizes= takes one size for each part", where=type(rule).__name__, expected=count, found=sizes)
    msgspec.structs.force_setattr(rule, "sizes", sizes)
