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
from contextlib import ExitStack, nullcontext
from copy import copy
from typing import Any, Protocol

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
    has_own_load,
    has_own_state_dict,
    load_from_state_dict,
    load_post_hooks,
    load_pre_hooks,
    non_persistent_buffers,
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
    modules = list(slots.modules.values())
    recording = _Recording(
        sink, sink.transaction, IncompatibleKeys(), set(map(id, modules)), versions, assign, calls_own
    )
    ordered = OrderedDict(state_dict)
    if versions is not None:
        set_version_metadata(ordered, versions)
    has_code = any(map(overrides_loading, modules)) or (calls_own and any(map(has_own_load, modules)))
    with ExitStack() as patched:
        if has_code:  # calls of the base class method are redirected to the recording, in this thread
            patched.enter_context(_recording.replaced(recording))
            patched.enter_context(_overrides.used())
        _visit(recording, root, ordered, "", is_root=True)
    return recording.outcome


class _Recording(msgspec.Struct, eq=False, weakref=True):
    sink: LoadSink
    transaction: Transaction
    outcome: IncompatibleKeys
    modules: set[int]
    versions: Versions
    assign: bool
    calls_own: bool
    prefix: str = ""
    """Of the names of a module that is visited as if it were loaded alone."""


def _visit(
    recording: _Recording, module: nn.Module, state_dict: dict[str, object], prefix: str, is_root: bool = False
) -> None:
    if is_root and recording.calls_own and has_own_load(module):
        _call_own(recording, module, state_dict)
        return
    # A copy: torch writes the flag below into the state dict's own metadata, where it decides the next load too.
    local_metadata = {} if recording.versions is None else copy(recording.versions.get(prefix[:-1], {}))
    if recording.assign:
        local_metadata["assign_to_params_buffers"] = True
    recording.modules.add(id(module))
    outcome = recording.outcome
    lists = (outcome.missing, outcome.unexpected, outcome.errors)
    own: set[str] | None = None
    if overrides_loading(module):
        with recording.transaction.model_code():
            load_from_state_dict(module)(state_dict, prefix, local_metadata, True, *lists)
    else:
        own = _load_local(recording, module, state_dict, prefix, local_metadata, True, *lists)
    parts, rest = _by_child(state_dict, prefix, own_modules(module))
    if own is not None and not own.issuperset(rest):
        outcome.unexpected += [key for key in rest if key not in own]
    # Children and values are looked up in each iteration, because code of earlier children may have replaced them.
    count = len(state_dict)
    for name, child in own_modules(module).items():
        if child is not None:
            if len(state_dict) != count or name not in parts:
                parts, _ = _by_child(state_dict, prefix, own_modules(module))
                count = len(state_dict)
            is_alone = isinstance(module, ModuleContainer) and not isinstance(child, ModuleContainer)
            has_own_pair = recording.calls_own and has_own_load(child) and has_own_state_dict(child)
            visit = _visit_alone if is_alone or has_own_pair else _visit
            visit(recording, child, parts[name], f"{prefix}{name}.")
    incompatible = ReturnedKeys(outcome.missing, outcome.unexpected)
    for hook in load_post_hooks(module):
        with recording.transaction.model_code():
            returned = hook(module, incompatible)
        if returned is not None:
            raise AssertionError(
                "Hooks registered with ``register_load_state_dict_post_hook`` are not "
                "expected to return new values, if incompatible_keys need to be modified, "
                "it should be done inplace."
            )


def _visit_alone(recording: _Recording, root: nn.Module, state_dict: Mapping[str, object], prefix: str) -> None:
    """Visits a module as if it were loaded alone: its code sees its own state dict, without a prefix."""
    cut, versions = len(prefix), recording.versions
    own = OrderedDict((key[cut:], value) for key, value in state_dict.items())
    if versions is not None:
        versions = {path[cut:]: version for path, version in versions.items() if f"{path}.".startswith(prefix)}
        set_version_metadata(own, versions)
    alone = replace(recording, prefix=recording.prefix + prefix, outcome=IncompatibleKeys(), versions=versions)
    with _recording.replaced(alone) if _recording.value is recording else nullcontext():
        _visit(alone, root, own, "", is_root=True)
    recording.outcome.called += alone.outcome.called
    recording.outcome.missing += [prefix + key for key in alone.outcome.missing]
    recording.outcome.unexpected += [prefix + key for key in alone.outcome.unexpected]
    recording.outcome.errors += alone.outcome.errors


