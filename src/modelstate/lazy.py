"""Resolves the public names of a package when they are first used, so that importing the package costs little.

The `__init__.py` of such a package imports its public names in the first `if`, for type checkers:

    if TYPE_CHECKING:
        from modelstate.store.store import Store as Store
    else:
        __getattr__, __dir__ = attach(__name__)

The imports never run. They are read from the source of the package, so that each name is written once.
"""

import sys

from modelstate import forks as forks  # before another thread makes its first call

TYPE_CHECKING = False  # as in `modelstate/__init__.py`
if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def attach(package: str, unlisted: "Collection[str]" = ()) -> "tuple[Callable[[str], object], Callable[[], list[str]]]":
    """Returns `__getattr__` and `__dir__` for a package.

    Args:
        package: The name of the package, `__name__` in its `__init__.py`.
        unlisted: The public names that `__all__` leaves out.
    """
    modules: dict[str, str] = {}
    """The modules of the public names, once they are needed; for a module, the package that it is in."""

    def public() -> "dict[str, str]":
        if not modules:
            modules.update(_imported_names(package))
        return modules

    def __getattr__(name: str) -> object:
        if name == "__all__":
            return sorted(public().keys() - {*unlisted})
        module = public().get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        import importlib

        from modelstate.process import gc_paused

        with gc_paused():
            found = importlib.import_module(module)
            is_defined = module != package and hasattr(found, name)
            value: object = getattr(found, name) if is_defined else importlib.import_module(f"{module}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public()})

    return __getattr__, __dir__


def _imported_names(package: str) -> "dict[str, str]":
    """Returns the names that a package imports in its first `if`, with their modules."""
    import ast

    source = sys.modules[package].__spec__.loader.get_source(package)  # type: ignore[union-attr]
    block = next(each for each in ast.parse(source).body if isinstance(each, ast.If))
    imports = [each for each in block.body if isinstance(each, ast.ImportFrom)]
    return {alias.name: each.module or "" for each in imports for alias in each.names}
