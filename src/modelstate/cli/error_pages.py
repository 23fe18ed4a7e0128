"""The pages about errors, each with code that fails and code that works, and the search for a page."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from modelstate import errors
from modelstate.errors import ModelStateError
from modelstate.problems import ProblemKind

_LINK = re.compile(r"\[([^\]]*)\]\([\w./-]+\.md(?:#[\w-]+)?\)")


class Page(msgspec.Struct, frozen=True):
    """A page about the errors of one cause."""

    name: str
    title: str
    """The texts of errors, as a user would search for them, divided by semicolons."""
    text: str
    """Markdown, with the names of other pages in place of links to them."""
    names: tuple[str, ...]
    """The errors and the kinds of problems that name the page."""


class Match(msgspec.Struct, frozen=True):
    """The pages for a name or a text."""

    pages: tuple[Page, ...]
    is_guess: bool = False
    """Whether nothing has this name or text, and the page is the nearest one."""


def named_pages() -> Iterator[tuple[str, str]]:
    """Yields the name of every class of errors and every kind of problems, with its page."""
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, ModelStateError) and kind.page:
            yield name, kind.page
    yield from ((kind.name, kind.page) for kind in ProblemKind)


@cache
def pages() -> dict[str, Page]:
    """Returns all pages by name."""
    package = Path(__file__).parent.parent
    folder = package / "pages"
    if not folder.is_dir():  # a checkout, or an editable install of one
        folder = package.parent.parent / "docs" / "errors"
    by_name = {}
    for path in sorted(folder.glob("*.md")):
        if path.stem != "index":
            text = _LINK.sub(r"\1", path.read_text(encoding="utf-8"))
            names = tuple(name for name, page in named_pages() if page == path.stem)
            by_name[path.stem] = Page(path.stem, text.partition("\n")[0].removeprefix("# "), text, names)
    return by_name


def find(query: str) -> Match:
    """Finds the page with a name, of a class or of a kind; the page of an error's text; else those with these words."""
    named = re.findall(r"modelstate explain ([\w-]+)", query)
    if known := tuple(pages()[name] for name in dict.fromkeys(named) if name in pages()):
        return Match(known)
    by_name = {_plain(name): page for page in pages().values() for name in (page.name, *page.names)}
    key = _plain(query.rpartition(".")[2])
    if key in by_name:
        return Match((by_name[key],))
    if not any(map(str.isspace, query)) and (near := difflib.get_close_matches(key, by_name, n=1, cutoff=0.75)):
        return Match((by_name[near[0]],), is_guess=True)
    words = " ".join(query.lower().split())
    containing = tuple(page for page in pages().values() if words and words in " ".join(page.text.lower().split()))
    if containing:
        return Match(containing)
    asked = set(re.findall("[a-z]{3,}", words))
    nearness = {page.name: max(_share(title, asked) for title in page.title.split("; ")) for page in pages().values()}
    nearest = max(nearness, key=nearness.__getitem__)
    return Match((pages()[nearest],), is_guess=True) if nearness[nearest] > 0.6 else Match(())


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _share(title: str, asked: set[str]) -> float:
    """Returns the share of a title's words that are among others, without those in quotes, which are names."""
    words = set(re.findall("[a-z]{3,}", re.sub(r'"[^"]*"', " ", title.lower())))
    return len(words & asked) / len(words) if len(words) > 1 else 0.0
