"""What is declared of a class, checked when it is declared."""

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from modelstate.errors import OptionError

_SHOWN = 8

Upgrade = Callable[[int, dict[str, Any]], Mapping[str, Any]]
"""Makes the values of an older version those of the present one."""


@dataclass(frozen=True, eq=False)
class Declaration:
    """The extra state that a class has, beside that of its bases."""

    names: tuple[str, ...]
    """Attributes, in the order in which they are set."""
    optional: bool = False
    """Whether a checkpoint may lack all of it."""
    version: int = 1
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a name becomes that the checkpoint lacks."""
    upgrade: Upgrade | str | None = None
    """The function, or the name of a static or class method."""

    def __post_init__(self) -> None:
        self._check_names()
        if type(self.optional) is not bool:
            _refuse("optional= is True or False", self.optional, "for single names: defaults={name: value}")
        if type(self.version) is not int or self.version < 1:
            _refuse("a version is a whole number, 1 or above", self.version)
        if not isinstance(self.defaults, Mapping):
            _refuse("defaults= maps names to values", self.defaults)
        if unknown := [name for name in self.defaults if name not in self.names]:
            _refuse("a default is for a name that is declared", unknown, f"the names are {listed(self.names)}")
        # Whoever changes what was passed does not change the declaration.
        try:
            object.__setattr__(self, "defaults", deepcopy(dict(self.defaults)))
        except Exception as error:
            _refuse("a default cannot be copied", error)
        if self.upgrade is not None and not isinstance(self.upgrade, str):
            _check_takes_two(self.upgrade, "upgrade=")

    def _check_names(self) -> None:
        if not self.names:
            _refuse("extra state needs the name of at least one attribute", "none", 'as in @ms.extra_state("epoch")')
        for name in self.names:
            if not isinstance(name, str):
                _refuse("attributes are named by strings", name, 'as in @ms.extra_state("epoch")')
            if not name.isidentifier() or name.startswith("__"):
                _refuse("this cannot be the name of an attribute", repr(name))
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            _refuse("an attribute is named twice", listed(twice))

    def check_class(self, cls: object) -> None:
        """Raises `OptionError` where the declaration cannot be made for this class."""
        if not isinstance(cls, type) or not issubclass(cls, nn.Module) or cls is nn.Module:
            _refuse("extra state is declared for a subclass of torch.nn.Module", cls)
        gets = cls.get_extra_state is not nn.Module.get_extra_state
        if gets is not (cls.set_extra_state is not nn.Module.set_extra_state):
            has, lacks = ("get", "set") if gets else ("set", "get")
            _refuse(
                f"{cls.__name__} has {has}_extra_state of its own, but not {lacks}_extra_state",
                cls,
                "write both, or none",
            )
        if isinstance(self.upgrade, str):
            _check_takes_two(getattr(cls, self.upgrade, None), f"{cls.__name__}.{self.upgrade}")

    def upgrade_of(self, cls: type[nn.Module]) -> Upgrade | None:
        """The function; that of the class itself, where a subclass has overridden it."""
        if isinstance(self.upgrade, str):
            found: Upgrade = getattr(cls, self.upgrade)
            return found
        return self.upgrade

    def is_same(self, other: "Declaration") -> bool:
        """Whether nothing changes if the other is declared too: as when a notebook cell is run again."""
        return (
            (self.names, self.optional, self.version) == (other.names, other.optional, other.version)
            and _code(self.upgrade) == _code(other.upgrade)
            and self.defaults.keys() == other.defaults.keys()
            and all(_equal(self.defaults[name], other.defaults[name]) for name in self.defaults)
        )


def listed(names: Collection[str]) -> str:
    """Names as a message has them."""
    shown = [f"{name!r:.60}" for name in itertools.islice(names, _SHOWN)]
    return ", ".join(shown) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "") or "none"


def _check_takes_two(function: object, what: str) -> None:
    expected = "a function upgrade(old_version, values) -> values, or the name of a static or class method"
    if not callable(function):
        _refuse(f"{what} is no function", function, expected)
    try:
        inspect.signature(function).bind(1, {})
    except ValueError:  # written in C, without a signature
        return
    except TypeError:
        _refuse(f"{what} cannot be called with a version and values", inspect.signature(function), expected)


def _code(upgrade: Upgrade | str | None) -> object:
    return getattr(upgrade, "__code__", upgrade)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # arrays and the like, whose comparison is no single answer
        return False


def _refuse(what: str, found: object, remedy: str = "") -> NoReturn:
    raise OptionError(what, where="extra state", found=found, remedy=remedy)
