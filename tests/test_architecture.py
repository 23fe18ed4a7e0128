"""The page about the architecture names files, functions and rooms that are there."""

import ast
import re
from pathlib import Path

import pytest

import modelstate

SOURCE = Path(modelstate.__file__).parent
DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`([a-z_/]+\.py)(?:::([\w.]+))?`", PAGE)))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_is_named_is_there(file: str, name: str) -> None:
    path = next((root / file for root in (SOURCE, DOCS.parent) if (root / file).exists()), None)
    assert path is not None
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in filter(None, name.split(".")):
        found = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part]
        assert found, f"{file} has no {name}"
        body = found[-1].body


def test_every_room_is_described() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert not [room for room in rooms if f"`{room}/`" not in PAGE]


def test_every_decision_is_in_the_index() -> None:
    pages = {path.name for path in (DOCS / "decisions").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "decisions" / "index.md").read_text())) == pages
