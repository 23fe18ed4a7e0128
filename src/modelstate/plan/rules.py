"""Rules: explicit, named changes between the names of a checkpoint and those of a model."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from modelstate.errors import OptionError, RuleError


@runtime_checkable
class Rule(Protocol):
    """A change of names. It says of each name what becomes of it."""

    def rename(self, name: str) -> str | None:
        """The name in the model of what the checkpoint calls `name`; None where the rule does not apply."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Takes a prefix off the names of a checkpoint, puts one in front of them, or both.

    `Prefix(strip="module.")` applies to the names that begin so; `Prefix(add="encoder.")` to all.
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


@dataclass(frozen=True, slots=True)
class Rename:
    """Changes every match of a regular expression in a name, as `re.sub` does."""

    pattern: str
    replacement: str

    def __post_init__(self) -> None:
        try:
            compiled = re.compile(self.pattern)
            # An expression with the same groups that surely matches shows whether the replacement fits them.
            names = {number: f"?P<{name}>" for name, number in compiled.groupindex.items()}
            groups = "".join(f"({names.get(number, '')})" for number in range(1, compiled.groups + 1))
            re.sub(groups, self.replacement, "")
        except (re.error, IndexError, TypeError) as error:
            raise RuleError("not a regular expression, or not its replacement", where=self, found=error) from error

    def rename(self, name: str) -> str | None:
        changed, count = re.subn(self.pattern, self.replacement, name)
        return changed if count else None


@dataclass(frozen=True, slots=True)
class Renamed:
    """What rules make of the names of a checkpoint."""

    names: dict[str, str]
    """From each name in the model to the name in the checkpoint."""
    used: dict[str, tuple[str, ...]]
    """From names in the model to the rules that led there, where there were any."""
    idle: tuple[str, ...]
    """Rules that applied to nothing."""
    clashes: tuple[tuple[str, tuple[str, ...]], ...]
    """Names in the model that several names of the checkpoint lead to."""


def check_rules(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules, if that is what they are. Raises `OptionError`."""
    checked = tuple(rules) if isinstance(rules, Iterable) else (rules,)
    for rule in checked:
        if not isinstance(rule, Rule) or isinstance(rule, type):
            raise OptionError("not a rule", expected="Prefix(...), Rename(...) or a list of such", found=repr(rule))
    return checked


def renamed_by(rules: Sequence[Rule], name: str) -> str:
    """What all rules together make of one name."""
    for rule in rules:
        changed = rule.rename(name)
        name = name if changed is None else changed
    return name


def apply_rules(rules: Sequence[Rule], names: Iterable[str]) -> Renamed:
    """Applies the rules in their order, each to what the ones before it made."""
    if not rules:
        return Renamed({name: name for name in names}, {}, (), ())
    sources: dict[str, list[str]] = {}
    used: dict[str, tuple[str, ...]] = {}
    applied = [0] * len(rules)
    for name in names:
        now, chain = name, []
        for index, rule in enumerate(rules):
            changed = rule.rename(now)
            if changed is not None:
                now = changed
                applied[index] += 1
                chain.append(repr(rule))
        sources.setdefault(now, []).append(name)
        if chain:
            used[now] = tuple(chain)
    return Renamed(
        {now: before[0] for now, before in sources.items()},
        used,
        tuple(repr(rule) for rule, count in zip(rules, applied, strict=True) if not count),
        tuple((now, tuple(before)) for now, before in sources.items() if len(before) > 1),
    )
