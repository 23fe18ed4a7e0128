"""What a rule is, the entries that it works on, and names with wildcards."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from modelstate.errors import RuleError
from modelstate.problems import BadRule, CyclicRules, NameClash, NeedsModel, Problem
from modelstate.rules.expression import Change, Source, derived, values_of, why_not_plain
from modelstate.spec import Stored, StoredTensor
from modelstate.transaction.slots import same_values


@dataclass(frozen=True, slots=True)
class Template:
    """A name in which each `*` is any run of characters, dots too, and each as short as it can be."""

    text: str
    stars: int = field(init=False)
    _expression: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise RuleError(
                "a rule applies to names", expected="a name, with * for any part of it", found=repr(self.text)
            )
        parts = self.text.split("*")
        object.__setattr__(self, "stars", len(parts) - 1)
        object.__setattr__(self, "_expression", re.compile("(.*?)".join(map(re.escape, parts)), re.DOTALL))

    def match(self, name: str) -> tuple[str, ...] | None:
        """What the wildcards stand for in this name; None for another name."""
        found = self._expression.fullmatch(name)
        return found.groups() if found is not None else None

    def fill(self, parts: tuple[str, ...]) -> str:
        """The name with these parts for the wildcards."""
        pieces = self.text.split("*")
        return "".join(piece + part for piece, part in zip(pieces, (*parts, ""), strict=True))


@lru_cache(maxsize=8192)
def template(text: str) -> Template:
    """The template of a text that has been checked; rules ask for theirs once for every name."""
    return Template(text)


def same_stars(first: str, *others: str) -> None:
    """Raises `RuleError` where names have not as many wildcards as the first."""
    stars = Template(first).stars
    for other in others:
        if Template(other).stars != stars:
            raise RuleError(
                "the wildcards of a rule do not correspond",
                where=f"{first!r} and {other!r}",
                expected="as many * on both sides: the first stands for the first, and so on",
                remedy="a regular expression can do more: Rename(re.compile(...), ...)",
            )


@runtime_checkable
class Rule(Protocol):
    """A change of names. It says of each name what becomes of it. A class of one's own can be a rule."""

    def rename(self, name: str) -> str | None:
        """The name in the model of what the checkpoint calls `name`; None where the rule does not apply."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value that is no tensor."""

    value: object


class Entry(NamedTuple):
    """What a name stands for, in the course of the rules. (A named tuple, for a checkpoint may have very many.)"""

    content: Source | Value
    sources: tuple[str, ...]
    """Names in the checkpoint of what it is made of."""
    rules: tuple[str, ...] = ()
    """The rules that led here."""
    names: tuple[str, ...] = ()
    """Names that it had before."""

    @property
    def tensor(self) -> Source | None:
        return None if isinstance(self.content, Value) else self.content

    @property
    def why_not_plain(self) -> str:
        """Why nothing can be done with its elements; empty where it can."""
        return "it is no tensor" if isinstance(self.content, Value) else why_not_plain(self.content)


Entries = dict[str, Entry]


class Wanted(Protocol):
    """What the model has places for, as far as rules ask: names in the way of the rule that asks."""

    def lacking(self, entries: Entries) -> Iterator[str]:
        """Names of the model that are not among the entries."""

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """What the model has there; None where it has no tensor of that name."""

    def initialiser(self, name: str) -> Callable[[], torch.Tensor] | None:
        """What makes a first value of that tensor, as its owner does; None where the owner says nothing of it."""


