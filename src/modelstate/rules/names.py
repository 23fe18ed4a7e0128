"""Rules that change names, or leave some out."""

import re
from dataclasses import dataclass

from modelstate.errors import RuleError
from modelstate.rules.rule import RuleContext, Shown, Template, irreversible, matching, same_stars, template


@dataclass(frozen=True, repr=False)
class Prefix(Shown):
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

    def reverse(self) -> "Prefix":
        return Prefix(self.add, self.strip)


@dataclass(frozen=True, repr=False)
class Rename(Shown):
    """Changes names: those that are like `pattern` become `replacement`.

    In text, each `*` is any run of characters, as short as it can be, and stands for the same on both sides:
    `Rename("encoder.layer.*.query.*", "blocks.*.q.*")`. Such a rule can be reversed. With a compiled regular
    expression, every match of it in a name is replaced as `re.sub` does:
    `Rename(re.compile(r"layer_(\\d+)"), r"layers.\\1")`.
    """

    pattern: str | re.Pattern[str]
    replacement: str

    def __post_init__(self) -> None:
        if isinstance(self.pattern, re.Pattern):
            _check_expression(self.pattern, self.replacement, self)
        elif self.pattern == self.replacement:
            raise RuleError("a Rename that changes nothing", where=self)
        else:
            same_stars(self.pattern, self.replacement)

    def rename(self, name: str) -> str | None:
        if isinstance(self.pattern, re.Pattern):
            changed, count = self.pattern.subn(self.replacement, name)
            return changed if count else None
        parts = template(self.pattern).match(name)
        return None if parts is None else template(self.replacement).fill(parts)

    def reverse(self) -> "Rename":
        if isinstance(self.pattern, re.Pattern):
            raise irreversible(self, "a regular expression works one way")
        return Rename(self.replacement, self.pattern)


def _check_expression(pattern: re.Pattern[str], replacement: object, where: object) -> None:
    try:
        # An expression with the same groups that surely matches shows whether the replacement fits them.
        names = {number: f"?P<{name}>" for name, number in pattern.groupindex.items()}
        groups = "".join(f"({names.get(number, '')})" for number in range(1, pattern.groups + 1))
        re.sub(groups, replacement, "")  # type: ignore[call-overload]
    except (re.error, IndexError, TypeError) as error:
        raise RuleError("not the replacement of this regular expression", where=where, found=error) from error


@dataclass(frozen=True, repr=False)
class Ignore(Shown):
    """Leaves out what the checkpoint has under names like `pattern`; `*` is any run of characters."""

    pattern: str

    def __post_init__(self) -> None:
        Template(self.pattern)

    def rename(self, name: str) -> str | None:
        return None

    def apply(self, course: RuleContext) -> None:
        for name, entry, parts in matching(self.pattern, course.entries):
            if parts is None:
                course.keep(name, entry)
            else:
                course.drop()

    def reverse(self) -> "Ignore":
        raise irreversible(self, "what was left out is gone")
