"""Rules that change names, leave entries out, or add entries with known values."""

from __future__ import annotations

import cmath
import re

import msgspec
import torch
from torch.nn.parameter import is_lazy

from modelstate.errors import RuleError
from modelstate.problems import Problem, ProblemKind
from modelstate.rules.expression import Derived, constant
from modelstate.rules.rule import (
    CodeRepr,
    Entry,
    EntryRule,
    ModelTensors,
    PatternRule,
    RuleContext,
    Template,
    irreversible,
    same_stars,
    template,
)
from modelstate.text_format import short_repr
from modelstate.torch_compat.dtypes import short


class Prefix(CodeRepr, msgspec.Struct, frozen=True):
    """Removes a prefix from the names of a checkpoint, adds one, or both.

    Args:
        strip: The prefix to remove. The rule applies to the names that begin with it.
        add: The prefix to add. Without `strip`, the rule applies to all names.

    Raises:
        RuleError: Both are empty, or one is not text.

    Examples:
        >>> ms.load(model, "ddp.pt", rules=ms.rules.Prefix(strip="module."))
    """

    strip: str = ""
    add: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.strip, str) and isinstance(self.add, str)):
            raise RuleError("a Prefix takes text", found=f"strip={self.strip!r}, add={self.add!r}")
        if not self.strip and not self.add:
            raise RuleError("a Prefix that changes nothing", expected="strip=, add= or both")

    def rename(self, name: str) -> str | None:
        if not name.startswith(self.strip) or len(name) == len(self.strip):
            return None
        return self.add + name[len(self.strip) :]

    def reverse(self) -> Prefix:
        return Prefix(self.add, self.strip)


class Rename(PatternRule, msgspec.Struct, frozen=True):
    """Renames what matches `pattern` to `replacement`.

    Args:
        pattern: A name in which each `*` matches any run of characters, as short as possible; or a compiled regular
            expression, each match of which in a name is replaced as `re.sub` does.
        replacement: The new name. Each `*` stands for what the `*` of the pattern at the same position matches. For a
            regular expression, the replacement of `re.sub`.

    A rule with a text pattern can be reversed; one with a regular expression cannot.

    Raises:
        RuleError: The two have different numbers of `*`, or the replacement names a group that the expression lacks, or
            both are equal.

    Examples:
        >>> ms.rules.Rename("encoder.layer.*.query.*", "blocks.*.q.*").rename("encoder.layer.0.query.weight")
        'blocks.0.q.weight'
        >>> ms.rules.Rename(re.compile(r"layer_(\\d+)"), r"layers.\\1").rename("layer_3.bias")
        'layers.3.bias'
    """

    pattern: str | re.Pattern[str]
    replacement: str

    def __post_init__(self) -> None:
        if isinstance(self.pattern, re.Pattern):
            _check_expression(self.pattern, self.replacement, self)
        elif self.pattern == self.replacement:
            raise RuleError("a Rename that changes nothing", where=self)
        else:
            same_stars(self.pattern, self.replacement)

    def rename(self, name: str) -> str | None:
        if isinstance(self.pattern, re.Pattern):
            renamed, count = self.pattern.subn(self.replacement, name)
            return renamed if count else None
        parts = template(self.pattern).match(name)
        return None if parts is None else template(self.replacement).fill(parts)

    def reverse(self) -> Rename:
        if isinstance(self.pattern, re.Pattern):
            raise irreversible(self, "a regular expression works one way")
        return Rename(self.replacement, self.pattern)


def _check_expression(pattern: re.Pattern[str], replacement: object, where: object) -> None:
    try:
        # An expression with the same groups that matches any text shows whether the replacement fits the groups.
        names = {number: f"?P<{name}>" for name, number in pattern.groupindex.items()}
        groups = "".join(f"({names.get(number, '')})" for number in range(1, pattern.groups + 1))
        re.sub(groups, replacement, "")  # type: ignore[call-overload]
    except (re.error, IndexError, TypeError) as error:
        raise RuleError("not the replacement of this regular expression", where=where, found=error) from error


class Ignore(EntryRule, msgspec.Struct, frozen=True):
    """Leaves out the entries of the checkpoint whose names match `pattern`.

    Args:
        pattern: A name in which each `*` matches any run of characters.

    Raises:
        RuleError: The pattern is empty, or not text.

    Examples:
        >>> ms.load(model, "pretrained.pt", rules=ms.rules.Ignore("classifier.*"), allow_missing=["classifier.*"])
    """

    pattern: str

    def rename(self, name: str) -> str | None:
        return None

    def apply_to(self, context: RuleContext, name: str, entry: Entry, parts: tuple[str, ...]) -> None:
        pass

    def reverse(self) -> Ignore:
        raise irreversible(self, "the entries that it leaves out are lost")


