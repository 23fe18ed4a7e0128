"""`Suggestion`, the result of `modelstate.suggest`: rules, what each of them explains, and what stays open."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelstate.rules.rule import Rule, as_code
from modelstate.suggestion.pairing import without_numbers
from modelstate.text_format import printable

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Tensors of the same shape and dtype that their names do not tell apart."""

    names: tuple[str, ...]
    """Names of the model."""
    candidates: tuple[str, ...]
    """Names of the checkpoint."""


class Suggestion(list[Rule]):
    """A list of suggested rules. Printing it shows the Python code that makes them, and what stays open.

    Example:
        >>> suggestion = ms.suggest(model, path)
        >>> if suggestion.complete:
        ...     ms.load(model, path, rules=suggestion)
    """

    def __init__(
        self,
        rules: Iterable[Rule] = (),
        *,
        counts: Sequence[int] = (),
        comments: Sequence[str] = (),
        explained: int = 0,
        total: int = 0,
        missing: Iterable[str] = (),
        unused: Iterable[str] = (),
        ambiguous: Iterable[Ambiguous] = (),
        notes: Iterable[str] = (),
    ) -> None:
        super().__init__(rules)
        self.counts = tuple(counts)
        """For each rule, the number of names of the model that it leads to."""
        self.comments = tuple(comments)
        """For each rule, what the user should know about it; empty for most."""
        self.explained = explained
        """The number of names of the model that get a value, with the rules or without."""
        self.total = total
        """The number of names of the model that need a value. A tied tensor needs one under one of its names."""
        self.missing = tuple(missing)
        """Names of the model without a match."""
        self.unused = tuple(unused)
        """Names of the checkpoint without a match."""
        self.ambiguous = tuple(ambiguous)
        self.notes = tuple(notes)

    @property
    def complete(self) -> bool:
        """Whether nothing stays open."""
        return not (self.missing or self.unused or self.ambiguous)

    def __repr__(self) -> str:
        """Returns how much of the model the rules explain; `print` shows the rules."""
        lists = ("missing", "unused", "ambiguous", "notes")
        lengths = [f"{len(getattr(self, name))} {name}" for name in lists if getattr(self, name)]
        explained = f"{self.explained} of {self.total} names of the model explained"
        return f"<{type(self).__name__}: {len(self)} rules, {', '.join([explained, *lengths])}>"

    def __str__(self) -> str:
        return "\n".join(
            [*self._code(), f"# {self.explained} of {self.total} names of the model explained", *self._open()]
        )

    def _code(self) -> list[str]:
        if not self:
            return ["rules = []"]
        lines = []
        for rule, count, comment in zip(self, self.counts, self.comments, strict=True):
            names = f"{count} {'name' if count == 1 else 'names'}"
            lines.append(f"    {as_code(rule)},  # {names}" + (f"; {comment}" if comment else ""))
        return ["rules = [", *lines, "]"]

    def _open(self) -> list[str]:
        lines = [f"# note: {printable(note)}" for note in self.notes]
        if self.missing:
            lines += [f"# names of the model without a source ({len(self.missing)}):", *_listed(self.missing)]
        if self.unused:
            lines += [f"# names of the checkpoint that are not used ({len(self.unused)}):", *_listed(self.unused)]
        if self.ambiguous:
            lines.append("# alike, and the names do not say which is which:")
        for group in self.ambiguous:
            names, candidates = (", ".join(_folded(side)[:_SHOWN]) for side in (group.names, group.candidates))
            lines.append(f"#   {printable(names)}  from one of  {printable(candidates)}")
        return lines

    def to_json(self) -> str:
        """Returns everything as JSON."""
        return json.dumps(
            {
                "rules": [
                    {"rule": as_code(rule), "names": count, "comment": comment}
                    for rule, count, comment in zip(self, self.counts, self.comments, strict=True)
                ],
                "complete": self.complete,
                "explained": self.explained,
                "total": self.total,
                "missing": list(self.missing),
                "unused": list(self.unused),
                "ambiguous": [
                    {"names": list(group.names), "candidates": list(group.candidates)} for group in self.ambiguous
                ],
                "notes": list(self.notes),
            },
            indent=1,
        )


def _listed(names: Sequence[str]) -> list[str]:
    folded = _folded(names)
    more = [f"#   ... and {len(folded) - _SHOWN} more"] if len(folded) > _SHOWN else []
    return [*(f"#   {printable(name)}" for name in folded[:_SHOWN]), *more]


def _folded(names: Sequence[str]) -> list[str]:
    """Returns the names, with one line for names that differ only in numbers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(without_numbers(name).replace("#", "*"), []).append(name)
    return [group[0] if len(group) == 1 else f"{text} ({len(group)})" for text, group in groups.items()]
