"""The pages about errors, each with code that fails and code that works, and the search for a page."""

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
    """A page about one cause."""

    name: str
    title: str
    """The text of the error, as a user would search for it."""
    text: str
    """Markdown, with the names of other pages in place of links to them."""
    classes: tuple[str, ...]
    """The errors and problems that name the page."""


class Match(msgspec.Struct, frozen=True):
    """The pages for a name or a text."""

    pages: tuple[Page, ...]
    guess: bool = False
    """Whether nothing has this name, and the page is the nearest one."""


@cache
def pages() -> dict[str, Page]:
    """Returns all pages by name."""
    named: dict[str, list[str]] = {}
    for name, page in named_pages():
        named.setdefault(page, []).append(name)
    package = Path(__file__).parent.parent
    folder = package / "pages"
    if not folder.is_dir():  # a checkout, or an editable install of one
        folder = package.parent.parent / "docs" / "errors"
    by_name = {}
    for path in sorted(folder.glob("*.md")):
        if path.stem != "index":
            text = _LINK.sub(r"\1", path.read_text(encoding="utf-8"))
            title = text.partition("\n")[0].removeprefix("# ")
            by_name[path.stem] = Page(path.stem, title, text, tuple(named.get(path.stem, ())))
    return by_name


def named_pages() -> Iterator[tuple[str, str]]:
    """Yields the name of every class of errors and every kind of problems, with its page."""
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, ModelStateError) and kind.page:
            yield name, kind.page
    yield from ((kind.name, kind.page) for kind in ProblemKind)


def find(query: str) -> Match:
    """Finds the page with a name or of a class, in any case; else the pages with these words; else the nearest one."""
    names = {_plain(name): page for page in pages().values() for name in (page.name, *page.classes)}
    key = _plain(query.rpartition(".")[2])
    if key in names:
        return Match((names[key],))
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.75)
    is_name = not any(map(str.isspace, query))
    if near and is_name:
        return Match((names[near[0]],), guess=True)
    words = _words(query)
    containing = tuple(page for page in pages().values() if words and words in _words(page.text))
    if containing or is_name:
        return Match(containing)
    of_query = _quoted_and_other_words(query)
    nearest = max(pages().values(), key=lambda page: _nearness(page, *of_query))
    return Match((nearest,), guess=True) if _nearness(nearest, *of_query)[0] > 0.5 else Match(())


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _words(text: str) -> str:
    return " ".join(text.lower().split())


def _nearness(page: Page, quoted_in_query: set[str], in_query: set[str]) -> tuple[float, int, int, bool]:
    """Returns how near a page is to the text of an error, by the words of the text: those in quotes, and the others.

    First comes the share of the title's words in the query, because texts of errors differ in names and numbers. Words
    in quotes are such names: they decide between titles that are the same without them.
    """
    quoted, words = _quoted_and_other_words(page.title)
    if len(words) < _FEW_WORDS:
        words, in_query = words | quoted, in_query | quoted_in_query
    shared = len(words & in_query)
    return shared / len(words), shared, len(quoted & quoted_in_query), bool(page.classes)


_FEW_WORDS = 3


def _quoted_and_other_words(text: str) -> tuple[set[str], set[str]]:
    other = re.sub(r'"[^"]*"', " ", text.lower())
    quoted = " ".join(re.findall(r'"[^"]*"', text.lower()))
    return set(re.findall(r"[a-z]{3,}", quoted)), set(re.findall(r"[a-z]{3,}", other))
