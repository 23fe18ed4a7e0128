"""Rules that change tensors: transpose, reshape, cast, apply a function, split, concatenate, multiply."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import msgspec
import torch

from modelstate.errors import RuleError, TransformError, keep_interrupt
from modelstate.io.memory import empty_cpu
from modelstate.problems import one_line
from modelstate.rules.expression import (
    Derived,
    Source,
    cast,
    concatenated,
    meta_like,
    multiplied,
    region,
    reshaped,
    transposed,
)
from modelstate.rules.rule import (
    Entry,
    NamedEntry,
    PatternRule,
    Rule,
    RuleContext,
    Template,
    Value,
    check_sizes,
    describe,
    irreversible,
    matching,
    same_stars,
    template,
)
from modelstate.text_format import short_repr
from modelstate.torch_compat.dtypes import cast_between, dtype_named
from modelstate.torch_compat.plain import is_plain_memory
from modelstate.torch_compat.private import weight_norm


class _TensorRule(PatternRule):
    """A rule that changes each tensor whose name matches, and keeps its name.

    A subclass defines either `change`, or `apply_to` where `change` needs more than the tensor.
    """

    pattern: str

    def __post_init__(self) -> None:
        Template(self.pattern)

    def rename(self, name: str) -> str | None:
        return None if template(self.pattern).match(name) is None else name

    def apply(self, context: RuleContext) -> None:
        for name, entry, parts in matching(self.pattern, context.entries):
            if parts is None:
                context.keep(name, entry)
            else:
                self.apply_to(context, name, entry)

    def apply_to(self, context: RuleContext, name: str, entry: Entry) -> None:
        context.make_tensor(name, (name, entry), self.change)

    def change(self, source: Source) -> Source:
        raise NotImplementedError


class Transpose(_TensorRule, msgspec.Struct, frozen=True):
    """Exchanges two dimensions: the weight of a Conv1D becomes that of a Linear.

    Args:
        pattern: a name in which each `*` matches any run of characters.
        dim0: the first dimension.
        dim1: the second dimension.

    Examples:
        >>> ms.load(model, "gpt2.safetensors", rules=ms.rules.Transpose("h.*.attn.c_attn.weight"))
    """

    pattern: str
    dim0: int = 0
    dim1: int = 1

    def change(self, source: Source) -> Source:
        return transposed(source, self.dim0, self.dim1)

    def reverse(self) -> "Transpose":
        return self


class Reshape(_TensorRule, msgspec.Struct, frozen=True):
    """Gives tensors another shape, with their elements in the same order.

    Args:
        pattern: a name in which each `*` matches any run of characters.
        shape: the new shape; one size can be -1.
        before: the shape before, which is checked. A rule without it cannot be reversed.

    Raises:
        RuleError: `shape` or `before` is not a sequence of sizes.

    Examples:
        >>> ms.load(model, "old.pt", rules=ms.rules.Reshape("pos_embed", [196, 768], before=[1, 196, 768]))
    """

    pattern: str
    shape: tuple[int, ...]
    before: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shape", "before"):
            sizes = getattr(self, name)
            if sizes is not None:
                msgspec.structs.force_setattr(self, name, check_sizes(self, name, sizes, least=-1))

    def change(self, source: Source) -> Source:
        if self.before is not None and meta_like(source).reshape(self.before).shape != source.shape:
            raise ValueError(f"its shape is {list(source.shape)}, not {list(self.before)}")
        return reshaped(source, self.shape)

    def reverse(self) -> "Reshape":
        if self.before is None:
            raise irreversible(self, "it does not say what the shape was: before=")
        return Reshape(self.pattern, self.before, self.shape)


class Cast(_TensorRule, msgspec.Struct, frozen=True):
    """Casts tensors to a dtype, including one that loses values.

    Args:
        pattern: a name in which each `*` matches any run of characters.
        dtype: a dtype of torch, or its name: `torch.bfloat16`, "bfloat16" or "bf16".
        before: the dtype before, which is checked. A rule without it, or one that loses values, cannot be reversed.

    Raises:
        RuleError: `dtype` or `before` is not a dtype.

    Examples:
        >>> ms.load(model, "fp32.pt", rules=ms.rules.Cast("*", torch.bfloat16))
    """

    pattern: str
    dtype: torch.dtype
    before: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dtype", "before"):
            dtype: object = getattr(self, name)
            if isinstance(dtype, str):
                msgspec.structs.force_setattr(self, name, dtype_named(dtype) or dtype)
            if not isinstance(getattr(self, name), torch.dtype) and (dtype is not None or name == "dtype"):
                raise RuleError("a Cast takes dtypes", where=self, found=short_repr(dtype))

    def change(self, source: Source) -> Source:
        if self.before is not None and source.dtype != self.before:
            raise ValueError(f"its dtype is {source.dtype}, not {self.before}")
        return cast(source, self.dtype)

    def reverse(self) -> "Cast":
        if self.before is None:
            raise irreversible(self, "it does not say what the dtype was: before=")
        if cast_between(self.before, self.dtype) in ("lossy", "kind"):
            raise irreversible(self, "the cast loses values")
        return Cast(self.pattern, self.before, self.dtype)


class Apply(_TensorRule, msgspec.Struct, frozen=True):
    """Replaces what matches `pattern` by the result of a function, for changes that no other rule makes.

    Args:
        pattern: a name in which each `*` matches any run of characters.
        fn: called with a tensor on the meta device first, to learn shape and dtype of its result; if it raises, with
            the values, which are then read twice. Later it is called with the values, as a copy that it may change.
            For extra state it is called with a copy of the value.
        inverse: the function of the way back. A rule without it cannot be reversed.
        moves: declares that `fn` only moves elements, so that the per-element state of an optimizer can be moved in
            the same way.

    Raises:
        RuleError: `fn` or `inverse` is not a function.

    Examples:
        >>> ms.load(model, "old.pt", rules=ms.rules.Apply("*.scale", torch.exp, inverse=torch.log))
    """

    pattern: str
    fn: Callable[[Any], Any]
    inverse: Callable[[Any], Any] | None = None
    moves: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn) or not (self.inverse is None or callable(self.inverse)):
            raise RuleError(
                "an Apply takes functions",
                where=repr(self.pattern),
                found=f"{short_repr(self.fn)}, {short_repr(self.inverse)}",
            )

    def apply_to(self, context: RuleContext, name: str, entry: Entry) -> None:
        try:
            if isinstance(entry.content, Value):
                if entry.content.error is not None:
                    return context.fail(name, one_line(entry.content.error))
                result: Source | Value = Value(self.fn(deepcopy(entry.content.value)))
            else:
                result = self._derive(entry.content, context)
        except Exception as error:  # a user's function may raise anything
            keep_interrupt(error)
            return context.fail(name, describe(error))
        return context.make(name, result, [(name, entry)])

    def _derive(self, source: Source, context: RuleContext) -> Source:
        try:
            example = self._call(meta_like(source))
        except Exception as error:  # the function may need values
            keep_interrupt(error)
            example = self._call(_own_copy(context.values(source)))
        dtype, shape = example.dtype, tuple(example.shape)
        return Derived(dtype, shape, (source,), partial(self._compute, dtype, shape), is_certain=False)

    def _compute(self, dtype: torch.dtype, shape: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
        result = self._call(_own_copy(tensor))
        if (result.dtype, tuple(result.shape)) != (dtype, shape):
            raise TransformError(
                "a function returned another shape or dtype for the values than before; nothing has been changed",
                where=repr(self),
                expected=f"{dtype} of shape {shape}",
                found=f"{result.dtype} of shape {tuple(result.shape)}",
            )
        return result.detach()

    def _call(self, tensor: torch.Tensor) -> torch.Tensor:
        result = self.fn(tensor)
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"the function returned {type(result).__name__}, not a tensor")
        return result

    def reverse(self) -> "Apply":
        if self.inverse is None:
            raise irreversible(self, "it has no inverse")
        return Apply(self.pattern, self.inverse, self.fn, self.moves)


def _own_copy(values: torch.Tensor) -> torch.Tensor:
    """Returns a copy, which a function may change. The memory of a large one returns to the system when it is freed."""
    if is_plain_memory(values):
        return empty_cpu(values.shape, values.dtype).copy_(values)
    return values.clone()


class Split(PatternRule, msgspec.Struct, frozen=True):
    """Cuts a tensor into several along one dimension: a fused QKV into three. Reads only the parts that are used.

    Args:
        pattern: a name in which each `*` matches any run of characters.
        into: the names of the parts, each with as many `*`.
        dim: the dimension to cut.
        sizes: the sizes of the parts in that dimension; equal by default.

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

    def apply(self, context: RuleContext) -> None:
        for name, entry, parts in matching(self.pattern, context.entries):
            if parts is None:
                context.keep(name, entry)
            elif entry.tensor is None or entry.why_not_plain:
                context.fail(name, entry.why_not_plain)
            elif why := self._why_not(tuple(entry.tensor.shape)):
                context.fail(name, why)
            else:
                whole, start, slices = entry.tensor.shape[self.dim], 0, [slice(None)] * len(entry.tensor.shape)
                sizes = self.sizes or (whole // len(self.into),) * len(self.into)
                for target, size in zip(self.into, sizes, strict=True):
                    slices[self.dim] = slice(start, start + size)
                    context.make(template(target).fill(parts), region(entry.tensor, slices), [(name, entry)])
                    start += size

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

    def reverse(self) -> "Concat":
        return Concat(self.into, self.pattern, self.dim, self.sizes)


class _JoiningRule(PatternRule, msgspec.Struct, frozen=True):
    """A rule that makes one tensor of several, whose names its patterns match. A subclass defines `join`."""

    patterns: tuple[str, ...]
    into: str

    def __post_init__(self) -> None:
        _set_names(self, "patterns", self.patterns)
        same_stars(self.into, *self.patterns)

    def _read_patterns(self) -> tuple[str, ...]:
        return self.patterns

    def rename(self, name: str) -> str | None:
        for pattern in self.patterns:
            parts = template(pattern).match(name)
            if parts is not None:
                return template(self.into).fill(parts)
        return None

    def apply(self, context: RuleContext) -> None:
        groups: dict[str, list[NamedEntry | None]] = {}
        templates = [Template(pattern) for pattern in self.patterns]
        # All patterns have as many wildcards: those without any are found by name.
        index_of = {pattern: index for index, pattern in enumerate(self.patterns)} if not templates[0].stars else {}
        target_of: dict[str, str] = {}
        for name, entry in context.entries.items():
            candidates = [index_of[name]] if name in index_of else () if index_of else range(len(templates))
            for index in candidates:
                parts = templates[index].match(name)
                if parts is not None:
                    target = template(self.into).fill(parts)
                    if target not in groups:
                        groups[target] = [None] * len(templates)
                    group = groups[target]
                    if (other := group[index]) is not None:  # two names whose wildcards are filled in to one name
                        context.fail(target, f"{other[0]} and {name} are both its part {self.patterns[index]}")
                    group[index], target_of[name] = (name, entry), target
                    break
        for name, entry in context.entries.items():
            if name not in target_of:
                context.keep(name, entry)
            elif (parts_of_target := groups.pop(target_of[name], None)) is not None:
                self._join_entries(context, target_of[name], parts_of_target)

    def _join_entries(self, context: RuleContext, target: str, group: Sequence[NamedEntry | None]) -> None:
        present = [part for part in group if part is not None]
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


class Concat(_JoiningRule, frozen=True):
    """Joins several tensors into one along one dimension: separate Q, K and V into a fused QKV.

    Args:
        patterns: the names of the parts, in which each `*` matches any run of characters.
        into: the name of the result, with as many `*`.
        dim: the dimension to join.
        sizes: the sizes of the parts in that dimension, which are checked; equal by default.

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
        others = [shape[: self.dim] + shape[self.dim :][1:] for shape in shapes]
        if any(other != others[0] for other in others):
            raise ValueError(f"the shapes {shapes} differ in more than dimension {self.dim}")
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError("the parts have several dtypes")
        return concatenated(tensors, self.dim)

    def reverse(self) -> "Split":
        return Split(self.into, self.patterns, self.dim, self.sizes)


class _FoldingRule(_JoiningRule, frozen=True):
    """A rule that computes one tensor from the values of two."""

    moves = False
    """It does more than moving elements, so it is not applied to the state of an optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.patterns) != 2:
            raise RuleError("patterns= takes two names", where=type(self).__name__, found=short_repr(self.patterns))

    def reverse(self) -> "Rule":
        raise irreversible(self, "the two tensors cannot be computed from the result")


