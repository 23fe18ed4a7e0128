"""`extra_state`: saves named attributes of a module class in its state dict, and checks and restores them on loading.

The saved value is made of dicts, strings, numbers and tensors, which `torch.load` takes without unpickling anything
else:

    {"modelstate": 1, "class": "Net", "version": 1, "values": {"epoch": 3}, "base": ...}

`base` is the value of the next class in the method resolution order, or of the class's own `get_extra_state`; it is
absent where neither has any. Each class with a declaration is a layer. Loading goes through all layers and checks
everything before the first attribute is set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from modelstate.arguments import check_flag, check_integer
from modelstate.codec.codec import decode, encode
from modelstate.errors import ExtraStateError, ModelStateError, OptionError, code_errors
from modelstate.formats.tree import EXTRA_STATE, leaf_paths, map_leaves, same_value
from modelstate.planning.planner import CHECK_EXTRA_STATE
from modelstate.planning.recorder import KEEPS_NAMES, recording_of
from modelstate.text_format import listed, short_repr
from modelstate.torch_compat.modules import (
    load_from_state_dict,
    load_pre_hooks,
    non_persistent_buffers,
    own_buffers,
    own_modules,
    own_parameters,
)

FORMAT = 1
METHODS = ("get_extra_state", "set_extra_state", "_load_from_state_dict", CHECK_EXTRA_STATE)
"""The methods that a declaration sets on a class."""
_LAYER = "_modelstate_extra_state"
_MAX_SHOWN = 8
_ABSENT: object = object()

M = TypeVar("M", bound=nn.Module)
Upgrade = Callable[[int, dict[str, Any]], Mapping[str, Any]]
"""Converts the values of an older version to those of the present one."""


def extra_state(
    *names: str,
    optional: bool = False,
    version: int = 1,
    defaults: Mapping[str, object] | None = None,
    upgrade: Upgrade | None = None,
) -> Callable[[type[M]], type[M]]:
    """Declares attributes of a module class that are saved in its state dict and loaded from it; a decorator.

    A class that cannot be edited is declared with a call, `ms.extra_state("epoch")(Net)`, which holds for existing
    instances too. The same declaration a second time changes nothing.

    The class gets `get_extra_state` and `set_extra_state`, so that `torch.save`, `torch.load` with its defaults and a
    strict `load_state_dict` work as they are. A value may be of any kind that `modelstate.register_codec` documents:
    tensors, None, numbers, strings, containers, dataclasses and so on. A copy of it is saved. Subclasses
    inherit the declaration and may add to it with a decorator of their own. A `get_extra_state` and `set_extra_state`
    that the class itself or a base class defines are saved and loaded beside it.

    Loading sets all attributes, or none. Tensors go to the device of those that they replace, or else to that of the
    module's parameters.

    Args:
        names: the attributes, in the order in which they are set.
        optional: whether a checkpoint that has none of the attributes, as one from before the declaration, loads
            strictly; the attributes stay as they are then.
        defaults: values for names that a checkpoint lacks. With a default for each name, a checkpoint may lack all of
            them too. Every other name that is missing, and every unknown one, is an error.
        version: the version of the values, 1 or above, which is saved with them.
        upgrade: a function that is called as `upgrade(old_version, values)` for an older version and returns the
            values of the present one. It may be called twice in a load. Version 0 is a dict that a hand-written
            `get_extra_state` returned.

    Returns:
        The decorator, which returns the class that it is given.

    Raises:
        OptionError: An argument cannot be used, or the class cannot have the declaration.

    Saving and loading raise `ExtraStateError`; `modelstate.plan` and `modelstate.load` report it with all other
    problems.

    Examples:
        >>> @ms.extra_state("epoch", defaults={"epoch": 0})
        ... class Net(nn.Linear):
        ...     epoch = 0
        >>> net, other = Net(2, 2), Net(2, 2)
        >>> net.epoch = 3
        >>> other.load_state_dict(net.state_dict())
        <All keys matched successfully>
        >>> other.epoch
        3
    """
    return Layer(names, optional, version, {} if defaults is None else defaults, upgrade).install


Prepared = tuple[list[tuple[str, object]], Callable[[], None] | None]
"""Checked values by attribute, those of base classes first, and the call of a hand-written `set_extra_state`."""


class Layer(msgspec.Struct, frozen=True, eq=False):
    """The extra state that a class declares, without that of its bases."""

    names: tuple[str, ...]
    """Attributes, in the order in which they are set."""
    optional: bool = False
    """Whether a checkpoint may lack all of them."""
    version: int = 1
    defaults: Mapping[str, object] = msgspec.field(default_factory=dict)
    """Values for names that a checkpoint lacks."""
    upgrade: Upgrade | None = None
    cls: type[nn.Module] = nn.Module
    """The class, once the layer is installed."""
    replaced: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The methods that the class itself defined before the declaration."""

    def __post_init__(self) -> None:
        is_name = [isinstance(name, str) and name.isidentifier() and not name.startswith("__") for name in self.names]
        if not self.names or not all(is_name) or len({*self.names}) < len(self.names):
            found = _quoted(self.names)
            _refuse("extra state needs the names of attributes, each once", found, 'as in @ms.extra_state("epoch")')
        check_flag("optional", self.optional)
        check_integer("version", self.version, least=1)
        if not isinstance(self.defaults, Mapping) or not self.defaults.keys() <= {*self.names}:
            _refuse("defaults= maps declared names to values", self.defaults, f"the names are {_quoted(self.names)}")
        if self.upgrade is not None and not callable(self.upgrade):
            _refuse("upgrade= must be a function", self.upgrade, "a function upgrade(old_version, values) -> values")

    def install(self, cls: type[M]) -> type[M]:
        """Gives a class the methods, and returns it. Raises `OptionError` where it cannot have the declaration."""
        if not isinstance(cls, type) or not issubclass(cls, nn.Module) or cls is nn.Module:
            _refuse("extra state is declared for a subclass of torch.nn.Module", cls)
        for base in cls.__mro__:
            layer = base.__dict__.get(_LAYER)
            if not isinstance(layer, Layer):
                continue
            if base is cls:
                if layer.is_same(self):
                    return cls
                problem = f"the class {layer.name} has declared extra state already"
                _refuse(problem, _quoted(layer.names), "name all attributes in one declaration")
            if twice := [name for name in self.names if name in layer.names]:
                names = f"{cls.__qualname__}: {_quoted(twice)} of {layer.name}"
                _refuse("a base class has declared this already", names)
        gets = cls.get_extra_state is not nn.Module.get_extra_state
        if gets is not (cls.set_extra_state is not nn.Module.set_extra_state):
            has, lacks = ("get", "set") if gets else ("set", "get")
            _refuse(
                f"{cls.__name__} has {has}_extra_state of its own, but not {lacks}_extra_state",
                cls,
                "write both, or none",
            )
        replaced = {name: cls.__dict__[name] for name in METHODS if name in cls.__dict__}
        layer = replace(self, cls=cls, replaced=replaced)
        functions: list[Callable[..., Any]] = [Layer.get, Layer.set, Layer.load, Layer.check]
        for name, function in zip(METHODS, functions, strict=True):
            method = _method(layer, function)
            method.__name__, method.__qualname__, method.__module__ = name, f"{layer.name}.{name}", cls.__module__
            setattr(method, KEEPS_NAMES, name not in replaced)
            setattr(cls, name, method)
        setattr(cls, _LAYER, layer)
        return cls

    def is_same(self, other: Layer) -> bool:
        """Whether the other declaration changes nothing, as when a notebook cell is run again."""
        upgrades = [getattr(each.upgrade, "__code__", each.upgrade) for each in (self, other)]
        return (
            (self.names, self.optional, self.version) == (other.names, other.optional, other.version)
            and upgrades[0] == upgrades[1]
            and same_value(self.defaults, other.defaults)
        )

    @property
    def name(self) -> str:
        return self.cls.__qualname__

    def _below(self, module: nn.Module, method: str) -> Any:
        """Returns the method that this layer replaces, or else that of `super()`; None for torch's own."""
        if method in self.replaced:
            return self.replaced[method].__get__(module, type(module))
        inherited: object = getattr(super(self.cls, module), method)
        return None if getattr(inherited, "__func__", None) is getattr(nn.Module, method) else inherited

    def _chain(self, module: nn.Module) -> tuple[list[Layer], Callable[[object], None] | None]:
        """Returns this layer and those below it, and the hand-written `set_extra_state` below those, or None."""
        layers = [self]
        while True:
            below = layers[-1]._below(module, "set_extra_state")
            layer = layer_of(below)
            if layer is None:
                return layers, below
            layers.append(layer)

    # The methods of the class.

    def get(self, module: nn.Module) -> dict[str, object]:
        """Implements `get_extra_state`: returns a snapshot."""
        # One encoding for all attributes, so that a tensor which two of them share is shared after loading too.
        values = encode({name: _read(module, name) for name in self.names}, self.name)
        state = {"modelstate": FORMAT, "class": self.name, "version": self.version, "values": values}
        below = self._below(module, "get_extra_state")
        return state if below is None else {**state, "base": below()}

    def set(self, module: nn.Module, value: object) -> None:
        """Implements `set_extra_state`."""
        _set_all(module, *self.prepare(module, value))

    def check(self, module: nn.Module, value: object) -> None:
        """Implements the check of a value in a plan."""
        # A subclass that overrides set_extra_state may pass another value to this one, so nothing can be checked.
        top = layer_of(type(module).set_extra_state)
        if top is not None:
            top.prepare(module, value)

    def load(self, module: nn.Module, state_dict: Mapping[str, object], prefix: str, *more: Any, **named: Any) -> None:
        """Implements `_load_from_state_dict`, for checkpoints that may have no extra state at all."""
        below = self._below(module, "_load_from_state_dict") or load_from_state_dict(super(self.cls, module))
        missing_keys: list[str] = named["missing_keys"] if "missing_keys" in named else more[2]
        key, before = prefix + EXTRA_STATE, len(missing_keys)
        top = layer_of(type(module).set_extra_state)
        if top is self and key in state_dict and self._loads_plainly(module) and recording_of(module) is None:
            try:  # before torch copies a tensor of this module: an error leaves all of it as it was
                self.prepare(module, state_dict[key])
            except ModelStateError as error:
                error.where = f"{key}: {error.where}"
                raise
        below(state_dict, prefix, *more, **named)
        if top is not None and key in missing_keys[before:] and top._may_be_absent(module):
            missing_keys[before:] = [name for name in missing_keys[before:] if name != key]
            _set_all(module, *top.prepare(module, _ABSENT))

    # The value.

    def prepare(self, module: nn.Module, value: object) -> Prepared:
        """Checks a value for this layer and those below, and sets nothing. Raises `ExtraStateError`."""
        layers, own = self._chain(module)
        parts: list[list[tuple[str, object]]] = []
        for depth, layer in enumerate(layers):
            below = [other.name for other in layers[depth + 1 :]]
            saved, value = layer._split(value, below, own is not None)
            parts.append(list(layer._values(saved).items()))
        values = [item for part in reversed(parts) for item in part]
        if own is not None and value is _ABSENT:
            owner = str(getattr(own, "__qualname__", own)).rpartition(".")[0]
            raise _bad_format(self.name, f"a value for the set_extra_state of {owner}", "none")
        if own is None and value is not _ABSENT:
            raise _bad_format(self.name, "no state of a base class, since none has any", short_repr(value))
        for name, attribute in values:
            _check_attribute(module, name, attribute)
        return values, None if own is None else partial(own, value)

    def _split(self, value: object, below: list[str], has_own: bool) -> tuple[object, object]:
        """Splits a saved value into the part of this layer and the part of the layers below."""
        if value is _ABSENT:
            return _ABSENT, _ABSENT
        if isinstance(value, Mapping) and "modelstate" in value:
            self._check_format(value)
            # A base class saved it before this class had a declaration.
            if value["class"] != self.name and value["class"] in below:
                return _ABSENT, value
            return value, value.get("base", _ABSENT)
        if below or has_own:
            return _ABSENT, value
        if isinstance(value, Mapping) and not value:  # as users add it to old state dicts by hand
            return _ABSENT, _ABSENT
        by_name = value if isinstance(value, Mapping) and all(isinstance(name, str) for name in value) else None
        if self.upgrade is not None and by_name is not None and not {"version", "values"} <= by_name.keys():
            return {"version": 0, "values": by_name}, _ABSENT  # a hand-written get_extra_state returned it
        raise _bad_format(self.name, "what a declaration of extra state saves", short_repr(value))

    def _check_format(self, value: Mapping[str, object]) -> None:
        number = value["modelstate"]
        if type(number) is int and number > FORMAT:
            raise ExtraStateError(
                "the extra state was written by a later version of modelstate",
                where=self.name,
                expected=f"format {FORMAT}",
                found=f"format {number}",
                remedy="upgrade modelstate",
            )
        version, values = value.get("version"), value.get("values")
        if (
            type(number) is not int
            or number < 1
            or not isinstance(value.get("class"), str)
            or type(version) is not int
            or version < 1
            or not isinstance(values, Mapping)
            or not all(isinstance(name, str) and name.isidentifier() for name in values)
        ):
            raise _bad_format(self.name, "a format, a class, a version and values", short_repr(value))

    def _values(self, saved: object) -> dict[str, object]:
        """Returns the values of this layer's names, upgraded and completed with defaults."""
        values: dict[str, object] = {}
        source = "the extra state is from before the declaration, and"
        if isinstance(saved, Mapping):
            values, source = self._upgraded(saved)
        may_lack = self.names if saved is _ABSENT and self.optional else (*self.defaults, *values)
        missing = [name for name in self.names if name not in may_lack]
        unknown = [name for name in values if name not in self.names]
        if missing or unknown:
            problems = [f"lacks {_quoted(missing)}"] if missing else []
            problems += [f"has {_quoted(unknown)}, which nothing declares"] if unknown else []
            raise ExtraStateError(
                f"{source} {' and '.join(problems)}",
                names=[*missing, *unknown],
                where=self.name,
                expected=_quoted(self.names),
                remedy="raise version= and give an upgrade=, or defaults={name: value} for names that came later"
                if saved is not _ABSENT
                else "optional=True, or defaults={name: value}",
            )
        values |= {name: deepcopy(value) for name, value in self.defaults.items() if name not in values}
        return {name: values[name] for name in self.names if name in values}

    def _upgraded(self, saved: Mapping[str, Any]) -> tuple[dict[str, object], str]:
        """Returns the saved values as those of the present version, and a name for them in a message."""
        old, new, raw, upgrade = saved["version"], self.version, saved["values"], self.upgrade
        if old > new or (old < new and upgrade is None):
            raise ExtraStateError(
                "the extra state is of a newer version" if old > new else "nothing upgrades extra state this old",
                where=self.name,
                expected=f"version {new}",
                found=f"version {old}",
                remedy="load it with the code that saved it"
                if old > new
                else "give upgrade=, a function of the old version and its values",
            )
        values: dict[str, object] = decode(dict(raw), self.name) if old else {}
        if old == new or upgrade is None:
            return values, "the extra state"
        what = "the upgrade= of the extra state"
        remedy = "it is called with the old version and a dict of its values, and returns those of the present one"
        with code_errors(ExtraStateError, f"{what} raised for version {old}", where=self.name, remedy=remedy):
            result: object = upgrade(old, values if old else deepcopy(dict(raw)))
        if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
            problem = f"{what} returned something else than values by their names"
            raise ExtraStateError(problem, where=self.name, found=short_repr(result), remedy=remedy)
        return dict(result), f"what upgrade= makes of version {old}"

    def _loads_plainly(self, module: nn.Module) -> bool:
        """Whether no hand-written code comes between the state dict and `set_extra_state`."""
        below = self._below(module, "_load_from_state_dict")
        layer = layer_of(below)
        return not load_pre_hooks(module) and (below is None or (layer is not None and layer._loads_plainly(module)))

    def _may_be_absent(self, module: nn.Module) -> bool:
        layers, own = self._chain(module)
        return own is None and all(layer.optional or layer.defaults.keys() == set(layer.names) for layer in layers)


