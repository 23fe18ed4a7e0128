"""Rules: the protocol of a rule, the entries that rules change, and names with wildcards.

A rule maps the entries of a checkpoint to entries with the names of a model. A rule that only changes names has a
method `rename`; a built-in rule that also changes contents has a method `apply(context)`, which tells the `RuleContext`
what it makes and what it leaves out. All other entries stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import torch
from msgspec.structs import replace

from modelstate.errors import ModelStateError, RuleError, code_errors
from modelstate.problems import Problem, ProblemKind
from modelstate.rules.expression import Read, Source, values_of, why_not_plain
from modelstate.spec import StoredTensor
from modelstate.text_format import short_repr
from modelstate.torch_compat.plain import same_values


@runtime_checkable
class Rule(Protocol):
    """A change of names. A user's own class can be a rule.

    Examples:
        >>> class Lower:
        ...     def rename(self, name):
        ...         return name.lower() if name != name.lower() else None
        >>> ms.load(model, "old.pt", rules=[Lower()])
    """

    def rename(self, name: str) -> str | None:
        """Returns the name in the model for a name in the checkpoint.

        Args:
            name: The name in the checkpoint, after the rules before this one.

        Returns:
            The name in the model; None if the rule does not apply to it.

        Examples:
            >>> ms.rules.Rename("fc.*", "head.*").rename("fc.weight")
            'head.weight'
        """


class Value(msgspec.Struct, frozen=True):
    """The content of an entry that is not a tensor."""

    value: object
    error: ModelStateError | None = None
    """Why the value, or a part of it, is not read. Raised only if the value is needed."""


class Entry(NamedTuple):
    """What a name stands for while rules are applied.

    A named tuple, because a checkpoint may have very many entries.
    """

    content: Source | Value
    sources: tuple[str, ...]
    """Names in the checkpoint of the tensors that it is made of."""
    rules: tuple[str, ...] = ()
    """The rules that have been applied to it."""
    names: tuple[str, ...] = ()
    """Names that it had before."""

    @property
    def tensor(self) -> Source | None:
        return None if isinstance(self.content, Value) else self.content

    @property
    def why_not_plain(self) -> str:
        """Why rules cannot change its elements; empty if they can."""
        return "it is not a tensor" if isinstance(self.content, Value) else why_not_plain(self.content)


Entries = Mapping[str, Entry]
NamedEntry = tuple[str, Entry]


class ModelTensor(NamedTuple):
    """A tensor of the model."""

    tensor: torch.Tensor
    find_initialiser: Callable[[], Callable[[], torch.Tensor] | None]
    """Returns a function that makes the initial value as the module of the tensor does; None if there is none."""


ModelTensors = Mapping[str, ModelTensor]
"""The tensors of the model, under the names that they have at the place of the current rule."""


class RuleContext:
    """One application of rules: the entries so far, and the problems."""

    def __init__(self, entries: Entries, read: Read) -> None:
        self.entries = dict(entries)
        """The entries that the current rule is applied to. They change when it has been applied."""
        self.find_model_tensors: Callable[[], ModelTensors] | None = None
        """Returns the tensors of the model by the names of the current rule; None without a model."""
        self.problems: list[Problem] = []
        self.idle: list[str] = []
        """Rules that applied to nothing."""
        self.rule: object = None
        self._text = ""
        """The `repr` of the current rule, once it is needed: as long as the rule has names."""
        self._read = read
        self._left_out: list[str] = []
        self._made: list[NamedEntry] = []
        self._hits = 0
        self._needs_model = False
        """Whether a rule so far needs a model, which is not given."""

    def run(self, rule: Rule) -> None:
        """Applies one rule to all entries."""
        self.rule, self._text, self._hits = rule, "", 0
        self._left_out, self._made = [], []
        earlier = len(self.problems)
        apply_rule(rule, self)
        for name in self._left_out:
            self.entries.pop(name, None)
        for name, entry in self._made:
            first = self.entries.setdefault(name, entry)
            if first is not entry:
                self.problems.append(Problem(ProblemKind.NAME_CLASH, name, others=(*first.sources, *entry.sources)))
        # After a rule that needs a model, later rules may lack its results, so they are not reported as idle.
        self._needs_model |= any(problem.kind is ProblemKind.NEEDS_MODEL for problem in self.problems[earlier:])
        if not self._hits and not self._needs_model:
            self.idle.append(self.text)

    def names_for(self, rule: Rule) -> Iterable[str]:
        """Returns the names that a rule may apply to."""
        literal = literal_names(rule)
        return [name for name in literal if name in self.entries] if literal else self.entries

    @property
    def text(self) -> str:
        """The current rule as text."""
        self._text = self._text or repr(self.rule)
        return self._text

    @property
    def model_tensors(self) -> ModelTensors | None:
        return None if self.find_model_tensors is None else self.find_model_tensors()

    def leave_out(self, name: str) -> None:
        """Leaves out an entry."""
        self._hits += 1
        self._left_out.append(name)

    def put(self, name: str, entry: Entry) -> None:
        """Puts an entry under a name as it is. Two entries under one name are a problem."""
        self._made.append((name, entry))

    def mark_used(self) -> None:
        """Records that the rule applies here, so that it is not reported as idle."""
        self._hits += 1

    def make(self, name: str, content: Source | Value, of: Sequence[NamedEntry]) -> None:
        """Puts what the rule made of the entries `of` under a name, and leaves them out."""
        self._hits += 1
        self._left_out += [old for old, _ in of]
        sources = tuple(dict.fromkeys(source for _, entry in of for source in entry.sources))
        rules = tuple(dict.fromkeys(rule for _, entry in of for rule in entry.rules))
        before = tuple(dict.fromkeys(old for last, entry in of for old in (*entry.names, last) if last != name))
        if len(of) == 1 and name in of[0][1].names:
            self.problems.append(Problem(ProblemKind.CYCLIC_RULES, name, others=(*rules, self.text)))
        self.put(name, Entry(content, sources, (*rules, self.text), before))

    def values(self, source: Source) -> torch.Tensor:
        """Returns the values of a tensor, for rules that need them. They must not be changed."""
        return values_of(source, self._read)

    def equal(self, first: Entry, second: Entry) -> bool:
        """Whether two entries are equal, bit for bit."""
        if first.tensor is None or second.tensor is None:
            return first.content is second.content
        if first.tensor is second.tensor or (isinstance(first.tensor, StoredTensor) and first.tensor == second.tensor):
            return True
        return same_values(self.values(first.tensor), self.values(second.tensor))

    def fail(self, name: str, why: str) -> None:
        """Records why the rule cannot be carried out on this name."""
        self._hits += 1
        self.problems.append(Problem(ProblemKind.BAD_RULE, name, found=self.text, why=why))

    def run_below(self, prefix: str, rule: Rule) -> None:
        """Applies a rule to the names that begin with a prefix, which the rule does not see; keeps all others."""
        cut = len(prefix)
        inside = {name[cut:]: entry for name, entry in self.entries.items() if name.startswith(prefix)}
        part = RuleContext(inside, self._read)
        if (model_tensors := self.model_tensors) is not None:
            below = {name[cut:]: tensor for name, tensor in model_tensors.items() if name.startswith(prefix)}
            part.find_model_tensors = lambda: below
        part.run(rule)
        self._hits += part._hits
        self.problems += [replace(problem, name=prefix + problem.name) for problem in part.problems]
        self._left_out += [prefix + name for name in inside]
        self._made += [(prefix + name, entry) for name, entry in part.entries.items()]


def new_name(rule: Rule, name: str) -> str | None:
    """Returns what `rename` of a rule, which may be a user's own, returns.

    Raises `RuleError` where it raises, or returns something else than text or None.
    """
    try:
        renamed: object = rule.rename(name)
        if renamed is None or isinstance(renamed, str):
            return renamed
        raise TypeError(f"it returned a {type(renamed).__name__}")
    except Exception:  # entering `code_errors` for each name would double the time of `renaming`
        with code_errors(
            RuleError,
            "rename() of a rule does not return a name; nothing has been changed",
            where=f"{type(rule).__name__}, {name}",
            expected="a str, or None where the rule does not apply",
            remedy="correct the rule: see the traceback of the cause",
        ):
            raise


def apply_rule(rule: Rule, context: RuleContext) -> None:
    """Applies a rule by its method `apply` if it has one; otherwise changes names by `rename`."""
    if hasattr(rule, "apply"):
        rule.apply(context)
        return
    for name in context.names_for(rule):
        renamed = new_name(rule, name)
        if renamed is not None:
            entry = context.entries[name]
            context.make(renamed, entry.content, [(name, entry)])


class CodeRepr:
    """A `msgspec.Struct` whose `repr` is the code that makes it."""

    __slots__ = ()

    def __repr__(self) -> str:
        arguments = []
        names, defaults = self.__struct_fields__, self.__struct_defaults__  # type: ignore[attr-defined]
        for name, default in zip(names, (msgspec.NODEFAULT,) * (len(names) - len(defaults)) + defaults, strict=True):
            value = getattr(self, name)
            if default is msgspec.NODEFAULT:
                arguments.append(_value_as_code(value))
            elif value is not default and value != default:
                arguments.append(f"{name}={_value_as_code(value)}")
        return f"{type(self).__name__}({', '.join(arguments)})"


class Scoped(msgspec.Struct, frozen=True):
    """A rule for the names that begin with a prefix. The rule does not see the prefix, nor any other name."""

    prefix: str
    rule: Rule

    def __repr__(self) -> str:
        return f"{self.rule!r} in {self.prefix}*"

    def rename(self, name: str) -> str | None:
        renamed = new_name(self.rule, name[len(self.prefix) :]) if name.startswith(self.prefix) else None
        return None if renamed is None else self.prefix + renamed

    def apply(self, context: RuleContext) -> None:
        context.run_below(self.prefix, self.rule)

    def reverse(self) -> Scoped:
        return Scoped(self.prefix, reverse_of(self.rule))


def reverse_of(rule: Rule) -> Rule:
    """Returns the reverse of a rule. Raises `RuleError` where it has none."""
    if not hasattr(rule, "reverse"):
        raise irreversible(rule, "it has no method reverse")
    reverse: Rule = rule.reverse()
    return reverse


class Guess(CodeRepr, msgspec.Struct, frozen=True):
    """A rule that `modelstate.suggest` cannot be sure of. Nothing is loaded with it until its rule is taken out of it.

    Args:
        rule: The rule.

    Examples:
        >>> suggestion = ms.suggest(model, path)
        >>> print(suggestion)
        >>> ms.load(model, path, rules=suggestion.accept_guesses())
    """

    rule: Rule

    def rename(self, name: str) -> str | None:
        return self.rule.rename(name)

    def apply(self, context: RuleContext) -> None:
        context.problems.append(Problem(ProblemKind.GUESSED_RULE, repr(self.rule)))
        apply_rule(self.rule, context)


def unscoped(rule: Rule) -> Rule:
    """Returns the rule inside any number of `Scoped`."""
    return unscoped(rule.rule) if isinstance(rule, Scoped) else rule


class Template:
    """A name in which each `*` matches any run of characters, dots included, and each as short a run as possible."""

    __slots__ = ("_expression", "stars", "text")

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text:
            raise RuleError(
                "a rule applies to names", expected="a name, with * for any part of it", found=short_repr(text)
            )
        self.text = text
        first, *others = map(re.escape, text.split("*"))
        # Atomic groups, (?>...), keep the first place of each piece: where the others do not fit behind it, they fit
        # behind no later place. So a name is read once, not once for each combination of places.
        middle = "".join(f"(?>(.*?){piece})" for piece in others[:-1])
        last = f"(.*){others[-1]}" if others else ""
        self.stars = len(others)
        self._expression = re.compile(first + middle + last, re.DOTALL) if others else None
        """None for a name without `*`, which matches itself."""

    def match(self, name: str) -> tuple[str, ...] | None:
        """Returns what the wildcards match in this name; None if the name does not match."""
        if self._expression is None:
            return () if name == self.text else None
        match = self._expression.fullmatch(name)
        return match.groups() if match is not None else None

    def fill(self, parts: tuple[str, ...]) -> str:
        """Returns the name with these parts in place of the wildcards."""
        pieces = self.text.split("*")
        return "".join(piece + part for piece, part in zip(pieces, (*parts, ""), strict=True))


@lru_cache(maxsize=8192)
def template(text: str) -> Template:
    """Returns the cached template of a text: rules need theirs once for every name."""
    return Template(text)


def same_stars(first: str, *others: str) -> None:
    """Raises `RuleError` if names have another number of wildcards than the first."""
    stars = Template(first).stars
    for other in others:
        if Template(other).stars != stars:
            raise RuleError(
                "the wildcards of a rule do not correspond",
                where=f"{first!r} and {other!r}",
                expected="as many * on both sides: the first stands for the first, and so on",
                remedy="a regular expression can do more: Rename(re.compile(...), ...)",
            )


class PatternRule(CodeRepr):
    """A rule that looks at the entries whose names match its patterns, and at no other entry."""

    pattern: str | re.Pattern[str]

    @property
    def patterns(self) -> tuple[str | re.Pattern[str], ...]:
        """The patterns of the names that the rule looks at."""
        return (self.pattern,)


class EntryRule(PatternRule):
    """A rule that replaces each entry whose name matches its pattern. A subclass defines `apply_to`."""

    pattern: str

    def __post_init__(self) -> None:
        Template(self.pattern)

    def rename(self, name: str) -> str | None:
        return None if template(self.pattern).match(name) is None else name

    def apply(self, context: RuleContext) -> None:
        pattern = Template(self.patterns[-1])  # type: ignore[arg-type]
        for name in context.names_for(self):
            parts = pattern.match(name)
            if parts is not None:
                context.leave_out(name)
                self.apply_to(context, name, context.entries[name], parts)

    def apply_to(self, context: RuleContext, name: str, entry: Entry, parts: tuple[str, ...]) -> None:
        """Puts what the rule makes of an entry into the context.

        Args:
            context: The application of the rules.
            name: The name of the entry.
            entry: The entry.
            parts: What the wildcards of the pattern match in the name.
        """
        raise NotImplementedError


def literal_names(rule: object) -> tuple[str, ...]:
    """Returns the only names that a `PatternRule` looks at; none for one with a wildcard, and for any other rule.

    A subclass from elsewhere may look at other names.
    """
    if not isinstance(rule, PatternRule) or not _is_built_in(rule):
        return ()
    literal = tuple(pattern for pattern in rule.patterns if isinstance(pattern, str) and "*" not in pattern)
    return literal if len(literal) == len(rule.patterns) else ()


def _value_as_code(value: object) -> str:
    if isinstance(value, re.Pattern):
        return f"re.compile({_raw(value.pattern)})"
    if isinstance(value, str):
        return _raw(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_as_code, value))}]"
    return getattr(value, "__qualname__", None) or repr(value)


def _raw(text: str) -> str:
    """Returns text as a string literal, a raw one if that needs no escapes."""
    return f'r"{text}"' if "\\" in text and not re.search(r'"|\n|\\$', text) else repr(text)


def as_code(rule: object) -> str:
    """Returns the rule as a user writes it."""
    if isinstance(rule, Guess):
        return f"ms.rules.Guess({as_code(rule.rule)})"
    return f"ms.rules.{rule!r}" if _is_built_in(rule) else repr(rule)


def _is_built_in(rule: object) -> bool:
    return type(rule).__module__.startswith("modelstate.")


def irreversible(rule: object, why: str) -> RuleError:
    """Returns the error for a rule that has no reverse."""
    return RuleError(
        "the rule cannot be reversed", where=repr(rule), found=why, remedy="write the rules of the way back by hand"
    )


def check_sizes(rule: object, name: str, sizes: object, least: int) -> tuple[int, ...]:
    """Returns the sizes that were passed to a rule as the argument `name`. Raises `RuleError` for anything else."""
    if (
        not isinstance(sizes, Sequence)
        or isinstance(sizes, str)
        or not all(isinstance(size, int) and size >= least for size in sizes)
    ):
        raise RuleError(f"{name}= takes sizes", where=type(rule).__name__, expected="integers", found=short_repr(sizes))
    return tuple(sizes)
