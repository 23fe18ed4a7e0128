"""`walk`: PyTorch's loading protocol, with a `LoadSink` in place of the writes.

`walk` makes the calls of `torch.nn.Module.load_state_dict` in the same order: pre-hooks, `_load_from_state_dict` with
its overrides, `set_extra_state`, post-hooks. Each tensor that the base class would write goes to the sink, which may
defer the write. `walk` groups the names by child once. The base class searches the whole state dict for every child,
which is quadratic for a module with many children.

Most models have no loading code of their own. `torch_compat.modules.needs_protocol` tells them apart, and
`transaction.slots.compare_names` does what the protocol does for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Protocol

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from modelstate.formats.tree import EXTRA_STATE, leaves
from modelstate.process import ThreadValue
from modelstate.spec import set_version_metadata, version_metadata
from modelstate.torch_compat.modules import (
    IncompatibleKeys as ReturnedKeys,
    MethodOverride,
    ModuleContainer,
    Overrides,
    load_from_state_dict,
    load_post_hooks,
    load_pre_hooks,
    non_persistent_buffers,
    overrides,
    overrides_loading,
    own_buffers,
    own_modules,
    own_parameters,
)
from modelstate.transaction.slots import Slots
from modelstate.transaction.transaction import Transaction


class LoadSink(Protocol):
    """Receives each value that the base class would write."""

    transaction: Transaction

    def tensor(self, key: str, param: torch.Tensor, value: object, owner: nn.Module | None, errors: list[str]) -> None:
        """Receives `value`, which is `state_dict[key]`, for the tensor that is `param` before the load.

        `owner` is None unless the value itself is to be registered in this module, as with `assign=True`.
        """

    def extra_state(self, module: nn.Module, key: str, value: object) -> None:
        """Receives `state_dict[key]` for `module.set_extra_state`. Called within the transaction's `model_code`."""

    def device_after(self, param: torch.Tensor) -> torch.device:
        """Returns the device of a tensor of the model after all writes."""


_Load = Callable[..., ReturnedKeys]
"""A `load_state_dict`."""
Versions = Mapping[str, dict[str, object]] | None
"""The versions of modules by their paths, as torch's `_metadata` has them; None where they are unknown."""


class IncompatibleKeys(msgspec.Struct):
    """The missing keys, unexpected keys and errors of a walk, with torch's texts."""

    missing: list[str] = msgspec.field(default_factory=list)
    unexpected: list[str] = msgspec.field(default_factory=list)
    errors: list[str] = msgspec.field(default_factory=list)
    called: list[nn.Module] = msgspec.field(default_factory=list)
    """The modules whose own `load_state_dict` was called."""


def walk(
    root: nn.Module,
    slots: Slots,
    state_dict: Mapping[str, object],
    versions: Versions,
    sink: LoadSink,
    *,
    assign: bool = False,
    calls_own: bool = False,
) -> IncompatibleKeys:
    """Runs the protocol for `root`, whose slots are given, and its descendants.

    With `calls_own`, an override of `load_state_dict` is called: that of `root`, as torch does, and that of a
    descendant which overrides `state_dict` too, so that what its own method saves goes to its own method.

    Passes on every exception of the model's own code.
    """
    recording = _Recording(sink, set(map(id, slots.modules.values())), versions, assign, calls_own)
    with _overrides.used():
        _visit_alone(recording, root, state_dict)
    return recording.outcome


class _Recording(msgspec.Struct, eq=False):
    sink: LoadSink
    modules: set[int]
    versions: Versions
    assign: bool
    calls_own: bool
    prefix: str = ""
    """Of the names of a module that is visited as if it were loaded alone."""
    outcome: IncompatibleKeys = msgspec.field(default_factory=IncompatibleKeys)
    load: _Load | None = None
    """Called in place of torch's `load_state_dict`, by the override of a module."""


def _visit_alone(
    recording: _Recording, root: nn.Module, state_dict: Mapping[str, object], prefix: str = "", calls_root: bool = True
) -> None:
    """Visits a module as if it were loaded alone: its code sees a state dict of its own, without a prefix."""
    cut, versions, outcome = len(prefix), recording.versions, recording.outcome
    own = OrderedDict(((key[cut:], value) for key, value in state_dict.items()) if prefix else state_dict)
    if versions is not None and prefix:
        versions = {path[cut:]: saved for path, saved in versions.items() if f"{path}.".startswith(prefix)}
    if versions is not None:
        set_version_metadata(own, versions)
    of_root = IncompatibleKeys(called=outcome.called)
    alone = replace(recording, prefix=recording.prefix + prefix, versions=versions, outcome=of_root)
    calls_own = calls_root and recording.calls_own and overrides(root, "load_state_dict")
    visit: Callable[..., None] = _call_own if calls_own else _visit
    with _recording.replaced(alone):
        visit(alone, root, own)
    outcome.missing += [prefix + key for key in of_root.missing]
    outcome.unexpected += [prefix + key for key in of_root.unexpected]
    outcome.errors += of_root.errors


