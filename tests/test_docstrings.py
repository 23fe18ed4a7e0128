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


ROOMS = ("comparison", "conversion", "merge", "objects", "rules", "serve", "store", "suggestion")
"""The rooms whose public classes have complete docstrings."""
OF_RULES = {"rename", "apply", "apply_to", "change", "join", "reverse"}
"""What rules do has one description, that of `modelstate.rules.Rule`; each class says what it does to a checkpoint."""


def public_classes(module: ModuleType) -> Iterator[type]:
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield from public_classes(value)
        elif inspect.isclass(value) and value.__module__.startswith(tuple(f"modelstate.{room}." for room in ROOMS)):
            yield value


def missing_sections_of_method(function: Callable[..., object]) -> list[str]:
    """As of a function; a method that has no `raise` of its own need not say what it raises."""
    missing = missing_sections(function)
    if list(inspect.signature(function).parameters) in (["self"], ["cls"], []):
        missing = [section for section in missing if section != "Args"]
    raises = "raise " in inspect.getsource(function).replace(inspect.getdoc(function) or "", "")
    return missing if raises else [section for section in missing if section != "Raises"]


def test_the_docstrings_of_public_methods_are_complete() -> None:
    classes = {cls for cls in public_classes(modelstate) if not issubclass(cls, BaseException)}
    assert {modelstate.Live, modelstate.Store, modelstate.rules.Schema} <= classes
    missing = {}
    for cls in classes:
        for name, value in vars(cls).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if function.__doc__ is None and name in OF_RULES and cls.__module__.startswith("modelstate.rules."):
                continue
            if inspect.isfunction(function) and not name.startswith("_"):
                missing[f"{cls.__module__}.{cls.__name__}.{name}"] = missing_sections_of_method(function)
    assert {name: sections for name, sections in missing.items() if sections} == {}


def test_the_docstrings_of_public_functions_are_complete() -> None:
    functions = dict(public_functions(modelstate))
    assert {"modelstate.load", "modelstate.rules.from_transformers"} <= functions.keys()
    missing = {name: missing_sections(function) for name, function in functions.items()}
    assert {name: sections for name, sections in missing.items() if sections} == {}
