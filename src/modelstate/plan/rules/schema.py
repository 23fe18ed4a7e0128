"""Versions of a model's state, and the rules that lead from each to the next."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modelstate.errors import OptionError, SchemaError
from modelstate.plan.rules.chain import Rules
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
    predicates of `recognise`, by version, are asked: each gets the checkpoint as a mapping of names to specs. Or it is
    given: `rules=schema.rules("1.0")`.

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
        """The version of a checkpoint. Raises `SchemaError` where nothing says it, or several predicates do."""
        noted = checkpoint.metadata.get("schema")
        if noted is not None:
            return self.versions[self._index(str(noted), checkpoint.source)]
        for key in ("", *checkpoint.containers):
            part = checkpoint.select(key) if key else checkpoint
            found = [version for version in self.recognise if self._recognises(version, part)]
            if len(found) > 1:
                raise SchemaError(
                    "several versions recognise the checkpoint as theirs",
                    where=checkpoint.source,
                    found=", ".join(found),
                    remedy="make their predicates narrower, or give the version: rules=schema.rules(version)",
                )
            if found:
                return found[0]
        raise SchemaError(
            "nothing says of which version the checkpoint is",
            where=checkpoint.source,
            expected=f"one of {', '.join(self.versions)}, noted by modelstate.save or recognised by a predicate",
            remedy="give the version: rules=schema.rules(version)",
        )

    def _recognises(self, version: str, checkpoint: Checkpoint) -> bool:
        try:
            return bool(self.recognise[version](checkpoint))
        except Exception as error:
            raise SchemaError(
                f"the predicate that recognises version {version} raised",
                where=checkpoint.source,
                found=f"{type(error).__name__}: {error}".partition("\n")[0],
                remedy='let it ask for names that are there: "name" in checkpoint, checkpoint.get("name")',
            ) from error

    def _index(self, version: str, where: str = "") -> int:
        if version not in self.versions:
            raise SchemaError(
                "not a version of this schema", where=where, expected=", ".join(self.versions), found=repr(version)
            )
        return self.versions.index(version)


def _check_version(version: object) -> str:
    if not isinstance(version, str) or not version:
        raise OptionError("a version is text", expected='"2.0", say', found=repr(version))
    return version