class RuleContext:
    """One application of rules: what they made so far, and what was wrong with it."""

    def __init__(self, entries: Entries, read: Callable[[Stored], torch.Tensor]) -> None:
        self.entries = entries
        self.find_wanted: Callable[[], Wanted] | None = None
        """Says what the model has places for, by the names of the rule that is run."""
        self._read = read
        self.problems: list[Problem] = []
        self.idle: list[str] = []
        self.rule: object = None
        self._made: Entries = {}
        self._hits = 0

    def run(self, rule: Any) -> None:
        """Applies one rule to all names."""
        self.rule, self._made, self._hits = rule, {}, 0
        if hasattr(rule, "apply"):
            rule.apply(self)
        else:
            rename_all(rule, self)
        # What a rule would have made of a model is lacking for the later ones.
        if not self._hits and not any(isinstance(problem, NeedsModel) for problem in self.problems):
            self.idle.append(repr(rule))
        self.entries = self._made

    @property
    def wanted(self) -> Wanted | None:
        return None if self.find_wanted is None else self.find_wanted()

    def part(self, entries: Entries) -> "RuleContext":
        """A course of its own for some of the entries, which `take` brings back."""
        return RuleContext(entries, self._read)

    def take(self, part: "RuleContext", prefix: str) -> None:
        """Takes over what has become of a part, whose names lack a prefix."""
        self._hits += part._hits
        self.problems += [replace(problem, name=prefix + problem.name) for problem in part.problems]
        for name, entry in part.entries.items():
            self._put(prefix + name, entry)

    def keep(self, name: str, entry: Entry) -> None:
        """Leaves an entry as it is."""
        self._put(name, entry)

    def begin_again(self) -> None:
        """Leaves everything as it is, and forgets which names it had."""
        self._hits += 1
        self._made = {name: entry._replace(names=()) for name, entry in self.entries.items()}

    def replace(self, entries: Entries) -> None:
        """Puts these in the place of all entries: what a rule that looks at all names at once has made of them."""
        self._hits += 1
        self._made = dict(entries)

    def used(self) -> None:
        """Counts the rule as one that applies here, whatever it matches."""
        self._hits += 1

    def drop(self) -> None:
        """Leaves an entry out."""
        self._hits += 1

    def make(self, name: str, content: Source | Value, of: Sequence[tuple[str, Entry]]) -> None:
        """Puts what the rule made of these entries under a name."""
        self._hits += 1
        sources = tuple(dict.fromkeys(source for _, entry in of for source in entry.sources))
        chain = tuple(dict.fromkeys(rule for _, entry in of for rule in entry.rules))
        before = tuple(dict.fromkeys(one for old, entry in of for one in (*entry.names, old) if old != name))
        if len(of) == 1 and name in of[0][1].names:
            self.problems.append(CyclicRules(name, (*chain, repr(self.rule))))
        self._put(name, Entry(content, sources, (*chain, repr(self.rule)), before))

    def tensor(self, name: str, of: Sequence[tuple[str, Entry]], change: Change) -> None:
        """Puts the tensor that `change` makes of these entries' under a name; where it cannot, that is a problem."""
        self._hits += 1
        for old, entry in of:
            if why := entry.why_not_plain:
                return self.fail(old, why)
        parts = [entry.tensor for _, entry in of if entry.tensor is not None]
        try:
            made = derived(change, parts)
        except Exception as error:  # what torch says of these shapes
            return self.fail(of[0][0], describe(error))
        return self.make(name, made, of)

    def values(self, source: Source) -> torch.Tensor:
        """The values of a tensor, for rules that cannot do without. They are not to be changed."""
        return values_of(source, self._read)

    def equal(self, one: Entry, other: Entry) -> bool:
        """Whether two entries are the same, bit for bit."""
        if one.tensor is None or other.tensor is None:
            return one.content is other.content
        if one.tensor is other.tensor or (isinstance(one.tensor, StoredTensor) and one.tensor == other.tensor):
            return True
        first, second = self.values(one.tensor), self.values(other.tensor)
        return first.dtype == second.dtype and first.shape == second.shape and same_values(first, second)

    def fail(self, name: str, why: str) -> None:
        """Takes down why the rule cannot be carried out here."""
        self._hits += 1
        self.problems.append(BadRule(name, repr(self.rule), why))

    def fail_without_model(self, name: str) -> None:
        """Takes down that only a model can say what the rule makes."""
        self._hits += 1
        self.problems.append(NeedsModel(name, repr(self.rule)))

    def _put(self, name: str, entry: Entry) -> None:
        first = self._made.setdefault(name, entry)
        if first is not entry:
            self.problems.append(NameClash(name, (*first.sources, *entry.sources)))


def rename_all(rule: Rule, course: RuleContext) -> None:
    """What a rule that only changes names does."""
    for name, entry in course.entries.items():
        changed = rule.rename(name)
        if changed is None:
            course.keep(name, entry)
        else:
            course.make(changed, entry.content, [(name, entry)])


