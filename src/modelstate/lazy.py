"""Resolves the public names of a package when they are first used, so that importing the package costs little."""

import sys

from modelstate import forks as forks  # before another thread makes its first call

TYPE_CHECKING = False  # as in `modelstate/__init__.py`
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


def attach(
    package: str, names: "Mapping[str, tuple[str, ...]]", unlisted: "Collection[str]" = ()
) -> "tuple[Callable[[str], object], Callable[[], list[str]], list[str]]":
    """Returns `__getattr__`, `__dir__` and `__all__` for a package.

    Args:
        package: The name of the package, `__name__` in its `__init__.py`.
        names: The public names by the modules that define them; modules by the packages that they are in.
        unlisted: Those that `__all__` leaves out.
    """
    modules = {name: module for module, of_module in names.items() for name in of_module}

    def __getattr__(name: str) -> object:
        module = modules.get(name)
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
        return sorted({*vars(sys.modules[package]), *modules})

    return __getattr__, __dir__, sorted(modules.keys() - {*unlisted})
