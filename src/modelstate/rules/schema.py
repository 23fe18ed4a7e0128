"""Rules in sequence, and schemas: the versions of a model's state with the rules between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import groupby
from typing import Any, NoReturn, cast

import msgspec
import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import OptionError, RuleError, code_errors
from modelstate.problems import Problem, ProblemKind, one_line, rule_error
from modelstate.rules.expression import values_of
from modelstate.rules.names import Fill
from modelstate.rules.rule import (
    CodeRepr,
    Entries,
    Entry,
    ModelTensors,
    Rule,
    RuleContext,
    Value,
    literal_names,
    new_name,
    reverse_of,
)
from modelstate.spec import Stored
from modelstate.tensor_spec import TensorSpec
from modelstate.text_format import short_repr


class Rules(tuple[Rule, ...]):
    """Rules that are applied in order, each to the result of the rules before it.

    Args:
        rules: Rules, or nested lists of rules.

    Raises:
        OptionError: An item is not a rule.

    Examples:
        >>> rules = ms.rules.Rules([ms.rules.Prefix(strip="module."), ms.rules.Rename("fc.*", "head.*")])
        >>> rules.reverse()
        Rules([Rename('head.*', 'fc.*'), Prefix(add='module.')])
    """

    __slots__ = ()

    def __new__(cls, rules: Iterable[object] = ()) -> Rules:
        return super().__new__(cls, _flat(rules))

    def __repr__(self) -> str:
        return f"Rules([{', '.join(map(repr, self))}])"

    def __add__(self, other: Iterable[object]) -> Rules:
        return Rules([*self, *other])

    def reverse(self) -> Rules:
        """Returns the rules of the way back: the reverse of each rule, the last one first.

        They undo what these rules did to a checkpoint, unless a name that these rules left alone looks like one that
        they made.

        Returns:
            The reverses, as rules.

        Raises:
            RuleError: A rule has no reverse.

        Examples:
            >>> ms.rules.Rules([ms.rules.Rename("fc.*", "head.*")]).reverse()
            Rules([Rename('head.*', 'fc.*')])
        """
        return Rules([reverse_of(rule) for rule in reversed(self)])

    def apply(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Applies the rules to a state dict.

        Args:
            state: Names to tensors or other values. It is not changed.

        Returns:
            A new dict. Tensors that are parts or views of tensors of `state` share their memory.

        Raises:
            RuleError: The rules cannot be applied; the error has every problem.

        Examples:
            >>> ms.rules.Rules([ms.rules.Prefix(strip="module.")]).apply({"module.step": 3})
            {'step': 3}
        """
        entries = {
            name: Entry(value if isinstance(value, torch.Tensor) else Value(value), (name,))
            for name, value in state.items()
        }
        applied = apply_rules(self, entries, in_memory)
        applied.check("the rules cannot be applied; nothing has been changed")
        with code_errors(RuleError, "a rule cannot be carried out; nothing has been changed"):
            return {
                name: entry.content.value if isinstance(entry.content, Value) else values_of(entry.content, in_memory)
                for name, entry in applied.entries.items()
            }


def in_memory(stored: Stored) -> torch.Tensor:
    """Returns the values of a tensor that is not in a file."""
    assert isinstance(stored, torch.Tensor)  # a mapping of tensors holds nothing else
    return stored.detach()


class Applied(msgspec.Struct, frozen=True):
    """The result of rules on a checkpoint."""

    entries: Entries
    """The entries by their names in the model."""
    idle: tuple[str, ...] = ()
    """Rules that applied to nothing."""
    problems: tuple[Problem, ...] = ()

    def check(self, what: str, where: str = "") -> None:
        """Raises `RuleError` with every problem, and with the rules that applied to nothing."""
        problems: list[Problem] = [
            *self.problems,
            *(Problem(ProblemKind.IDLE_PATTERN, rule, found="rules") for rule in self.idle),
        ]
        if problems:
            raise rule_error(what, problems, where)


