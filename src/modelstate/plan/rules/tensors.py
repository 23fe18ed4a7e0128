"""Rules that make tensors of tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from modelstate.errors import RuleError
from modelstate.plan.derived import Derived, Source, derived
from modelstate.plan.dtypes import cast_between
from modelstate.plan.rules.names import Ignore
from modelstate.plan.rules.rule import Course, Entry, Shown, Value, describe, irreversible, matching
from modelstate.plan.rules.template import Template, same_stars

_Named = tuple[str, Entry]


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

    def apply(self, course: Course) -> None:
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
        if entry.tensor is None:
            return "it is no tensor"
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

    def apply(self, course: Course) -> None:
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

    def _join(self, course: Course, target: str, group: Sequence[_Named | None]) -> None:
        found = [one for one in group if one is not None]
        if len(found) < len(group):
            absent = ", ".join(pattern for pattern, one in zip(self.patterns, group, strict=True) if one is None)
            there = ", ".join(name for name, _ in found)
            return course.fail(target, f"there is {there}, and nothing like {absent}")
        tensors = [entry.tensor for _, entry in found if entry.tensor is not None]
        why = "a part is no tensor" if len(tensors) < len(found) else self._why_not(tensors)
        if why:
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


class _OneByOne(Shown):
    """A rule that changes tensors and leaves them their names."""

    pattern: str

    def __post_init__(self) -> None:
        Template(self.pattern)

    def rename(self, name: str) -> str | None:
        return None if Template(self.pattern).match(name) is None else name

    def apply(self, course: Course) -> None:
        for name, entry, parts in matching(self.pattern, course.entries):
            if parts is None:
                course.keep(name, entry)
            else:
                self.change_entry(course, name, entry)

    def change_entry(self, course: Course, name: str, entry: Entry) -> None:
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
                object.__setattr__(self, name, _whole_numbers(self, name, sizes, least=-1))

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
        for given in (self.dtype, *([] if self.before is None else [self.before])):
            if not isinstance(given, torch.dtype):
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

    `fn` is called with a tensor on the meta device first, to know shape and dtype; where it cannot take one, at once.
    For extra state it is called with the value. `moves` says that it only moves elements about, so that what an
    optimizer has for each element goes the same way.
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

    def change_entry(self, course: Course, name: str, entry: Entry) -> None:
        try:
            if entry.tensor is None:
                made: Any = Value(self.fn(entry.content.value)) if isinstance(entry.content, Value) else None
            else:
                made = self._of_tensor(entry.tensor, course)
        except Exception as error:  # whatever the user's function raises
            return course.fail(name, describe(error))
        return course.make(name, made, [(name, entry)])

    def _of_tensor(self, source: Source, course: Course) -> Source:
        try:
            return derived(self.change, [source])
        except Exception:  # it may want to see values
            return self.change(course.values(source).clone()).detach()

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        result = self.fn(tensor)
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"the function returned {type(result).__name__}, not a tensor")
        return result

    def reverse(self) -> "Apply":
        if self.inverse is None:
            raise irreversible(self, "it has no inverse")
        return Apply(self.pattern, self.inverse, self.fn, self.moves)


@dataclass(frozen=True, repr=False)
class Copy(Shown):
    """Gives what is like `pattern` a second name: the weight of an embedding that a head was tied to."""

    pattern: str
    to: str

    def __post_init__(self) -> None:
        same_stars(self.pattern, self.to)

    def rename(self, name: str) -> str | None:
        return None if Template(self.pattern).match(name) is None else name

    def apply(self, course: Course) -> None:
        for name, entry, parts in matching(self.pattern, course.entries):
            course.keep(name, entry)
            if parts is not None:
                course.make(Template(self.to).fill(parts), entry.content, [(name, entry)])

    def reverse(self) -> "Same":
        return Same(self.pattern, self.to)


@dataclass(frozen=True, repr=False)
class Same(Shown):
    """Leaves out a second name, like `other`, of what is like `pattern`; both must be the same, bit for bit."""

    pattern: str
    other: str

    def __post_init__(self) -> None:
        same_stars(self.pattern, self.other)

    def rename(self, name: str) -> str | None:
        return None

    def apply(self, course: Course) -> None:
        for name, entry, parts in matching(self.other, course.entries):
            first = None if parts is None else course.entries.get(Template(self.pattern).fill(parts))
            if parts is None:
                course.keep(name, entry)
            elif first is None:
                course.fail(name, f"there is no {Template(self.pattern).fill(parts)} that it could be the same as")
            elif not course.equal(first, entry):
                course.fail(name, f"it differs from {Template(self.pattern).fill(parts)}")
            else:
                course.drop()

    def reverse(self) -> "Copy":
        return Copy(self.pattern, self.other)


@dataclass(frozen=True, repr=False, eq=False)
class Fill(Shown):
    """Gives a value to what the model has and the checkpoint lacks.

    `Fill("*.num_batches_tracked", 0)` takes a number, or a tensor of the right shape; without one, the owner's own
    initialiser makes the value: its `reset_parameters`, called on a copy of the owner.
    """

    pattern: str
    value: float | torch.Tensor | None = field(default=None)

    def __post_init__(self) -> None:
        Template(self.pattern)
        if not (self.value is None or isinstance(self.value, (int, float, complex, torch.Tensor))):
            raise RuleError("a Fill takes a number or a tensor", where=repr(self.pattern), found=repr(self.value))

    def rename(self, name: str) -> str | None:
        return None

    def apply(self, course: Course) -> None:
        template = Template(self.pattern)
        there = [name for name in course.entries if template.match(name) is not None]
        for name, entry in course.entries.items():
            course.keep(name, entry)
        if there:
            course.fail(there[0], "the checkpoint has it already")
            return
        named = [self.pattern] if isinstance(self.value, torch.Tensor) and not template.stars else []
        lacking = course.wanted.lacking(course.entries) if course.wanted is not None else iter(())
        for name in named or [name for name in lacking if template.match(name) is not None]:
            self._fill(course, name)

    def _fill(self, course: Course, name: str) -> None:
        if isinstance(self.value, torch.Tensor):
            return course.make(name, self.value.detach(), [])
        found = course.wanted.shape_and_dtype(name) if course.wanted is not None else None
        if found is None:
            return course.fail(name, "the model has no tensor of this name")
        shape, dtype = found
        if self.value is not None:
            build: Callable[[], torch.Tensor] = partial(torch.full, shape, self.value, dtype=dtype)
        else:
            initialiser = course.wanted.initialiser(name) if course.wanted is not None else None
            if initialiser is None:
                return course.fail(name, "its owner has no reset_parameters that would make it: give a value")
            build = initialiser
        return course.make(name, Derived(dtype, shape, (), build), [])

    def reverse(self) -> Ignore:
        return Ignore(self.pattern)


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
    checked = _whole_numbers(rule, "sizes", sizes, least=0)
    if len(checked) != count:
        raise RuleError("as many sizes as parts", where=type(rule).__name__, expected=count, found=repr(sizes))
    object.__setattr__(rule, "sizes", checked)


def _whole_numbers(rule: Any, name: str, sizes: Any, least: int) -> tuple[int, ...]:
    several = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    if not several or not all(isinstance(size, int) and size >= least for size in sizes):
        raise RuleError(f"{name}= takes sizes", where=type(rule).__name__, expected="whole numbers", found=repr(sizes))
    return tuple(sizes)
