"""`extra_state`: named attributes of a class as typed, checked snapshots in its state dict.

What is saved is made of dicts, strings, numbers and tensors, which `torch.load` takes without unpickling anything else:

    {"modelstate": 1, "class": "Net", "version": 1, "values": {"epoch": 3}, "base": ...}

`base` is what the next class of the method resolution order gives, or the class's own `get_extra_state`, and is absent
where neither has any. Loading goes through all layers and checks everything before the first attribute is set.
"""

import inspect
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from modelstate.codec.codec import decode, encode
from modelstate.errors import (
    ExtraStateFormatError,
    ExtraStateNamesError,
    ExtraStateVersionError,
    ModelStateError,
    OptionError,
    UpgradeError,
)
from modelstate.formats.tree import EXTRA_STATE
from modelstate.objects import attributes
from modelstate.planning.prepare import CHECK_EXTRA_STATE
from modelstate.planning.recorder import KEEPS_NAMES, is_recorded

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


FORMAT = 1
_KEYS = {"modelstate", "class", "version", "values", "base"}
_ABSENT: Any = object()
_handed = threading.local()


@dataclass(slots=True)
class Prepared:
    """Extra state that has been checked, and can be set."""

    values: list[tuple[str, Any]] = field(default_factory=list)
    """Attributes and their values, those of base classes first."""
    first: Callable[[], None] | None = None
    """The call of a `set_extra_state` that somebody has written."""


