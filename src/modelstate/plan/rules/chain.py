"""Several rules, one after the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch

from modelstate.errors import ModelStateError, OptionError, RuleError
from modelstate.plan.derived import values_of
from modelstate.plan.explain import explain
from modelstate.plan.problems import IdlePattern, Problem
from modelstate.plan.rules.rule import Course, Entries, Entry, Rule, Value, Wanted, describe, irreversible
from modelstate.spec import Stored


class Rules(tuple[Rule, ...]):
    """Rules that are applied in their order, each to what the ones before it made."""

    __slots__ = ()

    def __new__(cls, rules: Iterable[Any] = ()) -> "Rules":
        return super().__new__(cls, _flat(rules))

    def __repr__(self) -> str:
        return f"Rules([{', '.join(map(repr, self))}])"

    @overload
    def __add__(self, other: tuple[Rule, ...]) -> "Rules": ...
    @overload
    def __add__(self, other: tuple[object, ...]) -> Any: ...
    def __add__(self, other: Any) -> Any:
        return Rules([*self, *other])

    def reverse(self) -> "Rules":
        """The rules of the way back: of each its reverse, the last one first.

        They undo what these did to a checkpoint, as long as no name that these left alone looks like one that they
        made. Raises `RuleError` for a rule that nothing takes back.
        """
        found = []
        for rule in reversed(self):
            if not hasattr(rule, "reverse"):
                raise irreversible(rule, "it has no method reverse")
            found.append(rule.reverse())
        return Rules(found)

    def apply(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the rules make of a state dict: names to tensors, or to other values. Nothing of it is changed.

        Tensors that are parts or views of others share their memory. Raises `RuleError` with all that is wrong.
        """
        entries = {
            name: Entry(value if isinstance(value, torch.Tensor) else Value(value), (name,))
            for name, value in state.items()
        }
        applied = apply_rules(self, entries, in_memory)
        problems: list[Problem] = [*applied.problems, *(IdlePattern(rule, option="rules") for rule in applied.idle)]
        if problems:
            raise RuleError(f"the rules cannot be applied; nothing has been changed\n{explain(problems)}")
        try:
            return {name: _value(entry) for name, entry in applied.entries.items()}
        except ModelStateError:
            raise
        except Exception as error:  # what a function of the user's raises when there are values
            raise RuleError("a rule cannot be carried out; nothing has been changed", found=describe(error)) from error


def _value(entry: Entry) -> Any:
    return entry.content.value if isinstance(entry.content, Value) else values_of(entry.content, in_memory)


def in_memory(stored: Stored) -> torch.Tensor:
    """The values of a tensor that no file has."""
    assert isinstance(stored, torch.Tensor)  # what a mapping of tensors holds
    return stored.detach()


@dataclass(frozen=True, slots=True)
class Applied:
    """What rules make of a checkpoint."""

    entries: Entries
    """By their names in the model."""
    idle: tuple[str, ...] = ()
    """Rules that applied to nothing."""
    problems: tuple[Problem, ...] = ()


def apply_rules(
    rules: Iterable[Rule],
    entries: Entries,
    read: Callable[[Stored], torch.Tensor],
    wanted: Callable[[Iterable[Rule]], Wanted] | None = None,
) -> Applied:
    """Applies the rules in their order, each to what the ones before it made.

    `read` gives the values of a tensor to rules that cannot do without; `wanted` says what the model has places for,
    by the names that it would have before the rules that are still to come.
    """
    rules = tuple(rules)
    course = Course(entries, read)
    for index, rule in enumerate(rules):
        course.find_wanted = None if wanted is None else partial(wanted, rules[index + 1 :])
        course.run(rule)
    return Applied(course.entries, tuple(course.idle), tuple(course.problems))


def check_rules(rules: Any) -> tuple[Rule, ...]:
    """The rules, if that is what they are. Raises `OptionError`."""
    return tuple(_flat(rules if isinstance(rules, Iterable) else (rules,)))


def _flat(rules: Iterable[Any]) -> Iterator[Rule]:
    for rule in rules:
        if isinstance(rule, list | tuple):
            yield from _flat(rule)
        elif not isinstance(rule, Rule) or isinstance(rule, type):
            raise OptionError("not a rule", expected="Prefix(...), Rename(...) or a list of such", found=repr(rule))
        else:
            yield rule


def renamed_by(rules: Iterable[Rule], name: str) -> str:
    """What all rules together make of one name."""
    for rule in rules:
        changed = rule.rename(name)
        name = name if changed is None else changed
    return name


def way_back(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The reverses of those rules that have one, the last one first: they lead to the names from before, nearly."""
    found: list[Rule] = []
    for rule in reversed(tuple(rules)):
        with suppress(RuleError):
            found += [rule.reverse()] if hasattr(rule, "reverse") else []
    return tuple(found)