def apply_rules(
    rules: Iterable[Rule],
    entries: Entries,
    read: Callable[[Stored], torch.Tensor],
    model_tensors: Callable[[Iterable[Rule]], ModelTensors] | None = None,
) -> Applied:
    """Applies rules in order, each to the result of the rules before it.

    Args:
        rules: The rules.
        entries: The entries of the checkpoint.
        read: Returns the values of a stored tensor, for rules that need values.
        model_tensors: Returns the tensors of the model, by the names that they have before the rules that it gets.
    """
    rules = tuple(rules)
    context = RuleContext(entries, read)
    renaming_rules = [rule for rule in rules if not isinstance(rule, Fill)]
    applied = 0
    """The number of these that have been applied. Between two of them, the model has the same names."""

    @cache
    def model_tensors_after(applied: int) -> ModelTensors:
        assert model_tensors is not None
        return model_tensors(renaming_rules[applied:])

    for rule in rules:
        applied += not isinstance(rule, Fill)
        context.find_model_tensors = None if model_tensors is None else partial(model_tensors_after, applied)
        context.run(rule)
    places = {name: place for place, name in enumerate(entries)}
    ordered = sorted(
        context.entries.items(), key=lambda item: min(map(places.__getitem__, item[1].sources), default=len(places))
    )
    return Applied(dict(ordered), tuple(context.idle), tuple(context.problems))


def check_rules(rules: object) -> tuple[Rule, ...]:
    """Returns a rule, or nested lists of rules, as a flat tuple. Raises `OptionError` for anything else."""
    return tuple(_flat([rules]))


def _flat(rules: Iterable[object]) -> Iterator[Rule]:
    for rule in rules:
        if isinstance(rule, Iterable) and not isinstance(rule, str | Mapping | Rule):
            yield from _flat(rule)
        elif not isinstance(rule, Rule) or isinstance(rule, type | os.PathLike):  # a pathlib.Path has a `rename`, too
            raise OptionError(
                "not a rule",
                expected="a rule or a list of rules, such as [ms.rules.Rename('old.*', 'new.*')]",
                found=short_repr(rule),
            )
        else:
            yield rule


def renaming(rules: Iterable[Rule]) -> Callable[[str], str]:
    """Returns a function from a name to the name that all rules together give it.

    The time of a call does not depend on the number of literal rules for other names.
    """
    steps: list[Callable[[str], str | None]] = []
    for is_literal, group in groupby(rules, lambda rule: bool(literal_names(rule))):
        if not is_literal:
            steps += [partial(new_name, rule) for rule in group]
            continue
        result: dict[str, str] = {}
        """What this rule and the later ones of the group make of a name."""
        for rule in reversed(tuple(group)):
            renames = {name: renamed for name in literal_names(rule) if (renamed := new_name(rule, name)) is not None}
            result |= {name: result.get(renamed, renamed) for name, renamed in renames.items()}
        steps.append(result.get)

    def renamed_by_all(name: str) -> str:
        for step in steps:
            renamed = step(name)
            name = name if renamed is None else renamed
        return name

    return renamed_by_all