class _OwnLoad:
    """A call of the `load_state_dict` of a module that overrides it.

    What it calls of torch's own method, for the module or for modules in it, is recorded as a load without an override.
    """

    def __init__(self, recording: _Recording, root: nn.Module) -> None:
        self.recording = recording
        self.paths = {id(module): path for path, module in root.named_modules()}
        self.outcomes: dict[int, tuple[str, IncompatibleKeys]] = {}
        """The prefix of each module for which torch's method was called, and what the last call found."""
        self.refused: RuntimeError | None = None
        """The error of a strict call of torch's method. The names in it are problems of the load."""

    def load(self, module: nn.Module, state_dict: Mapping[str, object], strict: bool, assign: bool) -> ReturnedKeys:
        """Does what torch's method does, with the sink in place of writes."""
        path, outcome = self.paths[id(module)], IncompatibleKeys()
        own = OrderedDict(state_dict)
        versions: Any = version_metadata(state_dict)
        recording = replace(self.recording, outcome=outcome, versions=versions, assign=assign)
        if versions is not None:
            set_version_metadata(own, versions)
        with recording.transaction.library_code(), _recording.replaced(recording):
            _visit(recording, module, own, "")
        self.outcomes[id(module)] = f"{path}." if path else "", outcome
        self.recording.outcome.called += outcome.called
        if outcome.errors or (strict and (outcome.missing or outcome.unexpected)):
            self.refused = RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}: "
                f"missing keys {outcome.missing}, unexpected keys {outcome.unexpected} {outcome.errors}"
            )
            raise self.refused
        return ReturnedKeys(outcome.missing, outcome.unexpected)


def _call_own(recording: _Recording, module: nn.Module, state_dict: dict[str, object]) -> None:
    """Calls the `load_state_dict` of a module that overrides it.

    Names are as strict as with torch's own method: whatever the override tolerates, each name that the module's own
    `state_dict` gives has to be there, and others are unexpected. Names that the override takes itself are known to it.
    """
    own, outcome = _OwnLoad(recording, module), recording.outcome
    versions = version_metadata(state_dict)

    def given() -> dict[str, object]:
        copied = state_dict.copy()
        if versions is not None:
            set_version_metadata(copied, versions)
        return copied

    load: Callable[..., object] = module.load_state_dict
    with recording.transaction.model_code(), _own_load.replaced(own), _base_loads.used():
        saved = own_state(module)
        names = [name for name, _ in leaves(saved) if name]
        try:
            load(given())
        except RuntimeError as error:
            if error is not own.refused:
                raise
            own.outcomes.clear()
            load(given(), strict=False)  # options of the load may allow these names
    outcome.called.append(module)
    has_base = False
    for prefix, of_module in own.outcomes.values():
        has_base = has_base or not prefix
        outcome.missing += [prefix + name for name in of_module.missing]
        outcome.unexpected += [name for name in of_module.unexpected if prefix + name not in {*names, *saved}]
        outcome.errors += of_module.errors
    if not has_base or outcome.missing:
        known = {name for name, _ in (*module.named_parameters(), *module.named_buffers())} if has_base else set()
        known.update(name for name, _ in leaves(state_dict))
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
) -> tuple[dict[str, dict[str, object]], list[str]]:
    """Returns the items below each child, and the names below no child."""
    if not children:
        return {}, [key for key in state_dict if key.startswith(prefix)]
    parts: dict[str, dict[str, object]] = {name: {} for name in children.keys()}  # noqa: SIM118  (TorchScript's)
    rest: list[str] = []
    cut = len(prefix)
    for key, value in state_dict.items():
        if key.startswith(prefix):
            child, dot, _ = key[cut:].partition(".")
            if dot and child in parts:
                parts[child][key] = value
            else:
                rest.append(key)
    for name in parts:
        if "." in name:
            parts[name].clear()
            parts[name].update((key, value) for key, value in state_dict.items() if key.startswith(f"{prefix}{name}."))
    return parts, rest


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
) -> set[str]:
    """Does what the base class does for one module, with the sink in place of writes, and without unexpected keys.

    Returns the keys that the module expects for itself, present or not.
    """
    for hook in load_pre_hooks(module):
        with recording.transaction.model_code():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
    owner = module if local_metadata.get("assign_to_params_buffers", False) else None
    extra_key = prefix + EXTRA_STATE
    own = {extra_key}
    # The module's own parameters and persistent buffers, without entries that are None.
    tensors: list[tuple[str, torch.Tensor]] = [(name, p) for name, p in own_parameters(module).items() if p is not None]
    if buffers := own_buffers(module):
        hidden = non_persistent_buffers(module)
        tensors += [(name, b) for name, b in buffers.items() if b is not None and name not in hidden]
    for name, param in tensors:
        key = prefix + name
        own.add(key)
        if key in state_dict:
            recording.sink.tensor(recording.prefix + key, param, state_dict[key], owner, error_msgs)
        elif strict:
            missing_keys.append(key)
    if type(module).set_extra_state is not nn.Module.set_extra_state:
        if extra_key in state_dict:
            with recording.transaction.model_code():
                recording.sink.extra_state(module, recording.prefix + extra_key, state_dict[extra_key])
        elif strict:
            missing_keys.append(extra_key)
    elif strict and extra_key in state_dict:
        unexpected_keys.append(extra_key)
    return own


