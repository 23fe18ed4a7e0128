"""The pages about errors: one a cause, each with code that fails and code that works."""

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
    """The text of the error, as people search for it."""
    text: str
    """Markdown, whose links to other pages are only their names."""
    classes: tuple[str, ...]
    """The errors and problems that name the page."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was found for a name or a text."""

    pages: tuple[Page, ...]
    guess: bool = False
    """Whether nothing has this name, and the page is that of the nearest one."""


@cache
def pages() -> dict[str, Page]:
    """All pages, by their names."""
    named: dict[str, list[str]] = {}
    for kind in classes():
        named.setdefault(kind.page, []).append(kind.__name__)
    found = {}
    for path in sorted(_folder().glob("*.md")):
        if path.stem != "index":
            text = _LINK.sub(r"\1", path.read_text(encoding="utf-8"))
            title = text.partition("\n")[0].removeprefix("# ")
            found[path.stem] = Page(path.stem, title, text, tuple(named.get(path.stem, ())))
    return found


def classes() -> Iterator[type[ModelStateError] | type[Problem]]:
    """Every class of errors and of problems, each of which names a page."""
    yield from (kind for kind in _defined(errors) if issubclass(kind, ModelStateError) and kind is not ModelStateError)
    yield from (kind for kind in _defined(problems) if issubclass(kind, Problem) and kind is not Problem)


def find(asked: str) -> Found:
    """The page of a name or of a class, whatever its case; the pages that have the words; or the nearest one."""
    names = {_plain(name): page for page in pages().values() for name in (page.name, *page.classes)}
    key = _plain(asked.rpartition(".")[2])
    if key in names:
        return Found((names[key],))
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.75)
    is_name = not any(map(str.isspace, asked))
    if near and is_name:
        return Found((names[near[0]],), guess=True)
    words = _words(asked)
    having = tuple(page for page in pages().values() if words and words in _words(page.text))
    if having or is_name:
        return Found(having)
    shares = {_share(page.title, asked): page for page in pages().values()}
    most = max(shares, default=0)
    return Found((shares[most],), guess=True) if most > 0.5 else Found(())


def _folder() -> Path:
    package = Path(__file__).parent.parent
    installed = package / "pages"
    # In a checkout, and in an editable install of one, they lie where the documentation is.
    return installed if installed.is_dir() else package.parent.parent / "docs" / "errors"


def _defined(module: ModuleType) -> Iterator[type]:
    return (kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _words(text: str) -> str:
    return " ".join(text.lower().split())


def _share(title: str, asked: str) -> float:
    """How many of the title's words are in what is asked: texts of errors differ in names and numbers."""
    wanted, given = (set(re.findall(r"[a-z]{3,}", text.lower())) for text in (title, asked))
    return len(wanted & given) / len(wanted)
