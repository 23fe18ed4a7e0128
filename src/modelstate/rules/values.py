"""Rules that add values, or leave out what is there already."""

import cmath
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from modelstate.errors import RuleError
from modelstate.rules.expression import Derived
from modelstate.rules.names import Ignore
from modelstate.rules.rule import Entry, RuleContext, Shown, Template, Wanted, matching, same_stars
from modelstate.torch_compat.dtypes import short

_Named = tuple[str, Entry]


@dataclass(frozen=True, repr=False)
class Copy(Shown):
    """Gives what is like `pattern` a second name: the weight of an embedding that a head was tied to."""

    pattern: str
    to: str

    def __post_init__(self) -> None:
        same_stars(self.pattern, self.to)

    def rename(self, name: str) -> str | None:
        return None if Template(self.pattern).match(name) is None else name

    def apply(self, course: RuleContext) -> None:
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

    def apply(self, course: RuleContext) -> None:
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

    `Fill("*.num_batches_tracked", 0)` takes a number, or a tensor of the right shape; without one, the model's own
    initialisation makes the value, as its constructor does: the `reset_parameters` of the module that owns the tensor,
    and the `_init_weights` of a Hugging Face model, called on a copy. Names are those of its place among the rules,
    shapes those of the model. Where there is no model, as in `Rules.apply`, only a tensor under a whole name can be
    filled in; `convert_checkpoint` takes `model=`.
    """

    pattern: str
    value: float | torch.Tensor | None = field(default=None)

    def __post_init__(self) -> None:
        Template(self.pattern)
        if not (self.value is None or isinstance(self.value, (int, float, complex, torch.Tensor))):
            raise RuleError("a Fill takes a number or a tensor", where=repr(self.pattern), found=repr(self.value))

    def rename(self, name: str) -> str | None:
        return None

    def apply(self, course: RuleContext) -> None:
        template = Template(self.pattern)
        there = [name for name in course.entries if template.match(name) is not None]
        for name, entry in course.entries.items():
            course.keep(name, entry)
        if there and not template.stars:
            return course.fail(self.pattern, "it is there already")
        if isinstance(self.value, torch.Tensor) and not template.stars:
            return course.make(self.pattern, self.value.detach(), [])
        wanted = course.wanted
        if wanted is None:
            return course.fail_without_model(self.pattern)
        for name in [name for name in wanted.lacking(course.entries) if template.match(name) is not None]:
            self._fill(course, wanted, name)
        return None

    def _fill(self, course: RuleContext, wanted: Wanted, name: str) -> None:
        if isinstance(self.value, torch.Tensor):
            return course.make(name, self.value.detach(), [])
        found = wanted.shape_and_dtype(name)
        if found is None:
            return course.fail(name, "the model has no tensor of this name")
        shape, dtype = found
        if self.value is not None:
            if not _can_be(self.value, dtype):
                return course.fail(name, f"{self.value} is no {short(dtype)}")
            build: Callable[[], torch.Tensor] = partial(torch.full, shape, self.value, dtype=dtype)
        else:
            initialiser = wanted.initialiser(name)
            if initialiser is None:
                return course.fail(name, "no reset_parameters or _init_weights of the model makes it: give a value")
            build = initialiser
        return course.make(name, Derived(dtype, shape, (), build, is_certain=self.value is not None), [])

    def reverse(self) -> Ignore:
        return Ignore(self.pattern)


def _can_be(value: float | complex, dtype: torch.dtype) -> bool:
    """Whether a number can be put into a tensor; a float may be rounded, and nothing else."""
    try:
        kept = torch.tensor(value, dtype=dtype).item()
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return False
    if dtype.is_floating_point or dtype.is_complex:
        is_real = isinstance(value, complex) <= dtype.is_complex
        return is_real and cmath.isfinite(kept) == cmath.isfinite(value)
    return bool(kept == value)