KEEPS_NAMES = "modelstate_keeps_names"
"""An attribute that marks a hook or a `_load_from_state_dict` that does not change the meaning of names."""


def loads_names_itself(module: nn.Module) -> bool:
    """Whether loading code of the module, other than torch's and this library's, may change the meaning of names."""
    if not all(getattr(hook, KEEPS_NAMES, False) for hook in load_pre_hooks(module)):
        return True
    holders = (vars(module), *map(vars, type(module).__mro__))
    for method in (holder["_load_from_state_dict"] for holder in holders if "_load_from_state_dict" in holder):
        function = getattr(method, "__func__", method)
        is_torchs = getattr(function, "__module__", "").startswith("torch.nn.modules.")  # as that of batch norms
        if function is not _override.replacement and not getattr(function, KEEPS_NAMES, is_torchs):
            return True
    return False


def device_after(module: nn.Module, param: torch.Tensor) -> torch.device:
    """Returns the device of a module's tensor after the current load, which may move the tensor later."""
    recording = recording_of(module)
    return param.device if recording is None else recording.sink.device_after(param)


def recording_of(module: nn.Module) -> _Recording | None:
    """What `walk` records, if it is calling the module's loading code: then the module's changes can be undone."""
    recording = _recording.value
    return recording if recording is not None and id(module) in recording.modules else None


_recording = ThreadValue[_Recording | None](None)
"""The recording that has the calls of the base class method in a thread."""


def _load_from_state_dict(
    stock: Callable[..., None],
    self: nn.Module,
    state_dict: Any,
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    lists = missing_keys, unexpected_keys, error_msgs
    recording = recording_of(self)
    if recording is None:
        stock(self, state_dict, prefix, local_metadata, strict, *lists)
        return
    with recording.transaction.library_code():
        own = _load_local(recording, self, state_dict, prefix, local_metadata, strict, *lists)
    if strict:
        _, rest = _by_child(state_dict, prefix, own_modules(self))
        unexpected_keys += [key for key in rest if key not in own]


_override = MethodOverride(nn.Module, "_load_from_state_dict", _load_from_state_dict, over_others=False)
_overrides = Overrides(_override)


def _load_state_dict(
    stock: Callable[..., ReturnedKeys], self: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False
) -> ReturnedKeys:
    own = _own_load.value
    if own is None or id(self) not in own.paths or not isinstance(state_dict, Mapping):
        return stock(self, state_dict, strict, assign)
    return own.load(self, state_dict, strict, assign)


_own_load = ThreadValue[_OwnLoad | None](None)
"""The call of an override of `load_state_dict` in a thread."""
_base_loads = Overrides(MethodOverride(nn.Module, "load_state_dict", _load_state_dict))
