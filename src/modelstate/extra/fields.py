"""`extra_state`: named attributes of a class become part of its state dict, as typed, checked snapshots."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from modelstate.errors import OptionError
from modelstate.extra.declaration import Declaration, Upgrade, listed
from modelstate.extra.layer import METHODS, Layer, layer_of
from modelstate.plan.recorder import KEEPS_NAMES

M = TypeVar("M", bound=nn.Module)

_LAYER = "_modelstate_extra_state"


def extra_state(
    *names: str,
    optional: bool = False,
    version: int = 1,
    defaults: Mapping[str, Any] | None = None,
    upgrade: Upgrade | str | None = None,
) -> Callable[[type[M]], type[M]]:
    """A decorator of a module's class: the named attributes are saved in its state dict, and loaded from it.

    The class gets `get_extra_state` and `set_extra_state`, so that `torch.save`, `torch.load` with its defaults and a
    strict `load_state_dict` work as they are. A value may be whatever `modelstate.register_codec` documents: tensors,
    None, numbers, strings, containers, dataclasses, generators and so on; what is saved is a copy of it. Subclasses
    have it as well and may add to it with a decorator of their own. What the class itself or a base class has written
    as `get_extra_state` and `set_extra_state` is saved and loaded beside it.

    Loading sets all attributes, or none. Tensors go to the device of those that they replace, or else to that of the
    module's parameters. A generator that is there gets the saved state and stays the object that it is.

    `optional=True`: a checkpoint that has none of it, as those from before the declaration, loads strictly, and the
    attributes stay as they are. `defaults`: what a name becomes that a checkpoint lacks; with a default for each name
    a checkpoint may lack all of it too. Any other name that is missing, and any that is too many, is an error.

    `version` is saved too. Values of an older version are given to `upgrade(old_version, values)`, a function or the
    name of a static or class method, which returns those of the present version. Version 0 is a dict that a
    `get_extra_state` written by hand has returned.

    Raises `OptionError` for arguments that mean nothing. Saving and loading raise `ExtraStateError`; `modelstate.plan`
    and `modelstate.load` report it with all other problems.
    """
    declaration = Declaration(names, optional, version, {} if defaults is None else defaults, upgrade)

    def declare(cls: type[M]) -> type[M]:
        _declare(cls, declaration)
        return cls

    return declare


def declare_extra_state(
    cls: type[nn.Module],
    *names: str,
    optional: bool = False,
    version: int = 1,
    defaults: Mapping[str, Any] | None = None,
    upgrade: Upgrade | str | None = None,
) -> None:
    """`extra_state` for a class that cannot be edited; it holds for all instances, those that exist included.

    The same declaration a second time changes nothing. Raises `OptionError`, also for another declaration.
    """
    _declare(cls, Declaration(names, optional, version, {} if defaults is None else defaults, upgrade))


def _declare(cls: type[nn.Module], declaration: Declaration) -> None:
    known = cls.__dict__.get(_LAYER) if isinstance(cls, type) else None
    if isinstance(known, Layer):
        if known.declaration.is_same(declaration):
            return
        raise OptionError(
            "the class has declared extra state already",
            where=known.name,
            found=listed(known.declaration.names),
            remedy="name all attributes in one declaration",
        )
    declaration.check_class(cls)
    for base in cls.__mro__[1:]:
        layer = base.__dict__.get(_LAYER)
        if isinstance(layer, Layer) and (twice := [n for n in declaration.names if n in layer.declaration.names]):
            raise OptionError(
                "a base class has declared this already", where=cls.__qualname__, found=f"{listed(twice)}: {layer.name}"
            )
    layer = Layer(cls, declaration)
    for name, method in zip(METHODS, _methods(layer), strict=True):
        method.__qualname__, method.__module__ = f"{cls.__qualname__}.{name}", cls.__module__
        method.modelstate_layer = layer
        setattr(method, KEEPS_NAMES, not layer.overrides(name))
        setattr(cls, name, method)
    setattr(cls, _LAYER, layer)


def _methods(layer: Layer) -> tuple[Any, ...]:
    def get_extra_state(self: nn.Module) -> Any:
        return layer.get(self)

    def set_extra_state(self: nn.Module, state: Any) -> None:
        layer.set(self, state)

    def _load_from_state_dict(
        self: nn.Module,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        layer.load(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def check_extra_state(self: nn.Module, state: Any) -> None:
        # A subclass that has overridden the method may have wrapped what this one would get.
        top = layer_of(type(self).set_extra_state)
        if top is not None:
            top.prepare(self, state)

    return get_extra_state, set_extra_state, _load_from_state_dict, check_extra_state
