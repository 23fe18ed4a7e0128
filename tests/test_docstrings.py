"""Every public function has a docstring with its arguments, its result, its errors and an example."""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType

import modelstate


def public_functions(module: ModuleType) -> Iterator[tuple[str, Callable[..., object]]]:
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield from public_functions(value)
        elif inspect.isfunction(value):
            yield f"{module.__name__}.{name}", value


def missing_sections(function: Callable[..., object]) -> list[str]:
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    missing = [] if "Raises" in text else ["Raises"]
    if signature.parameters and "Args:" not in text:
        missing.append("Args")
    if signature.return_annotation not in (None, "None") and "Returns" not in text and "Yields" not in text:
        missing.append("Returns")
    return missing if ">>>" in text else [*missing, "Example"]


def test_the_docstrings_of_public_functions_are_complete() -> None:
    functions = dict(public_functions(modelstate))
    assert {"modelstate.load", "modelstate.rules.from_transformers"} <= functions.keys()
    missing = {name: missing_sections(function) for name, function in functions.items()}
    assert {name: sections for name, sections in missing.items() if sections} == {}
