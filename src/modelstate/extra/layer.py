"""What one class of a module adds to its extra state, and what stands below it: the base classes' and its own.

What is saved is made of dicts, strings, numbers and tensors, which `torch.load` takes without unpickling anything else:

    {"modelstate": 1, "class": "Net", "version": 1, "values": {"epoch": 3}, "base": ...}

`base` is what the next class of the method resolution order gives, or the class's own `get_extra_state`, and is absent
where neither has any. Loading goes through all layers and checks everything before the first attribute is set.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from modelstate.codec.codec import decode, encode
from modelstate.errors import (
    ExtraStateFormatError,
    ExtraStateNamesError,
    ExtraStateVersionError,
    ModelStateError,
    UpgradeError,
)
from modelstate.extra import attributes
from modelstate.extra.declaration import Declaration, listed
from modelstate.plan.prepare import CHECK_EXTRA_STATE
from modelstate.plan.recorder import is_recorded
from modelstate.read.tree import EXTRA_STATE

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
