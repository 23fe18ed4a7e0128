"""Rules that change tensors: cast, reshape, transpose, split, concatenate, apply a function."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from modelstate.errors import RuleError, TransformError
from modelstate.rules.expression import Derived, Source, meta_like
from modelstate.rules.rule import (
    Entry,
    RuleContext,
    Shown,
    Template,
    Value,
    describe,
    irreversible,
    matching,
    same_stars,
    whole_numbers,
)
from modelstate.torch_compat.dtypes import cast_between, dtype_named

_Named = tuple[str, Entry]


class _OneByOne(Shown):
    """A rule that changes tensors and leaves them their names."""

    pattern: str

    def __post_init__(self) -> None:
        Template(self.pattern)

    def rename(self, name: str) -> str | None:
        return None if Template(self.pattern).match(name) is None else name

    def apply(self, course: RuleContext) -> None:
        for name, entry, parts in matching(self.pattern, course.entries):
            if parts is None:
                course.keep(name, entry)
            else:
                self.change_entry(course, name, entry)

    def change_entry(self, course: RuleContext, name: str, entry: Entry) -> None:
        course.tensor(name, [(name, entry)], self.change)

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Transpose(_OneByOne):
    """Exchanges two dimensions: the weight of a Conv1D for that of a Linear."""

    pattern: str
    dim0: int = 0
    dim1: int = 1

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(self.dim0, self.dim1)

    def reverse(self) -> "Transpose":
        return self


@dataclass(frozen=True, repr=False)
class Reshape(_OneByOne):
    """Gives a tensor another shape, its elements in their order. `before=` says which it had, for the way back."""

    pattern: str
    shape: tuple[int, ...]
    before: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shape", "before"):
            sizes = getattr(self, name)
            if sizes is not None:
                object.__setattr__(self, name, whole_numbers(self, name, sizes, least=-1))

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.before is not None and tensor.reshape(self.before).shape != tensor.shape:
            raise ValueError(f"its shape is {list(tensor.shape)}, not {list(self.before)}")
        return tensor.reshape(self.shape)

    def reverse(self) -> "Reshape":
        if self.before is None:
            raise irreversible(self, "it does not say what the shape was: before=")
        return Reshape(self.pattern, self.before, self.shape)


@dataclass(frozen=True, repr=False)
class Cast(_OneByOne):
    """Gives tensors another dtype, also one that loses values. `before=` says which they had, for the way back."""

    pattern: str
    dtype: torch.dtype
    before: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dtype", "before"):
            given: object = getattr(self, name)
            if isinstance(given, str):
                object.__setattr__(self, name, dtype_named(given) or given)
            if not isinstance(getattr(self, name), torch.dtype) and (given is not None or name == "dtype"):
                raise RuleError("a Cast takes dtypes", where=self, found=repr(given))

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.before is not None and tensor.dtype != self.before:
            raise ValueError(f"its dtype is {tensor.dtype}, not {self.before}")
        return tensor.to(self.dtype)

    def reverse(self) -> "Cast":
        if self.before is None:
            raise irreversible(self, "it does not say what the dtype was: before=")
        if cast_between(self.before, self.dtype) in ("lossy", "kind"):
            raise irreversible(self, "the cast loses values")
        return Cast(self.pattern, self.before, self.dtype)


@dataclass(frozen=True, repr=False)
class Apply(_OneByOne):
    """Calls `fn(tensor)` for what is like `pattern`, for all that no other rule does; `inverse` is the way back.

    `fn` is called with a tensor on the meta device first, to know shape and dtype; where it cannot take one, with the
    values, which are read twice then. It always gets a copy. For extra state it is called with a copy of the value.
    `moves` says that it only moves elements about, so that what an optimizer has for each element goes the same way.
    """

    pattern: str
    fn: Callable[[Any], Any]
    inverse: Callable[[Any], Any] | None = None
    moves: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn) or not (self.inverse is None or callable(self.inverse)):
            raise RuleError(
                "an Apply takes functions", where=repr(self.pattern), found=f"{self.fn!r}, {self.inverse!r}"
            )

    def change_entry(self, course: RuleContext, name: str, entry: Entry) -> None:
        try:
            if isinstance(entry.content, Value):
                made: Source | Value = Value(self.fn(deepcopy(entry.content.value)))
            else:
                made = self._of_tensor(entry.content, course)
        except Exception as error:  # whatever the user's function raises
            return course.fail(name, describe(error))
        return course.make(name, made, [(name, entry)])

    def _of_tensor(self, source: Source, course: RuleContext) -> Source:
        try:
            likeness = self._called(meta_like(source))
        except Exception:  # it may want to see values
            likeness = self._called(course.values(source).clone())
        dtype, shape = likeness.dtype, tuple(likeness.shape)
        return Derived(dtype, shape, (source,), partial(self._computed, dtype, shape), is_certain=False)

    def _computed(self, dtype: torch.dtype, shape: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
        result = self._called(tensor.clone())  # of its own: the function may write to it
        if (result.dtype, tuple(result.shape)) != (dtype, shape):
            raise TransformError(
                "a function made something else of the values than it made of the shape; nothing has been changed",
                where=repr(self),
                expected=f"{dtype} of shape {shape}",
                found=f"{result.dtype} of shape {tuple(result.shape)}",
            )
        return result.detach()

    def _called(self, tensor: torch.Tensor) -> torch.Tensor:
        result = self.fn(tensor)
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"the function returned {type(result).__name__}, not a tensor")
        return result

    def reverse(self) -> "Apply":
        if self.inverse is None:
            raise irreversible(self, "it has no inverse")
        return Apply(self.pattern, self.inverse, self.fn, self.moves)


@dataclass(frozen=True, repr=False)
class Split(Shown):
    """Cuts a tensor into several, along one dimension: a fused QKV into three.

    `Split("*.qkv.*", ["*.q.*", "*.k.*", "*.v.*"])` makes parts of one size; `sizes=` says other ones. Only the bytes
    of the parts that are wanted are read.
    """

    pattern: str
    into: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _set_names(self, "into", self.into)
        same_stars(self.pattern, *self.into)
        _check_sizes(self, len(self.into), self.sizes)

    def rename(self, name: str) -> str | None:
        parts = Template(self.pattern).match(name)
        return None if parts is None else Template(self.into[0]).fill(parts)

    def apply(self, course: RuleContext) -> None:
        for name, entry, parts in matching(self.pattern, course.entries):
            if parts is None:
                course.keep(name, entry)
                continue
            why = self._why_not(entry)
            if why:
                course.fail(name, why)
                continue
            starts, sizes = self._pieces(entry)
            for target, start, size in zip(self.into, starts, sizes, strict=True):
                cut = partial(torch.narrow, dim=self.dim, start=start, length=size)
                course.tensor(Template(target).fill(parts), [(name, entry)], cut)

    def _why_not(self, entry: Entry) -> str:
        if entry.tensor is None or entry.why_not_plain:
            return entry.why_not_plain
        shape = tuple(entry.tensor.shape)
        if not -len(shape) <= self.dim < len(shape):
            return f"it has no dimension {self.dim}: its shape is {list(shape)}"
        size = shape[self.dim]
        if self.sizes is not None and sum(self.sizes) != size:
            return f"the sizes add up to {sum(self.sizes)}, and dimension {self.dim} of {list(shape)} has {size}"
        if self.sizes is None and size % len(self.into):
            return f"{size} cannot be cut into {len(self.into)} parts of one size: give sizes="
        return ""

    def _pieces(self, entry: Entry) -> tuple[list[int], Sequence[int]]:
        assert entry.tensor is not None
        whole = entry.tensor.shape[self.dim]
        sizes = self.sizes or (whole // len(self.into),) * len(self.into)
        return [sum(sizes[:index]) for index in range(len(sizes))], sizes

    def reverse(self) -> "Concat":
        return Concat(self.into, self.pattern, self.dim, self.sizes)


@dataclass(frozen=True, repr=False)
class Concat(Shown):
    """Joins several tensors into one, along one dimension: separate Q, K and V into a fused QKV.

    `Concat(["*.q.*", "*.k.*", "*.v.*"], "*.qkv.*")`. The parts have one size, or the `sizes=` that are given.
    """

    patterns: tuple[str, ...]
    into: str
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _set_names(self, "patterns", self.patterns)
        same_stars(self.into, *self.patterns)
        _check_sizes(self, len(self.patterns), self.sizes)

    def rename(self, name: str) -> str | None:
        for pattern in self.patterns:
            parts = Template(pattern).match(name)
            if parts is not None:
                return Template(self.into).fill(parts)
        return None

    def apply(self, course: RuleContext) -> None:
        groups: dict[str, list[_Named | None]] = {}
        templates = [Template(pattern) for pattern in self.patterns]
        member: dict[str, str] = {}
        for name, entry in course.entries.items():
            for index, template in enumerate(templates):
                parts = template.match(name)
                if parts is not None:
                    target = Template(self.into).fill(parts)
                    groups.setdefault(target, [None] * len(templates))[index] = (name, entry)
                    member[name] = target
                    break
        for name, entry in course.entries.items():
            if name not in member:
                course.keep(name, entry)
            elif (group := groups.pop(member[name], None)) is not None:
                self._join(course, member[name], group)

    def _join(self, course: RuleContext, target: str, group: Sequence[_Named | None]) -> None:
        found = [one for one in group if one is not None]
        if len(found) < len(group):
            absent = ", ".join(pattern for pattern, one in zip(self.patterns, group, strict=True) if one is None)
            there = ", ".join(name for name, _ in found)
            return course.fail(target, f"there is {there}, and nothing like {absent}")
        for name, entry in found:
            if entry.why_not_plain:
                return course.fail(name, entry.why_not_plain)
        tensors = [entry.tensor for _, entry in found if entry.tensor is not None]
        if why := self._why_not(tensors):
            return course.fail(target, why)
        # Not by torch.cat on meta: to know a shape that way takes it a second, the first time.
        shape = list(tensors[0].shape)
        shape[self.dim] = sum(tensor.shape[self.dim] for tensor in tensors)
        return course.make(target, Derived(tensors[0].dtype, tuple(shape), tuple(tensors), self._cat), found)

    def _why_not(self, tensors: Sequence[Source]) -> str:
        shapes = [list(tensor.shape) for tensor in tensors]
        if not all(-len(shape) <= self.dim < len(shape) for shape in shapes):
            return f"there is no dimension {self.dim} in the shapes {shapes}"
        sizes = [shape.pop(self.dim) for shape in map(list, shapes)]
        wanted = list(self.sizes) if self.sizes is not None else sizes[:1] * len(sizes)
        if sizes != wanted:
            return f"the parts have the sizes {sizes}, not {wanted}: give sizes="
        rest = [shape[: self.dim] + shape[self.dim :][1:] for shape in shapes]
        if any(one != rest[0] for one in rest):
            return f"the shapes {shapes} differ in more than dimension {self.dim}"
        if len({tensor.dtype for tensor in tensors}) > 1:
            return "the parts have several dtypes"
        return ""

    def _cat(self, *parts: torch.Tensor) -> torch.Tensor:
        return torch.cat(parts, self.dim)

    def reverse(self) -> "Split":
        return Split(self.into, self.patterns, self.dim, self.sizes)


def _set_names(rule: Any, name: str, given: object) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise RuleError(f"{name}= takes several names", where=type(rule).__name__, found=repr(given))
    if len(set(given)) != len(given):
        raise RuleError("a name is there twice", where=type(rule).__name__, found=repr(given))
    object.__setattr__(rule, name, tuple(given))


def _check_sizes(rule: Any, count: int, sizes: object) -> None:
    if not isinstance(rule.dim, int):
        raise RuleError("dim= is a number", where=rule, found=repr(rule.dim))
    if sizes is None:
        return
    checked = whole_numbers(rule, "sizes", sizes, least=0)
    if len(checked) != count:
        raise RuleError("as many sizes as parts", where=type(rule).__name__, expected=count, found=repr(sizes))
    object.__setattr__(rule, "sizes", checked)