class Layer:
    """The declaration of a class, and the methods of the class that it stands before."""

    def __init__(self, cls: type[nn.Module], declaration: Declaration) -> None:
        self.cls, self.declaration = cls, declaration
        own = cls.__dict__
        self._own = {name: own[name] for name in METHODS if name in own}

    @property
    def name(self) -> str:
        return self.cls.__qualname__

    def _below(self, module: nn.Module, method: str) -> Any:
        """The method that the class's own would be, or call as that of `super()`; None for torch's."""
        if method in self._own:
            return self._own[method].__get__(module, type(module))
        found: Any = getattr(super(self.cls, module), method)
        return None if getattr(found, "__func__", None) is getattr(nn.Module, method) else found

    def overrides(self, method: str) -> bool:
        """Whether the class has written the method itself."""
        return method in self._own

    def _chain(self, module: nn.Module) -> "tuple[list[Layer], Any]":
        """This layer and those below it, and what somebody has written below those."""
        layers = [self]
        while True:
            below = layers[-1]._below(module, "set_extra_state")
            layer = layer_of(below)
            if layer is None:
                return layers, below
            layers.append(layer)

    # Saving.

    def get(self, module: nn.Module) -> dict[str, Any]:
        """What `get_extra_state` returns: a snapshot."""
        declaration = self.declaration
        # One encoding for all, so that a tensor that two of them hold is one tensor afterwards too.
        values = encode({name: attributes.read(module, name) for name in declaration.names}, self.name)
        made = {"modelstate": FORMAT, "class": self.name, "version": declaration.version, "values": values}
        below = self._below(module, "get_extra_state")
        return made if below is None else {**made, "base": below()}

    # Loading.

    def set(self, module: nn.Module, value: Any) -> None:
        """What `set_extra_state` does."""
        handed = getattr(_handed, "prepared", None)
        if handed is not None and handed[0] is module and handed[1] is value and handed[2] is self:
            prepared = handed[3]
        else:
            prepared = self.prepare(module, value)
        attributes.put(module, prepared.values, prepared.first)

    def prepare(self, module: nn.Module, value: Any) -> Prepared:
        """Checks a value for this layer and those below; nothing is set. Raises `ExtraStateError`."""
        layers, own = self._chain(module)
        parts: list[list[tuple[str, Any]]] = []
        for depth, layer in enumerate(layers):
            below = [other.name for other in layers[depth + 1 :]]
            mine, value = layer._split(value, below, own is not None)
            parts.append(list(layer._values(module, mine).items()))
        prepared = Prepared([item for part in reversed(parts) for item in part])
        if own is not None:
            if value is _ABSENT:
                raise _bad_format(self.name, f"a value for the set_extra_state of {_owner(own)}", "none")
            prepared.first = partial(own, value)
        elif value is not _ABSENT:
            raise _bad_format(self.name, "no state of a base class, since none has any", _kind(value))
        for name, found in prepared.values:
            attributes.check(module, name)
            attributes.check_value(module, name, found)
        return prepared

    def _split(self, value: Any, below: list[str], own: bool) -> tuple[Any, Any]:
        """What of a value is for this layer, and what is for those below."""
        if value is _ABSENT:
            return _ABSENT, _ABSENT
        if isinstance(value, Mapping) and "modelstate" in value:
            self._check_format(value)
            # What a base class has saved before this class declared anything.
            if value["class"] != self.name and value["class"] in below:
                return _ABSENT, value
            return value, value.get("base", _ABSENT)
        if below or own:
            return _ABSENT, value
        if isinstance(value, Mapping) and not value:  # as it is put into old state dicts by hand
            return _ABSENT, _ABSENT
        if self.declaration.upgrade is not None and _is_by_hand(value):
            return {"version": 0, "values": value}, _ABSENT
        raise _bad_format(self.name, "what a declaration of extra state saves", _kind(value))

    def _check_format(self, value: Mapping[str, Any]) -> None:
        number = value["modelstate"]
        if type(number) is int and number > FORMAT:
            raise ExtraStateVersionError(
                "the extra state was written by a later version of modelstate",
                where=self.name,
                expected=f"format {FORMAT}",
                found=f"format {number}",
                remedy="upgrade modelstate",
            )
        version, values = value.get("version"), value.get("values")
        wrong = {
            "modelstate": type(number) is not int or number < 1,
            "class": not isinstance(value.get("class"), str),
            "version": type(version) is not int or version < 1,
            "values": not isinstance(values, Mapping) or not all(map(_is_name, values)),
        }
        if found := [f"{key!r} is {_kind(value.get(key))}" for key, is_wrong in wrong.items() if is_wrong]:
            raise _bad_format(self.name, "a format, a class, a version and values", ", ".join(found))
        if unknown := [str(key) for key in value if key not in _KEYS]:
            raise _bad_format(self.name, f"the keys {listed(sorted(_KEYS))}", f"also {listed(unknown)}")

    def _values(self, module: nn.Module, mine: Any) -> dict[str, Any]:
        """The values of this layer's names, upgraded and completed with defaults."""
        declaration = self.declaration
        values: dict[str, Any] = {}
        source = "the extra state is from before the declaration, and"
        if mine is _ABSENT:
            lacking = [] if declaration.optional else [n for n in declaration.names if n not in declaration.defaults]
        else:
            values, source = self._present(module, mine)
            lacking = [n for n in declaration.names if n not in values and n not in declaration.defaults]
        unknown = [name for name in values if name not in declaration.names]
        if lacking or unknown:
            says = [f"lacks {listed(lacking)}"] * bool(lacking)
            says += [f"has {listed(unknown)}, which nothing declares"] * bool(unknown)
            raise ExtraStateNamesError(
                f"{source} {' and '.join(says)}",
                names=[*lacking, *unknown],
                where=self.name,
                expected=listed(declaration.names),
                remedy="raise version= and give an upgrade=, or defaults={name: value} for names that came later"
                if mine is not _ABSENT
                else "optional=True, or defaults={name: value}",
            )
        for name in declaration.names:
            if name in declaration.defaults and name not in values:
                values[name] = deepcopy(declaration.defaults[name])
        return {name: values[name] for name in declaration.names if name in values}

    def _present(self, module: nn.Module, mine: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The values that are there, as those of the present version, and whose they are in words."""
        old, new, raw = mine["version"], self.declaration.version, mine["values"]
        upgrade = self.declaration.upgrade_of(type(module))
        if old > new or (old < new and upgrade is None):
            raise ExtraStateVersionError(
                "the extra state is of a newer version" if old > new else "nothing upgrades extra state this old",
                where=self.name,
                expected=f"version {new}",
                found=f"version {old}",
                remedy="load it with the code that saved it"
                if old > new
                else "give upgrade=, a function of the old version and its values",
            )
        values: dict[str, Any] = decode(dict(raw), self.name) if old else {}
        if old == new or upgrade is None:
            return values, "the extra state"
        try:
            made = upgrade(old, values if old else deepcopy(dict(raw)))
        except Exception as error:
            raise self._upgrade_error(f"raised for version {old}", f"{type(error).__name__}: {error}") from error
        if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
            raise self._upgrade_error("returned something else than values by their names", _kind(made))
        return dict(made), f"what upgrade= makes of version {old}"

    def _upgrade_error(self, what: str, found: object) -> UpgradeError:
        return UpgradeError(
            f"the upgrade= of the extra state {what}",
            where=self.name,
            found=found,
            remedy="it is called with the old version and a dict of its values, and returns those of the present one",
        )

    # Checkpoints that have no extra state at all.

    def load(
        self,
        module: nn.Module,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """What `_load_from_state_dict` does."""
        base: Any = super(self.cls, module)
        below = self._below(module, "_load_from_state_dict") or base._load_from_state_dict
        call = partial(below, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        key, before = prefix + EXTRA_STATE, len(missing_keys)
        top = layer_of(type(module).set_extra_state)
        if top is self and key in state_dict and self._loads_plainly(module) and not is_recorded(module):
            # Before torch copies a tensor of this module: an error leaves all of it as it was.
            with _handing_over(self, module, state_dict[key], key):
                call()
        else:
            call()
        if top is not None and key in missing_keys[before:] and top._may_be_absent(module):
            missing_keys[before:] = [name for name in missing_keys[before:] if name != key]
            attributes.put(module, top.prepare(module, _ABSENT).values)

    def _loads_plainly(self, module: nn.Module) -> bool:
        """Whether nothing that somebody has written comes between the state dict and `set_extra_state`."""
        below = self._below(module, "_load_from_state_dict")
        layer = layer_of(below)
        return not module._load_state_dict_pre_hooks and (
            below is None or (layer is not None and layer._loads_plainly(module))
        )

    def _may_be_absent(self, module: nn.Module) -> bool:
        layers, own = self._chain(module)
        return own is None and all(
            layer.declaration.optional or layer.declaration.defaults.keys() == set(layer.declaration.names)
            for layer in layers
        )


METHODS = ("get_extra_state", "set_extra_state", "_load_from_state_dict", CHECK_EXTRA_STATE)
"""What a declaration puts into a class."""


def layer_of(method: Any) -> Layer | None:
    """The layer of a method that a declaration has put there; None for what somebody has written."""
    layer = getattr(method, "modelstate_layer", None)
    return layer if isinstance(layer, Layer) else None


@contextmanager
def _handing_over(layer: Layer, module: nn.Module, value: Any, key: str) -> Iterator[None]:
    """While this lasts, `set` finds this value prepared already, so that it is decoded and upgraded once."""
    try:
        prepared = layer.prepare(module, value)
    except ModelStateError as error:
        error.where = f"{key}: {error.where}"
        raise
    before = getattr(_handed, "prepared", None)
    _handed.prepared = (module, value, layer, prepared)
    try:
        yield
    finally:
        _handed.prepared = before


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier()


def _is_by_hand(value: Any) -> bool:
    """Whether a value may be what a hand-written `get_extra_state` has returned: version 0."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    return not {"version", "values"} <= value.keys()


def _owner(method: Any) -> str:
    return str(getattr(method, "__qualname__", method)).rpartition(".")[0]


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {listed([str(key) for key in value])}"
    if value is None or isinstance(value, bool | int | float | str):
        return f"{value!r:.60}"
    return f"a {type(value).__name__}"


def _bad_format(name: str, expected: str, found: str) -> ExtraStateFormatError:
    return ExtraStateFormatError(
        "this is no extra state of the class",
        where=name,
        expected=expected,
        found=found,
        remedy="load a checkpoint of this class; for what a get_extra_state of your own has saved, give upgrade=, "
        "which is called with version 0",
    )


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
