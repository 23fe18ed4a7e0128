"""A rule for one part of the names, which it sees without their prefix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from modelstate.plan.rules.rule import Course, Entries, Rule, Wanted, irreversible, rename_all


@dataclass(frozen=True)
class Within:
    """A rule for the names that begin with a prefix. All others are left alone."""

    prefix: str
    rule: Rule

    def __repr__(self) -> str:
        return f"{self.rule!r} in {self.prefix}*"

    def rename(self, name: str) -> str | None:
        changed = self.rule.rename(name[len(self.prefix) :]) if name.startswith(self.prefix) else None
        return None if changed is None else self.prefix + changed

    def apply(self, course: Course) -> None:
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

    def reverse(self) -> "Within":
        if not hasattr(self.rule, "reverse"):
            raise irreversible(self.rule, "it has no method reverse")
        return Within(self.prefix, self.rule.reverse())


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
    return unscoped(rule.rule) if isinstance(rule, Within) else rule
