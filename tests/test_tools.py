"""The tools that count what the structure of the source is judged by."""

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCE = """
from typing import Any
from torch._C import something

def caller(items: list[Any]) -> int:
    \"\"\"A docstring does not count.\"\"\"

    return len(items)  # and no comment

def parameters(module):
    return module._parameters

class Own:
    _buffers: list

    def method(self):
        self._metadata = self._buffers
        self._modules.clear()
"""


def test_the_structure_is_counted() -> None:
    measure = tool("measure_code")
    trees = {
        measure.SOURCE / "a.py": ast.parse(SOURCE),
        measure.SOURCE / "torch_compat" / "b.py": ast.parse("from torch._C import something"),
    }
    assert [text.split(maxsplit=1)[1] for text in measure.any_annotations(trees)] == ["list[Any]"]
    assert measure.code_lines(SOURCE) == 11
    private = measure.private_torch(trees)
    assert {name: [use.split(maxsplit=1)[1] for use in uses] for name, uses in private.items()} == {
        "a.py": ["from torch._C import something", "module._parameters", "self._modules"]
    }


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (
            "import modelstate as ms\nfrom modelstate.rules import Rename\nfrom modelstate.errors import LoadError",
            False,
        ),
        ("from modelstate.io.files import stamp", True),
        ("from modelstate import io", True),
        ("from modelstate.store import _private", True),
        ("import modelstate.loading.load", True),
        ('monkeypatch.setattr("modelstate.store.store.time", None)', True),
    ],
)
def test_a_test_that_looks_inside_is_told_apart(text: str, inside: bool) -> None:
    assert tool("measure_code").looks_inside(text) is inside


def test_calls_of_a_load_are_counted(tmp_path: Path) -> None:
    trace = tool("trace_calls")
    calls = trace.traced(trace.load_case(tmp_path))
    names = {code.co_qualname for code in calls.functions}
    assert "load" in names
    assert 1 < calls.files <= calls.switches + 1
    assert len(names) <= calls.total
    assert sys.getprofile() is None
    more = trace.traced(trace.load_case(tmp_path, 11)).total
    assert more > calls.total