def describe(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class Shown:
    """Rules print as the code that makes them."""

    __slots__ = ()

    def __repr__(self) -> str:
        given = []
        for argument in fields(self):  # type: ignore[arg-type]
            value = getattr(self, argument.name)
            if argument.init and argument.default is MISSING:
                given.append(_shown(value))
            elif argument.init and value is not argument.default and value != argument.default:
                given.append(f"{argument.name}={_shown(value)}")
        return f"{type(self).__name__}({', '.join(given)})"


def _shown(value: object) -> str:
    if isinstance(value, re.Pattern):
        return f"re.compile({raw(value.pattern)})"
    if isinstance(value, str):
        return raw(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return getattr(value, "__qualname__", None) or repr(value)


def raw(text: str) -> str:
    """Text as code, raw where that reads better."""
    return f'r"{text}"' if "\\" in text and not re.search(r'"|\n|\\$', text) else repr(text)


def as_code(rule: object) -> str:
    """The rule as a user writes it."""
    return f"ms.rules.{rule!r}" if type(rule).__module__.startswith("modelstate.") else repr(rule)


def matching(pattern: str, entries: Entries) -> Iterator[tuple[str, Entry, tuple[str, ...] | None]]:
    """Every entry, with what the wildcards of the pattern stand for in its name."""
    template = Template(pattern)
    for name, entry in entries.items():
        yield name, entry, template.match(name)


def irreversible(rule: object, why: str) -> RuleError:
    """The error for a rule that nothing takes back."""
    return RuleError(
        "the rule cannot be reversed", where=repr(rule), found=why, remedy="write the rules of the way back by hand"
    )


@dataclass(frozen=True)
class Scoped:
    """A rule for the names that begin with a prefix. All others are left alone."""

    prefix: str
    rule: Rule

    def __repr__(self) -> str:
        return f"{self.rule!r} in {self.prefix}*"

    def rename(self, name: str) -> str | None:
        changed = self.rule.rename(name[len(self.prefix) :]) if name.startswith(self.prefix) else None
        return None if changed is None else self.prefix + changed

    def apply(self, course: RuleContext) -> None:
        if not hasattr(self.rule, "apply"):
            return rename_all(self, course)
        cut, entries = len(self.prefix), course.entries
        inside = {name[cut:]: entry for name, entry in entries.items() if name.startswith(self.prefix)}
        part = course.part(inside)
        if wanted := course.wanted:
            part.find_wanted = lambda: _Below(wanted, self.prefix)
        part.run(self.rule)
        for name, entry in entries.items():
            if not name.startswith(self.prefix):
                course.keep(name, entry)
        course.take(part, self.prefix)
        return None

    def reverse(self) -> "Scoped":
        if not hasattr(self.rule, "reverse"):
            raise irreversible(self.rule, "it has no method reverse")
        return Scoped(self.prefix, self.rule.reverse())


@dataclass(frozen=True)
class _Below:
    """What the model has places for below a prefix."""

    of: Wanted
    prefix: str

    def lacking(self, entries: Entries) -> Iterator[str]:
        whole = {self.prefix + name: entry for name, entry in entries.items()}
        cut = len(self.prefix)
        return (name[cut:] for name in self.of.lacking(whole) if name.startswith(self.prefix))

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        return self.of.shape_and_dtype(self.prefix + name)

    def initialiser(self, name: str) -> Callable[[], torch.Tensor] | None:
        return self.of.initialiser(self.prefix + name)


def unscoped(rule: Rule) -> Rule:
    """The rule itself, whatever part of the names it is for."""
    return unscoped(rule.rule) if isinstance(rule, Scoped) else rule


def whole_numbers(rule: Any, name: str, sizes: Any, least: int) -> tuple[int, ...]:
    """Sizes that a rule was given. Raises `RuleError`."""
    several = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    if not several or not all(isinstance(size, int) and size >= least for size in sizes):
        raise RuleError(f"{name}= takes sizes", where=type(rule).__name__, expected="whole numbers", found=repr(sizes))
    return tuple(sizes)
