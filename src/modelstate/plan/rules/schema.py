"""Versions of a model's state, and the rules that lead from each to the next."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from modelstate.errors import OptionError, SchemaError
from modelstate.plan.rules.chain import Rules, renamed_by
from modelstate.plan.rules.rule import Course, Rule, Shown
from modelstate.read.checkpoint import Checkpoint

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

    def apply(self, course: Course) -> None:
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