class Multiply(_FoldingRule, frozen=True):
    """Multiplies two tensors of one shape, element by element, in the dtype of the first: a weight and its mask.

    The result is that of `torch.nn.utils.prune.remove`, bit for bit.

    Args:
        patterns: the names of the tensor and of the factor, in which each `*` matches any run of characters.
        into: the name of the result, with as many `*`.

    Raises:
        RuleError: The names have different numbers of `*`, or they are not two.

    Examples:
        >>> rule = ms.rules.Multiply(["*.weight_orig", "*.weight_mask"], "*.weight")
        >>> ms.load(model, "pruned.pt", rules=rule)
    """

    patterns: tuple[str, ...]
    into: str

    def join(self, tensors: Sequence[Source]) -> Source:
        tensor, factor = tensors
        if tuple(tensor.shape) != tuple(factor.shape):
            raise ValueError(f"the shapes {list(tensor.shape)} and {list(factor.shape)} differ")
        return multiplied(tensor, factor)


class WeightNorm(_FoldingRule, frozen=True):
    """Computes the weight of a module with weight norm from its magnitude and its direction.

    The result is that of `torch.nn.utils.remove_weight_norm`, bit for bit. The shape of the magnitude says which
    dimension has a norm for each index.

    Args:
        patterns: the names of the magnitude and of the direction, in which each `*` matches any run of characters.
        into: the name of the weight, with as many `*`.

    Raises:
        RuleError: The names have different numbers of `*`, or they are not two.

    Examples:
        >>> rule = ms.rules.WeightNorm(["*.weight_g", "*.weight_v"], "*.weight")
        >>> ms.load(model, "weight_norm.pt", rules=rule)
    """

    patterns: tuple[str, ...]
    into: str

    def join(self, tensors: Sequence[Source]) -> Source:
        magnitude, direction = tensors
        dim = weight_norm_dim(magnitude.shape, direction.shape)
        if dim is None:
            raise ValueError(f"no weight norm has the shapes {list(magnitude.shape)} and {list(direction.shape)}")
        if magnitude.dtype != direction.dtype or not direction.dtype.is_floating_point or direction.dtype.itemsize < 2:
            raise ValueError(f"no weight norm has the dtypes {magnitude.dtype} and {direction.dtype}")
        return Derived(direction.dtype, tuple(direction.shape), (direction, magnitude), partial(weight_norm, dim=dim))


