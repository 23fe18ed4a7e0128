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
    sorted(items, key=passed)
    return called_once(items) + called_twice(items) + called_twice(items)

def called_once(items):
    \"\"\"A docstring does not count.\"\"\"
    return len(items)

def called_twice(items):
    return len(items)

def passed(item):
    return item

def long(module):
    first = module._parameters
    second = first
    third = second
    fourth = third
    return fourth

long(None)

class Own:
    _buffers: list

    def method(self):
        self._metadata = self._buffers
        self._modules.clear()
"""

MUST_BE_FUNCTIONS = """
class First:
    def shared(self):
        return 1

class Second(First):
    def shared(self):
        return 2

    def close(self):
        super().close()

def public():
    \"\"\"Is called by users.

    Examples:
        >>> public()
    \"\"\"
    return 3

def caller(item):
    item.close()
    return item.shared() + public() + private_name(item) + public_name(item) + in_its_file(item)

def in_its_file(item):
    return 4
"""
OF_TORCH_COMPAT = """
def private_name(module):
    from torch._C import something
    return something(module) + called_here(module)

def public_name(module):
    return module.training

def called_here(module):
    return module._version
"""


def test_the_structure_is_counted() -> None:
    measure = tool("measure_code")
    trees = {
        measure.SOURCE / "a.py": ast.parse(SOURCE),
        measure.SOURCE / "torch_compat" / "b.py": ast.parse("from torch._C import something"),
    }
    small = {text.split()[-1]: movable for text, movable in measure.small_functions(trees)}
    assert small == {"called_once": True, "passed": False}
    assert [text.split(maxsplit=1)[1] for text in measure.any_annotations(trees)] == ["list[Any]"]
    private = measure.private_torch(trees)
    assert {name: [use.split(maxsplit=1)[1] for use in uses] for name, uses in private.items()} == {
        "a.py": ["from torch._C import something", "module._parameters", "self._modules"]
    }


def test_what_must_be_a_function_is_not_small() -> None:
    measure = tool("measure_code")
    trees = {
        measure.SOURCE / "a.py": ast.parse(MUST_BE_FUNCTIONS),
        measure.SOURCE / "torch_compat" / "b.py": ast.parse(OF_TORCH_COMPAT),
    }
    small = [text.split()[-1] for text, _ in measure.small_functions(trees)]
    assert small == ["in_its_file", "public_name", "called_here"]


@pytest.mark.slow
def test_the_table_is_that_of_the_source(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measure = tool("measure_code")
    room = measure.SOURCE / "serve"
    monkeypatch.setattr(measure, "SOURCE", room)  # one room of it: all of it takes seconds
    monkeypatch.setattr(sys, "argv", ["measure_code.py"])
    measure.main()
    assert f"files {len(list(room.rglob('*.py')))}, lines " in capsys.readouterr().out


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
