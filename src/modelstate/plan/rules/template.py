"""Names with wildcards, and names that are made of what these stood for."""

import re
from dataclasses import dataclass, field
from functools import lru_cache

from modelstate.errors import RuleError


@dataclass(frozen=True, slots=True)
class Template:
    """A name in which each `*` is any run of characters, dots too, and each as short as it can be."""

    text: str
    stars: int = field(init=False)
    _expression: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise RuleError(
                "a rule applies to names", expected="a name, with * for any part of it", found=repr(self.text)
            )
        parts = self.text.split("*")
        object.__setattr__(self, "stars", len(parts) - 1)
        object.__setattr__(self, "_expression", re.compile("(.*?)".join(map(re.escape, parts)), re.DOTALL))

    def match(self, name: str) -> tuple[str, ...] | None:
        """What the wildcards stand for in this name; None for another name."""
        found = self._expression.fullmatch(name)
        return found.groups() if found is not None else None

    def fill(self, parts: tuple[str, ...]) -> str:
        """The name with these parts for the wildcards."""
        pieces = self.text.split("*")
        return "".join(piece + part for piece, part in zip(pieces, (*parts, ""), strict=True))


@lru_cache(maxsize=8192)
def template(text: str) -> Template:
    """The template of a text that has been checked; rules ask for theirs once for every name."""
    return Template(text)


def same_stars(first: str, *others: str) -> None:
    """Raises `RuleError` where names have not as many wildcards as the first."""
    stars = Template(first).stars
    for other in others:
        if Template(other).stars != stars:
            raise RuleError(
                "the wildcards of a rule do not correspond",
                where=f"{first!r} and {other!r}",
                expected="as many * on both sides: the first stands for the first, and so on",
                remedy="a regular expression can do more: Rename(re.compile(...), ...)",
            )