def _visit(recording: _Recording, module: nn.Module, state_dict: dict[str, object], prefix: str = "") -> None:
    transaction, outcome, versions = recording.sink.transaction, recording.outcome, recording.versions
    # A copy: torch writes the flag below into the state dict's own metadata, where it decides the next load too.
    local_metadata = {} if versions is None else copy(versions.get(prefix[:-1], {}))
    if recording.assign:
        local_metadata["assign_to_params_buffers"] = True
    recording.modules.add(id(module))
    lists = outcome.missing, outcome.unexpected, outcome.errors
    if overrides_loading(module):
        with transaction.model_code():
            load_from_state_dict(module)(state_dict, prefix, local_metadata, True, *lists)
    else:
        _load_local(recording, module, state_dict, prefix, local_metadata, True, *lists)
    parts = _by_child(state_dict, prefix, own_modules(module))
    # Children are looked up in each iteration, because code of earlier children may have replaced them.
    for name, child in own_modules(module).items():
        if child is not None:
            if name not in parts:
                parts = _by_child(state_dict, prefix, own_modules(module))
            is_alone = isinstance(module, ModuleContainer) and not isinstance(child, ModuleContainer)
            has_own_pair = recording.calls_own and overrides(child, "load_state_dict", "state_dict")
            visit: Callable[..., None] = _visit_alone if is_alone or has_own_pair else _visit
            visit(recording, child, parts[name], f"{prefix}{name}.")
    incompatible = ReturnedKeys(outcome.missing, outcome.unexpected)
    for hook in load_post_hooks(module):
        with transaction.model_code():
            returned = hook(module, incompatible)
        if returned is not None:
            raise AssertionError(
                "Hooks registered with ``register_load_state_dict_post_hook`` are not "
                "expected to return new values, if incompatible_keys need to be modified, "
                "it should be done inplace."
            )


