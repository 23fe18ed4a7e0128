"""Rules that change names or leave names out."""

import re
from dataclasses import dataclass

from modelstate.errors import RuleError
from modelstate.rules.rule import CodeRepr, RuleContext, Template, irreversible, matching, same_stars, template


@dataclass(frozen=True, repr=False)
class Prefix(CodeRepr):
    """Removes a prefix from the names of a checkpoint, adds one, or both.

    Args:
        strip: the prefix to remove. The rule applies to the names that begin with it.
        add: the prefix to add. Without `strip`, the rule applies to all names.

    Raises:
        RuleError: Both are empty, or one is not text.

    Examples:
        >>> ms.load(model, "ddp.pt", rules=ms.rules.Prefix(strip="module."))
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
class Rename(CodeRepr):
    """Renames what matches `pattern` to `replacement`.

    Args:
        pattern: a name in which each `*` matches any run of characters, as short as possible; or a compiled regular
            expression, each match of which in a name is replaced as `re.sub` does.
        replacement: the new name. Each `*` stands for what the `*` of the pattern at the same position matches. For a
            regular expression, the replacement of `re.sub`.

    A rule with a text pattern can be reversed; one with a regular expression cannot.

    Raises:
        RuleError: The two have different numbers of `*`, or the replacement names a group that the expression lacks, or
            both are equal.

    Examples:
        >>> ms.rules.Rename("encoder.layer.*.query.*", "blocks.*.q.*").rename("encoder.layer.0.query.weight")
        'blocks.0.q.weight'
        >>> ms.rules.Rename(re.compile(r"layer_(\\d+)"), r"layers.\\1").rename("layer_3.bias")
        'layers.3.bias'
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
            renamed, count = self.pattern.subn(self.replacement, name)
            return renamed if count else None
        parts = template(self.pattern).match(name)
        return None if parts is None else template(self.replacement).fill(parts)

    def reverse(self) -> "Rename":
        if isinstance(self.pattern, re.Pattern):
            raise irreversible(self, "a regular expression works one way")
        return Rename(self.replacement, self.pattern)


def _check_expression(pattern: re.Pattern[str], replacement: object, where: object) -> None:
    try:
        # An expression with the same groups that matches any text shows whether the replacement fits the groups.
        names = {number: f"?P<{name}>" for name, number in pattern.groupindex.items()}
        groups = "".join(f"({names.get(number, '')})" for number in range(1, pattern.groups + 1))
        re.sub(groups, replacement, "")  # type: ignore[call-overload]
    except (re.error, IndexError, TypeError) as error:
        raise RuleError("not the replacement of this regular expression", where=where, found=error) from error


@dataclass(frozen=True, repr=False)
class Ignore(CodeRepr):
    """Leaves out the entries of the checkpoint whose names match `pattern`.

    Args:
        pattern: a name in which each `*` matches any run of characters.

    Raises:
        RuleError: The pattern is empty, or not text.

    Examples:
        >>> ms.load(model, "pretrained.pt", rules=ms.rules.Ignore("classifier.*"), allow_missing="classifier.*")
    """

    pattern: str

    def __post_init__(self) -> None:
        Template(self.pattern)

    def rename(self, name: str) -> str | None:
        return None

    def apply(self, context: RuleContext) -> None:
        for name, entry, parts in matching(self.pattern, context.entries):
            if parts is None:
                context.keep(name, entry)
            else:
                context.mark_used()

    def reverse(self) -> "Ignore":
        raise irreversible(self, "the entries that it leaves out are lost")