class Copy(EntryRule, msgspec.Struct, frozen=True):
    """Gives the entries that match `pattern` a second name: the weight of an embedding that a head was tied to.

    Args:
        pattern: A name in which each `*` matches any run of characters.
        to: The second name, with as many `*`.

    Raises:
        RuleError: The two names have different numbers of `*`.

    Examples:
        >>> ms.load(model, "tied.pt", rules=ms.rules.Copy("wte.weight", "head.weight"))
    """

    pattern: str
    to: str

    def __post_init__(self) -> None:
        same_stars(self.pattern, self.to)

    def apply_to(self, context: RuleContext, name: str, entry: Entry, parts: tuple[str, ...]) -> None:
        context.put(name, entry)
        context.make(template(self.to).fill(parts), entry.content, [(name, entry)])

    def reverse(self) -> Same:
        return Same(self.pattern, self.to)


class Same(EntryRule, msgspec.Struct, frozen=True):
    """Leaves out the entries that match `other`, which must be equal to those that match `pattern`, bit for bit.

    Args:
        pattern: The name that stays, in which each `*` matches any run of characters.
        other: The second name of the same values, with as many `*`.

    Raises:
        RuleError: The two names have different numbers of `*`.

    Examples:
        >>> ms.load(model, "untied.pt", rules=ms.rules.Same("wte.weight", "head.weight"))
    """

    pattern: str
    other: str

    def __post_init__(self) -> None:
        same_stars(self.pattern, self.other)

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.pattern, self.other)

    def rename(self, name: str) -> str | None:
        return None

    def apply_to(self, context: RuleContext, name: str, entry: Entry, parts: tuple[str, ...]) -> None:
        kept_name = template(self.pattern).fill(parts)
        kept = context.entries.get(kept_name)
        if kept is None:
            context.fail(name, f"there is no {kept_name} to compare it with")
        elif not context.equal(kept, entry):
            context.fail(name, f"it differs from {kept_name}")

    def reverse(self) -> Copy:
        return Copy(self.pattern, self.other)


class Fill(PatternRule, msgspec.Struct, frozen=True, eq=False):
    """Gives a value to what the model has and the checkpoint lacks.

    Args:
        pattern: The names to fill, in which each `*` matches any run of characters. They are the names that the
            entries have at this place among the rules.
        value: A number, or a tensor of the right shape. By default, the model's own initialisation makes the value,
            as its constructor does: the `reset_parameters` of the module that owns the tensor, and the
            `_init_weights` of a Hugging Face model, called on a copy.

    Shapes and dtypes are those of the model. Without a model, as in `Rules.apply`, only a tensor under a name without
    `*` can be filled in; `convert_checkpoint` takes `model=`.

    Raises:
        RuleError: The value is neither a number nor a tensor.

    Examples:
        >>> ms.load(model, "old.pt", rules=ms.rules.Fill("*.num_batches_tracked", 0))
    """

    pattern: str
    value: float | torch.Tensor | None = msgspec.field(default=None)

    def __post_init__(self) -> None:
        Template(self.pattern)
        if not (self.value is None or isinstance(self.value, (int, float, complex, torch.Tensor))):
            raise RuleError("a Fill takes a number or a tensor", where=repr(self.pattern), found=short_repr(self.value))

    def rename(self, name: str) -> str | None:
        return None

    def apply(self, context: RuleContext) -> None:
        template = Template(self.pattern)
        if self.pattern in context.entries and not template.stars:
            return context.fail(self.pattern, "the checkpoint has it already")
        if isinstance(self.value, torch.Tensor) and not template.stars:
            return context.make(self.pattern, self.value.detach(), [])
        model_tensors = context.model_tensors
        if model_tensors is None:
            context.mark_used()
            context.problems.append(Problem(ProblemKind.NEEDS_MODEL, self.pattern, found=repr(self)))
            return None
        if not template.stars:
            names = [self.pattern] if self.pattern in model_tensors else []
        else:
            lacking = (name for name in model_tensors if name not in context.entries)
            names = [name for name in lacking if template.match(name) is not None]
        for name in names:
            self._fill(context, model_tensors, name)
        return None

    def _fill(self, context: RuleContext, model_tensors: ModelTensors, name: str) -> None:
        if isinstance(self.value, torch.Tensor):
            return context.make(name, self.value.detach(), [])
        tensor, find_initialiser = model_tensors[name]
        if is_lazy(tensor):
            return context.fail(name, "the tensor of the model has no shape yet")
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if self.value is not None:
            if not _is_representable(self.value, dtype):
                return context.fail(name, f"{self.value} is not a value of {short(dtype)}")
            return context.make(name, constant(dtype, shape, self.value), [])
        initialiser = find_initialiser()
        if initialiser is None:
            return context.fail(name, "no reset_parameters or _init_weights of the model makes it: give a value")
        return context.make(name, Derived(dtype, shape, (), initialiser, is_certain=False), [])

    def reverse(self) -> Ignore:
        return Ignore(self.pattern)


def _is_representable(value: float | complex, dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype can hold a number; a float may be rounded, an integer may not."""
    try:
        kept = torch.tensor(value, dtype=dtype, device="cpu").item()
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return False
    if dtype.is_floating_point or dtype.is_complex:
        is_real = isinstance(value, complex) <= dtype.is_complex
        return is_real and cmath.isfinite(kept) == cmath.isfinite(value)
    return bool(kept == value)
