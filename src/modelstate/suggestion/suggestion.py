"""What was worked out: rules, what each of them explains, and what stays open."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelstate.rules.rule import Rule, as_code
from modelstate.suggestion.pairing import without_numbers
from modelstate.text_format import printable

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Tensors that are alike, and whose names do not say which is which."""

    names: tuple[str, ...]
    """Of the model."""
    candidates: tuple[str, ...]
    """Of the checkpoint."""


class Suggestion(list[Rule]):
    """Rules, to be looked at and passed on. Printing it gives the Python that makes them, and what stays open."""

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
        """For each rule, how many names of the model it leads to."""
        self.comments = tuple(comments)
        """For each rule, what has to be known of it; empty for most."""
        self.explained = explained
        """Names of the model that get a value, with the rules or without."""
        self.total = total
        """Names of the model that want one. A tied tensor that gets its value under another name is explained."""
        self.missing = tuple(missing)
        """Names of the model that nothing was found for."""
        self.unused = tuple(unused)
        """Names of the checkpoint that nothing was found for."""
        self.ambiguous = tuple(ambiguous)
        self.notes = tuple(notes)

    @property
    def complete(self) -> bool:
        """Whether nothing stays open."""
        return not (self.missing or self.unused or self.ambiguous)

    def __repr__(self) -> str:
        """How much of the model the rules explain; `print` shows the rules."""
        still = [f"{len(some)} {what}" for some, what in self._left() if some]
        explained = f"{self.explained} of {self.total} names of the model explained"
        return f"<{type(self).__name__}: {len(self)} rules, {', '.join([explained, *still])}>"

    def _left(self) -> list[tuple[tuple[object, ...], str]]:
        return [
            (self.missing, "missing"),
            (self.unused, "unused"),
            (self.ambiguous, "ambiguous"),
            (self.notes, "notes"),
        ]

    def __str__(self) -> str:
        return "\n".join(
            [*self._code(), f"# {self.explained} of {self.total} names of the model explained", *self._open()]
        )

    def _code(self) -> list[str]:
        if not self:
            return ["rules = []"]
        lines = []
        for rule, count, comment in zip(self, self.counts, self.comments, strict=True):
            said = f"{count} {'name' if count == 1 else 'names'}" + (f"; {comment}" if comment else "")
            lines.append(f"    {as_code(rule)},  # {said}")
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
        """All of it, machine-readable."""
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
                "ambiguous": [{"names": list(one.names), "candidates": list(one.candidates)} for one in self.ambiguous],
                "notes": list(self.notes),
            },
            indent=1,
        )


def _listed(names: Sequence[str]) -> list[str]:
    folded = _folded(names)
    more = [f"#   ... and {len(folded) - _SHOWN} more"] if len(folded) > _SHOWN else []
    return [*(f"#   {printable(name)}" for name in folded[:_SHOWN]), *more]


def _folded(names: Sequence[str]) -> list[str]:
    """Names, those that differ in numbers only as one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(without_numbers(name).replace("#", "*"), []).append(name)
    return [one[0] if len(one) == 1 else f"{text} ({len(one)})" for text, one in groups.items()]
