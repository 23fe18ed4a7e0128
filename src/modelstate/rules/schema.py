"""Rules in sequence, and schemas: versions of a model's state with the rules between them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import ModelStateError, OptionError, RuleError, SchemaError
from modelstate.problems import IdlePattern, Problem, explain
from modelstate.rules.expression import values_of
from modelstate.rules.rule import Entries, Entry, Rule, RuleContext, Shown, Value, Wanted, describe, irreversible
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
    course = RuleContext(entries, read)
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


Recognise = Callable[[Mapping[str, Any]], bool]
"""Whether a checkpoint, as names to `TensorSpec`, is of a version."""


@dataclass(frozen=True, repr=False)
class Migration(Shown):
    """What leads from the version before to `version`: its rules, in their order."""

    version: str
    rules: Rules

    def __post_init__(self) -> None:
        _check_version(self.version)
        object.__setattr__(self, "rules", Rules(self.rules))


@dataclass(frozen=True, repr=False)
class Reached(Shown):
    """Marks in a chain of rules that what follows begins with a checkpoint of this version."""

    version: str

    def rename(self, name: str) -> str | None:
        return None

    def apply(self, course: RuleContext) -> None:
        course.begin_again()

    def reverse(self) -> "Reached":
        return self


class Schema:
    """The versions of a model's state, from the first on. It can be given wherever rules can.

    The version of a checkpoint is what `modelstate.save(..., schema=)` noted in it. Where nothing is noted, the
    predicates of `recognise`, by version, are called: each gets a mapping of names to specs, of the part of the
    checkpoint that is loaded and of nothing else in the file. Or the version is given: `rules=schema.rules("1.0")`.

    Raises `OptionError` for versions that are no text, or are there twice.
    """

    def __init__(
        self, first: str, migrations: Iterable[Migration] = (), *, recognise: Mapping[str, Recognise] | None = None
    ) -> None:
        self.migrations = tuple(migrations)
        for migration in self.migrations:
            if not isinstance(migration, Migration):
                raise OptionError("not a migration", expected="Migration(version, rules)", found=repr(migration))
        self.versions = (_check_version(first), *(migration.version for migration in self.migrations))
        """All versions, the oldest first."""
        if len(set(self.versions)) < len(self.versions):
            raise OptionError("a version is there twice", found=", ".join(self.versions))
        self.recognise = dict(recognise or {})
        for version, predicate in self.recognise.items():
            self._index(version)
            if not callable(predicate):
                raise OptionError("recognise= takes functions of a checkpoint", where=version, found=repr(predicate))

    def __repr__(self) -> str:
        return f"Schema({self.versions[0]!r}, [{', '.join(map(repr, self.migrations))}])"

    @property
    def version(self) -> str:
        """The current version: the last one."""
        return self.versions[-1]

    def rules(self, since: str, to: str | None = None) -> Rules:
        """The rules from one version to another, by default the current; to an older one by their reverses.

        Raises `SchemaError` for a version that is none of these, `RuleError` where there is no way back.
        """
        begin, end = self._index(since), self._index(self.version if to is None else to)
        if end < begin:
            return self.rules(self.versions[end], since).reverse()
        found: list[Rule] = []
        for migration in self.migrations[begin:end]:
            found += [*migration.rules, Reached(migration.version)]
        return Rules(found[:-1])

    def rules_for(self, checkpoint: Checkpoint) -> Rules:
        """The rules that lead from a checkpoint to the current version. Raises `SchemaError`."""
        return self.rules(self.version_of(checkpoint))

    def version_of(self, checkpoint: Checkpoint) -> str:
        """The version of a checkpoint, which is one state dict: of a file with several, the part that is meant.

        Raises `SchemaError` where nothing says it, or several predicates do.
        """
        noted = self._noted(checkpoint)
        if noted is not None:
            return noted
        part = f" [{checkpoint.key}]" if checkpoint.key else ""
        inner = [key for key in checkpoint.containers if key]
        return self._recognised(checkpoint, checkpoint.source + part, inner)

    def version_of_names(self, names: Iterable[str], where: str) -> str:
        """The version of a state of which only the names are known, as of an optimizer's. Raises `SchemaError`.

        A predicate that asks for a shape or a dtype gets an error.
        """
        return self._recognised(dict.fromkeys(names, _NameOnly()), where)

    def _recognised(self, names: Mapping[str, Any], where: str, parts: Sequence[str] = ()) -> str:
        found = [version for version in self.recognise if self._recognises(version, names, where)]
        if len(found) == 1:
            return found[0]
        if found:
            raise SchemaError(
                "several versions recognise the checkpoint as theirs",
                where=where,
                found=", ".join(found),
                remedy="make their predicates narrower, or give the version: rules=schema.rules(version)",
            )
        remedy = "give the version: rules=schema.rules(version)"
        if parts:
            remedy += f"; or the part that is meant: key={parts[0]!r}" + (f" or {parts[1]!r}" if parts[1:] else "")
        raise SchemaError(
            "nothing says of which version the checkpoint is",
            where=where,
            expected=f"one of {', '.join(self.versions)}, noted by modelstate.save or recognised by a predicate",
            remedy=remedy,
        )

    def renamings(self, checkpoint: Checkpoint) -> list[Callable[[str], str]]:
        """What the rules make of a name: a function for each version that the checkpoint may have."""
        noted = self._noted(checkpoint)
        return [partial(renamed_by, self.rules(version)) for version in (self.versions if noted is None else [noted])]

    def _noted(self, checkpoint: Checkpoint) -> str | None:
        noted = checkpoint.metadata.get("schema")
        return None if noted is None else self.versions[self._index(str(noted), checkpoint.source)]

    def _recognises(self, version: str, names: Mapping[str, Any], where: str) -> bool:
        try:
            return bool(self.recognise[version](names))
        except Exception as error:
            raise SchemaError(
                f"the predicate that recognises version {version} raised",
                where=where,
                found=f"{type(error).__name__}: {error}".partition("\n")[0],
                remedy='let it ask for names that are there: "name" in checkpoint, checkpoint.get("name")',
            ) from error

    def _index(self, version: str, where: str = "") -> int:
        if version not in self.versions:
            raise SchemaError(
                "not a version of this schema", where=where, expected=", ".join(self.versions), found=repr(version)
            )
        return self.versions.index(version)


class _NameOnly:
    """In place of a `TensorSpec` where nothing but the name is known."""

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"only the names of the parameters are known, and not the {attribute} of one")


def _check_version(version: object) -> str:
    if not isinstance(version, str) or not version:
        raise OptionError("a version is text", expected='"2.0", say', found=repr(version))
    return version
