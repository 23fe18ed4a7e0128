"""The pages about errors, each with code that fails and code that works, and the search for a page."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from modelstate import errors, problems
from modelstate.errors import ModelStateError
from modelstate.problems import Problem

_LINK = re.compile(r"\[([^\]]*)\]\([\w./-]+\.md(?:#[\w-]+)?\)")


@dataclass(frozen=True, slots=True)
class Page:
    """A page about one cause."""

    name: str
    title: str
    """The text of the error, as a user would search for it."""
    text: str
    """Markdown, with the names of other pages in place of links to them."""
    classes: tuple[str, ...]
    """The errors and problems that name the page."""


@dataclass(frozen=True, slots=True)
class Match:
    """The pages for a name or a text."""

    pages: tuple[Page, ...]
    guess: bool = False
    """Whether nothing has this name, and the page is the nearest one."""


@cache
def pages() -> dict[str, Page]:
    """Returns all pages by name."""
    named: dict[str, list[str]] = {}
    for kind in classes():
        named.setdefault(kind.page, []).append(kind.__name__)
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


def classes() -> Iterator[type[ModelStateError] | type[Problem]]:
    """Yields every class of errors and of problems. Each names a page."""
    yield from (kind for kind in _defined(errors) if issubclass(kind, ModelStateError) and kind is not ModelStateError)
    yield from (kind for kind in _defined(problems) if issubclass(kind, Problem) and kind is not Problem)


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
    shares = {_share(page.title, query): page for page in pages().values()}
    most = max(shares, default=0)
    return Match((shares[most],), guess=True) if most > 0.5 else Match(())


def _defined(module: ModuleType) -> Iterator[type]:
    return (kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _words(text: str) -> str:
    return " ".join(text.lower().split())


def _share(title: str, query: str) -> float:
    """Returns the share of the title's words in the query, because texts of errors differ in names and numbers."""
    in_title, in_query = (set(re.findall(r"[a-z]{3,}", text.lower())) for text in (title, query))
    return len(in_title & in_query) / len(in_title)
