"""Rules that change tensors one by one, and leave them their names."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from modelstate.errors import RuleError, TransformError
from modelstate.plan.derived import Derived, Source, stand_in
from modelstate.plan.dtypes import cast_between, dtype_named
from modelstate.plan.rules.arguments import whole_numbers
from modelstate.plan.rules.rule import Course, Entry, Shown, Value, describe, irreversible, matching
from modelstate.plan.rules.template import Template

_Named = tuple[str, Entry]


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

    def change_entry(self, course: Course, name: str, entry: Entry) -> None:
        try:
            if isinstance(entry.content, Value):
                made: Source | Value = Value(self.fn(deepcopy(entry.content.value)))
            else:
                made = self._of_tensor(entry.content, course)
        except Exception as error:  # whatever the user's function raises
            return course.fail(name, describe(error))
        return course.make(name, made, [(name, entry)])

    def _of_tensor(self, source: Source, course: Course) -> Source:
        try:
            likeness = self._called(stand_in(source))
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