def _call_own(recording: _Recording, module: nn.Module, state_dict: dict[str, object]) -> None:
    """Calls the `load_state_dict` of a module that overrides it.

    What it calls of torch's own method, for the module or for modules in it, is recorded as a load without an override.

    Names are as strict as with torch's own method: whatever the override tolerates, each name that the module's own
    `state_dict` gives has to be there, and others are unexpected. Names that the override takes itself are known to it.
    """
    transaction, outcome = recording.sink.transaction, recording.outcome
    prefixes = {id(inner): f"{path}." if path else "" for path, inner in module.named_modules()}
    outcomes: dict[str, IncompatibleKeys] = {}
    """What the last call of torch's method for each module found, by the prefix of the module."""
    refused: list[RuntimeError] = []
    """The errors of strict calls of torch's method. The names in them are problems of the load."""

    def load(
        stock: _Load, inner: nn.Module, given: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> ReturnedKeys:
        """Does what torch's method does, with the sink in place of writes."""
        if id(inner) not in prefixes or not isinstance(given, Mapping):
            return stock(inner, given, strict, assign)
        of_inner = IncompatibleKeys(called=outcome.called)
        as_root = replace(recording, versions=version_metadata(given), assign=assign, outcome=of_inner)
        with transaction.library_code():
            _visit_alone(as_root, inner, given, calls_root=False)
        outcomes[prefixes[id(inner)]] = of_inner
        if of_inner.errors or (strict and (of_inner.missing or of_inner.unexpected)):
            message = f"missing keys {of_inner.missing}, unexpected keys {of_inner.unexpected} {of_inner.errors}"
            refused.append(RuntimeError(f"Error(s) in loading state_dict for {type(inner).__name__}: {message}"))
            raise refused[-1]
        return ReturnedKeys(of_inner.missing, of_inner.unexpected)

    recording.load, own_load = load, module.load_state_dict
    with transaction.model_code():
        saved = own_state(module)
        names = [name for name, _ in leaves(saved) if name]
        try:
            own_load(copy(state_dict))
        except RuntimeError as error:
            if error not in refused:
                raise
            outcomes.clear()
            own_load(copy(state_dict), strict=False)  # options of the load may allow these names
    outcome.called.append(module)
    for prefix, of_inner in outcomes.items():
        outcome.missing += [prefix + name for name in of_inner.missing]
        outcome.unexpected += [name for name in of_inner.unexpected if prefix + name not in {*names, *saved}]
        outcome.errors += of_inner.errors
    if "" not in outcomes or outcome.missing:
        own = (*module.named_parameters(), *module.named_buffers()) if "" in outcomes else ()
        known = {name for name, _ in (*own, *leaves(state_dict))}
        outcome.missing += [name for name in names if name not in known]


def outermost(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that were given, each with the prefix of its names: those of a container, or the model."""
    if not isinstance(model, ModuleContainer):
        yield prefix, model
        return
    for name, child in model.named_children():
        yield from outermost(child, f"{prefix}{name}.")


def own_state(module: nn.Module) -> Mapping[str, object]:
    """Returns the module's own `state_dict`; nothing when it fails, as on the meta device."""
    try:
        state = module.state_dict()
        list(leaves(state))
    except Exception:
        return {}
    return state if isinstance(state, Mapping) else {}


def _by_child(
    state_dict: Mapping[str, object], prefix: str, children: Mapping[str, object]
) -> dict[str, dict[str, object]]:
    """Returns the items below each child."""
    parts: dict[str, dict[str, object]] = {name: {} for name in children.keys()}  # noqa: SIM118  (TorchScript's)
    for key, value in state_dict.items():
        child, dot, _ = key[len(prefix) :].partition(".") if key.startswith(prefix) else ("", "", "")
        if dot and child in parts:
            parts[child][key] = value
    for name in [name for name in parts if "." in name]:
        parts[name] = {key: value for key, value in state_dict.items() if key.startswith(f"{prefix}{name}.")}
    return parts


def _load_local(
    recording: _Recording,
    module: nn.Module,
    state_dict: dict[str, object],
    prefix: str,
    local_metadata: dict[str, object],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Does what the base class does for one module, with the sink in place of writes."""
    transaction, extra_key = recording.sink.transaction, prefix + EXTRA_STATE
    for hook in load_pre_hooks(module):
        with transaction.model_code():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
    owner = module if local_metadata.get("assign_to_params_buffers", False) else None
    hidden, tensors = non_persistent_buffers(module), {**own_parameters(module), **own_buffers(module)}
    own = {prefix + name: param for name, param in tensors.items() if param is not None and name not in hidden}
    has_extra = type(module).set_extra_state is not nn.Module.set_extra_state
    for key in (*own, extra_key) if has_extra else own:
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
        elif key in own:
            recording.sink.tensor(recording.prefix + key, own[key], state_dict[key], owner, error_msgs)
        else:
            with transaction.model_code():
                recording.sink.extra_state(module, recording.prefix + key, state_dict[key])
    if strict:
        known, children, unexpected = {*own, extra_key} if has_extra else own, own_modules(module), list[str]()
        for key in [key for key in state_dict if key.startswith(prefix) and key not in known]:
            child, dot, _ = key[len(prefix) :].partition(".")
            if not (dot and child in children):
                unexpected.append(key)
        unexpected_keys += sorted(unexpected, key=lambda key: key != extra_key)


KEEPS_NAMES = "modelstate_keeps_names"
"""An attribute that marks a hook or a `_load_from_state_dict` that does not change the meaning of names."""


def loads_names_itself(module: nn.Module) -> bool:
    """Whether loading code of the module, other than torch's and this library's, may change the meaning of names."""
    holders = (vars(module), *map(vars, type(module).__mro__))
    methods = [holder["_load_from_state_dict"] for holder in holders if "_load_from_state_dict" in holder]
    for function in (getattr(method, "__func__", method) for method in methods):
        is_torchs = getattr(function, "__module__", "").startswith("torch.nn.modules.")  # as that of batch norms
        if not getattr(function, KEEPS_NAMES, is_torchs):
            return True
    return not all(getattr(hook, KEEPS_NAMES, False) for hook in load_pre_hooks(module))


def recording_of(module: nn.Module) -> _Recording | None:
    """What `walk` records, if it is calling the module's loading code: then the module's changes can be undone."""
    recording = _recording.value
    return recording if recording is not None and id(module) in recording.modules else None


_recording = ThreadValue[_Recording | None](None)
"""The recording that has the calls of torch's own methods in a thread."""


def _load_from_state_dict(stock: Callable[..., None], self: nn.Module, *args: object, **named: object) -> None:
    recording = recording_of(self)
    if recording is None:
        stock(self, *args, **named)
    else:
        with recording.sink.transaction.library_code():
            _load_local(recording, self, *args, **named)  # type: ignore[arg-type]


def _load_state_dict(stock: _Load, *args: object, **named: object) -> ReturnedKeys:
    recording = _recording.value
    if recording is None or recording.load is None:
        return stock(*args, **named)
    return recording.load(stock, *args, **named)


_overrides = Overrides(
    MethodOverride(nn.Module, "_load_from_state_dict", _load_from_state_dict, over_others=False),
    MethodOverride(nn.Module, "load_state_dict", _load_state_dict),
)