def way_back(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns the reverses of the rules that have one, the last one first.

    They lead to the names before the rules, except where a rule cannot be reversed.
    """
    reverses: list[Rule] = []
    for rule in reversed(tuple(rules)):
        with suppress(RuleError):
            reverses.append(reverse_of(rule))
    return tuple(reverses)


Recognise = Callable[[Mapping[str, TensorSpec]], bool]
"""Tells from the names and specs of a checkpoint whether it is of a version."""


class Migration(CodeRepr, msgspec.Struct, frozen=True):
    """The rules from the previous version to `version`.

    Args:
        version: The version that the rules lead to.
        rules: Rules, in order.

    Raises:
        OptionError: The version is not text, or an item is not a rule.

    Examples:
        >>> ms.rules.Migration("2.0", [ms.rules.Rename("fc.*", "head.*")])
        Migration('2.0', [Rename('fc.*', 'head.*')])
    """

    version: str
    rules: Rules

    def __post_init__(self) -> None:
        _check_version(self.version)
        msgspec.structs.force_setattr(self, "rules", Rules(self.rules))


class Reached(CodeRepr, msgspec.Struct, frozen=True):
    """Marks the place in a chain of rules where a checkpoint of this version begins."""

    version: str

    def rename(self, name: str) -> str | None:
        return None

    def apply(self, context: RuleContext) -> None:
        context.mark_used()
        for name, entry in context.entries.items():
            # Forgets earlier names: a later version may use a name again, which is not a cycle of rules.
            context.leave_out(name)
            context.put(name, entry._replace(names=()))

    def reverse(self) -> Reached:
        return self


class Schema:
    """The versions of a model's state, the oldest first. It can be passed wherever rules can.

    The version of a checkpoint is the one that `modelstate.save(..., schema=)` noted in it. If none is noted, the
    predicates of `recognise` decide. To choose it yourself, pass `rules=schema.rules("1.0")`.

    Args:
        first: The oldest version.
        migrations: The later versions, each with the rules that lead to it.
        recognise: A predicate by version. It gets a mapping from name to `TensorSpec` with the part of the checkpoint
            that is loaded, and nothing else of the file.

    Raises:
        OptionError: A version is not text, or is listed twice.

    Examples:
        >>> schema = ms.rules.Schema("1.0", [ms.rules.Migration("2.0", [ms.rules.Rename("fc.*", "head.*")])])
        >>> ms.load(model, "old.safetensors", rules=schema)
    """

    def __init__(
        self, first: str, migrations: Iterable[Migration] = (), *, recognise: Mapping[str, Recognise] | None = None
    ) -> None:
        self.migrations = tuple(migrations)
        for migration in self.migrations:
            if not isinstance(migration, Migration):
                raise OptionError("not a migration", expected="Migration(version, rules)", found=short_repr(migration))
        self.versions = (_check_version(first), *(migration.version for migration in self.migrations))
        """All versions, the oldest first."""
        if len(set(self.versions)) < len(self.versions):
            raise OptionError("a version is listed twice", found=", ".join(self.versions))
        self.recognise = dict(recognise or {})
        for version, predicate in self.recognise.items():
            self._index(version)
            if not callable(predicate):
                raise OptionError(
                    "recognise= takes functions of a checkpoint", where=version, found=short_repr(predicate)
                )

    def __repr__(self) -> str:
        return f"Schema({self.versions[0]!r}, [{', '.join(map(repr, self.migrations))}])"

    @property
    def version(self) -> str:
        """The current version: the last one."""
        return self.versions[-1]

    def rules(self, since: str, to: str | None = None) -> Rules:
        """Returns the rules from one version to another.

        Args:
            since: The version to begin with.
            to: The version to end with, by default the current one. For an older version, the rules are reversed.

        Returns:
            The rules, in order.

        Raises:
            RuleError: A version is unknown.
            RuleError: A rule has no reverse.

        Examples:
            >>> schema = ms.rules.Schema("1.0", [ms.rules.Migration("2.0", [ms.rules.Rename("fc.*", "head.*")])])
            >>> schema.rules("1.0")
            Rules([Rename('fc.*', 'head.*')])
            >>> ms.load(model, "unmarked.safetensors", rules=schema.rules("1.0"))
        """
        begin, end = self._index(since), self._index(self.version if to is None else to)
        if end < begin:
            return self.rules(self.versions[end], since).reverse()
        rules: list[Rule] = []
        for migration in self.migrations[begin:end]:
            rules += [*migration.rules, Reached(migration.version)]
        return Rules(rules[:-1])

    def rules_for(self, checkpoint: Checkpoint) -> Rules:
        """Returns the rules from the version of a checkpoint to the current one.

        Args:
            checkpoint: One state dict; of a file with several, the part that is loaded.

        Returns:
            The rules, in order; none for a checkpoint of the current version.

        Raises:
            RuleError: No version is noted, and no predicate or several recognise the checkpoint.

        Examples:
            >>> schema.rules_for(ms.open("old.safetensors"))
            Rules([Rename('fc.*', 'head.*')])
        """
        return self.rules(self.version_of(checkpoint))

    def version_of(self, checkpoint: Checkpoint) -> str:
        """Returns the version of a checkpoint.

        Args:
            checkpoint: One state dict; of a file with several, the part that is loaded.

        Returns:
            The version that is noted in the checkpoint, or else the one whose predicate recognises it.

        Raises:
            RuleError: No version is noted, and no predicate or several recognise the checkpoint.

        Examples:
            >>> schema.version_of(ms.open("old.safetensors"))
            '1.0'
        """
        noted = self._noted(checkpoint)
        if noted is not None:
            return noted
        part = f" [{checkpoint.key}]" if checkpoint.key else ""
        inner = [key for key in checkpoint.containers if key]
        return self._recognised(checkpoint, checkpoint.source + part, inner)

    def version_of_names(self, names: Iterable[str], where: str) -> str:
        """Returns the version of a state whose names alone are known, such as an optimizer's.

        Args:
            names: The names of the state.
            where: The text that says in errors which state it is.

        Returns:
            The version whose predicate recognises the names.

        Raises:
            RuleError: No predicate or several recognise the names, or one asks for a shape or a dtype.

        Examples:
            >>> schema.version_of_names(["fc.weight", "fc.bias"], "the optimizer")
            '1.0'
        """
        specs = dict.fromkeys(names, _NameOnly())
        return self._recognised(cast(Mapping[str, TensorSpec], specs), where)

    def renamings(self, checkpoint: Checkpoint) -> list[Callable[[str], str]]:
        """Returns the ways in which the names of a checkpoint may have changed.

        Args:
            checkpoint: One state dict; of a file with several, the part that is loaded.

        Returns:
            For each version that the checkpoint may have, a function from its names to the current names.

        Raises:
            RuleError: A version is noted that the schema does not have.

        Examples:
            >>> [renamed] = schema.renamings(ms.open("noted.safetensors"))
            >>> renamed("fc.weight")
            'head.weight'
        """
        noted = self._noted(checkpoint)
        return [renaming(self.rules(version)) for version in (self.versions if noted is None else [noted])]

    def _noted(self, checkpoint: Checkpoint) -> str | None:
        noted = checkpoint.contents.metadata.get("schema")  # `metadata` decodes the values that were saved with it
        return None if noted is None else self.versions[self._index(str(noted), checkpoint.source)]

    def _recognised(self, specs: Mapping[str, TensorSpec], where: str, parts: Sequence[str] = ()) -> str:
        versions = []
        for version, predicate in self.recognise.items():
            try:
                versions += [version] if predicate(specs) else []
            except Exception as error:
                raise RuleError(
                    f"the predicate that recognises version {version} raised",
                    where=where,
                    found=one_line(error),
                    remedy='let it ask for names that are there: "name" in checkpoint, checkpoint.get("name")',
                ) from error
        if len(versions) == 1:
            return versions[0]
        if versions:
            raise RuleError(
                "several versions recognise the checkpoint as theirs",
                where=where,
                found=", ".join(versions),
                remedy="make their predicates narrower, or give the version: rules=schema.rules(version)",
            )
        remedy = "give the version: rules=schema.rules(version)"
        if parts:
            remedy += f"; or the part that is meant: key={parts[0]!r}" + (f" or {parts[1]!r}" if parts[1:] else "")
        raise RuleError(
            "the version of the checkpoint is unknown",
            where=where,
            expected=f"one of {', '.join(self.versions)}, noted by modelstate.save or recognised by a predicate",
            remedy=remedy,
        )

    def _index(self, version: str, where: str = "") -> int:
        if version not in self.versions:
            raise RuleError(
                "not a version of this schema",
                where=where,
                expected=", ".join(self.versions),
                found=short_repr(version),
            )
        return self.versions.index(version)


class _NameOnly:
    """Replaces a `TensorSpec` if only the name of a tensor is known."""

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"only the names of the parameters are known, and not the {attribute} of one")


def _check_version(version: object) -> str:
    if not isinstance(version, str) or not version:
        raise OptionError("a version must be text", expected='text such as "2.0"', found=short_repr(version))
    return version