def _method(layer: Layer, function: Callable[..., Any]) -> Any:
    """Returns a function that becomes a method of the class of a layer."""

    def method(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        return function(layer, self, *arguments, **named)

    untyped: Any = method
    untyped.modelstate_layer = layer
    return method


def layer_of(method: object) -> Layer | None:
    """Returns the layer whose declaration set a method; None for any other method."""
    layer = getattr(method, "modelstate_layer", None)
    return layer if isinstance(layer, Layer) else None


# The attributes of a module.


def _read(module: nn.Module, name: str) -> object:
    """Returns the value of an attribute. Raises `ExtraStateError` where it cannot be saved."""
    with code_errors(
        ExtraStateError,
        "an attribute that is declared as extra state is not there",
        where=_place(module, name),
        remedy="set it in __init__, to None if it has no value yet",
    ):
        value = getattr(module, name)
    _check_attribute(module, name, value)
    return value


def _check_attribute(module: nn.Module, name: str, value: object = None) -> None:
    """Raises `ExtraStateError` for a name or a value that torch itself registers with the module."""
    for kind, members in (
        ("parameter", own_parameters(module)),
        ("buffer", own_buffers(module)),
        ("submodule", own_modules(module)),
    ):
        if name in members:
            raise ExtraStateError(
                f"an attribute that is declared as extra state is a {kind}",
                where=_place(module, name),
                remedy="register it with persistent=True instead"
                if name in non_persistent_buffers(module)
                else "take it out of the declaration: the state dict has it already",
            )
    if isinstance(value, nn.Module | nn.Parameter | nn.Buffer):
        raise ExtraStateError(
            "extra state cannot be a parameter, a buffer or a module",
            where=_place(module, name),
            found=type(value).__name__,
            remedy="register it, or have its values in a plain tensor",
        )


def _set_all(module: nn.Module, values: list[tuple[str, object]], first: Callable[[], None] | None) -> None:
    """Calls the hand-written `set_extra_state`, and sets the values. An error undoes all changes."""
    before = dict(module.__dict__)
    of_class: list[tuple[str, object]] = []
    """Properties and slots, whose values are not in the module's dict, with their values before."""
    try:
        if first is not None:
            first()
        for name, value in values:
            try:
                current = getattr(module, name, None)
            except Exception:  # a property that raises
                current = None
            if hasattr(type(module), name):
                of_class.append((name, current))
            _set(module, name, value, current)
    except BaseException:
        for name, current in reversed(of_class):
            setattr(module, name, current)
        module.__dict__.clear()
        module.__dict__.update(before)
        raise


def _set(module: nn.Module, name: str, value: object, current: object) -> None:
    """Sets an attribute, with tensors on the device of those that it replaces, or else of the module's parameters."""
    devices = [leaf.device for _, leaf in leaf_paths(current) if isinstance(leaf, torch.Tensor)]
    recording = recording_of(module)
    for param in module.parameters():  # which the load may move later
        devices.append(param.device if recording is None else recording.sink.device_after(param))
    device = next((device for device in devices if device.type != "meta"), None)

    def moved(_: object, leaf: object) -> object:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) and device is not None else leaf

    what = "an attribute that is declared as extra state cannot be set"
    with code_errors(ExtraStateError, what, where=_place(module, name)):
        setattr(module, name, map_leaves(value, moved))


# Messages.


def _place(module: nn.Module, name: str) -> str:
    """Returns the name of an attribute for a message."""
    return f"{type(module).__qualname__}.{name}"


def _quoted(names: Collection[str]) -> str:
    """Returns names for a message, the first few of them in full."""
    return listed((f"{name!r:.60}" for name in names), _MAX_SHOWN) or "none"


def _refuse(problem: str, found: object, remedy: str = "") -> NoReturn:
    raise OptionError(problem, where="extra state", found=found, remedy=remedy)


def _bad_format(name: str, expected: str, found: str) -> ExtraStateError:
    return ExtraStateError(
        "this is no extra state of the class",
        where=name,
        expected=expected,
        found=found,
        remedy="load a checkpoint of this class; for what a get_extra_state of your own has saved, give upgrade=, "
        "which is called with version 0",
    )
