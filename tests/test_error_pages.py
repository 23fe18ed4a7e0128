"""The pages about errors: code that has a text below it fails with that text, all other code runs, in its order."""

import ast
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from modelstate.cli.main import Page, named_pages, pages

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "errors"
PAGES = pages()
BLOCKS = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n\n^```text\n(?P<text>.*?)^```$)?", re.MULTILINE | re.DOTALL)

every_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


def source(page: Page) -> str:
    return (FOLDER / f"{page.name}.md").read_text()


def blocks(page: Page) -> list[tuple[str, str | None]]:
    """Code, and the text that it fails with."""
    return [(match["code"], match["text"]) for match in BLOCKS.finditer(source(page))]


def failure_of(code: str, names: dict[str, Any]) -> BaseException | None:
    try:
        exec(compile(code, "<page>", "exec"), names)
    except Exception as error:
        return error
    return None


def as_printed(error: BaseException, folder: Path) -> str:
    """The end of the traceback, without the folder in which the code ran, and without blanks at the ends of lines."""
    text = "".join(traceback.format_exception_only(error)).replace(f"{folder}/", "").replace(str(folder), ".")
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def agrees(printed: str, shown: str) -> bool:
    """Whether a text is the one that is shown, in which three dots stand for anything."""
    pattern = ".*".join(map(re.escape, shown.rstrip().split("...")))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Names for code that runs in a folder of its own; packages and torch's switches are put back afterwards."""
    packages = dict(sys.modules)
    module = ModuleType("page_in_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    yield vars(module)
    for name in [name for name, found in sys.modules.items() if found is None]:  # hidden by the page
        del sys.modules[name]
        sys.modules.update({name: packages[name]} if packages.get(name) is not None else {})
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@every_page
def test_what_fails_fails_with_the_text_below_it_and_the_rest_runs(
    page: Page, namespace: dict[str, Any], tmp_path: Path
) -> None:
    for code, shown in blocks(page):
        error = failure_of(code, namespace)
        if shown is None:
            assert error is None, f"{code}\nraised {as_printed(error, tmp_path) if error else ''}"
            continue
        assert error is not None, f"this did not fail:\n{code}"
        assert agrees(as_printed(error, tmp_path), shown), as_printed(error, tmp_path)
        assert line_of(error) >= ast.parse(code).body[-1].lineno, "it failed before its last statement"


def line_of(error: BaseException) -> int:
    """The line of the page's code that failed: the last statement is what the text is about."""
    return next(frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<page>")


def test_the_errors_of_a_page_name_it() -> None:
    for page in PAGES.values():
        shown = [text for _, text in blocks(page) if text and text.startswith("modelstate.")]
        assert shown, page.name
        assert all(f"more: modelstate explain {page.name}\n" in text for text in shown), page.name


def test_every_class_names_a_page_that_is_there() -> None:
    named = dict(named_pages())
    assert {name: page for name, page in named.items() if page not in PAGES} == {}
    assert set(named.values()) == set(PAGES)


def rows(path: Path, pattern: str) -> list[tuple[str, ...]]:
    return re.findall(pattern, path.read_text(), re.MULTILINE)


def test_the_index_and_the_site_list_all_pages() -> None:
    listed = rows(FOLDER / "index.md", r"^\| \[([\w-]+)\]\(\1\.md\) \| (.*) \| (.*) \|$")
    assert listed == [(page.name, page.title, ", ".join(f"`{name}`" for name in page.names)) for page in PAGES.values()]
    assert rows(ROOT / "mkdocs.yml", r"^    - ([\w-]+): errors/\1\.md$") == list(PAGES)