def weight_norm_dim(magnitude: Sequence[int], direction: Sequence[int]) -> int | None:
    """Returns the dimension whose indices have a norm each: -1 for one norm in all, None if the shapes do not fit."""
    if not magnitude:
        return -1
    for dim, size in enumerate(direction):
        if tuple(magnitude) == (*(1,) * dim, size, *(1,) * (len(direction) - dim - 1)):
            return dim
    return None


def _set_names(rule: Split | _JoiningRule, argument: str, names: object) -> None:
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise RuleError(f"{argument}= takes several names", where=type(rule).__name__, found=short_repr(names))
    if len(set(names)) != len(names):
        raise RuleError(f"{argument}= has a name twice", where=type(rule).__name__, found=short_repr(names))
    msgspec.structs.force_setattr(rule, argument, tuple(names))


def _set_sizes(rule: Split | Concat, count: int) -> None:
    if not isinstance(rule.dim, int):
        raise RuleError("dim= is a number", where=rule, found=short_repr(rule.dim))
    if rule.sizes is None:
        return
    sizes = check_sizes(rule, "sizes", rule.sizes, least=0)
    if len(sizes) != count:
        raise RuleError("sizes= takes one size for each part", where=type(rule).__name__, expected=count, found=sizes)
    msgspec.structs.force_setattr(rule, "sizes", sizes)
