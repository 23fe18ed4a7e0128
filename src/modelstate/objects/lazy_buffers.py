"""Buffers that are None until they are assigned, of whatever shape they get.

To torch such a buffer is one that is registered with None, so that everything but loading is torch's own. Loading has a
hook of the module make room before torch looks for the names that it expects: the hook sees what the checkpoint has and
gives the buffer that shape, or None. Saving has a hook put into torch's `_metadata` which of the buffers were set, so
that a value which has got lost on the way is told from one that never was.
"""

import keyword
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from modelstate.errors import BufferNameError, OptionError
from modelstate.planning.recorder import KEEPS_NAMES
from modelstate.torch_compat.plain import is_plain
from modelstate.transaction.slots import LAZY

NOTE = "modelstate.lazy_buffers"
"""Where the `_metadata` of a module says which of its lazy buffers were set when it was saved."""

_came: "WeakKeyDictionary[nn.Module, tuple[list[str], dict[str, bool]]]" = WeakKeyDictionary()
"""For each module the last load, known by its list of errors, and what that has said of buffers: set, or None."""


def register_lazy_buffer(module: nn.Module, name: str) -> None:
    """Gives a module a buffer that is None until `module.name` is assigned, and then of that shape and dtype.

    Once it is set it is a buffer as any other: it moves with the module and stands in `state_dict()` under its name.
    Loading sets it whatever the checkpoint has: a value of any shape, or None. It works with torch's own
    `load_state_dict` as with `modelstate.load`. A buffer that is set stays the same object, of the same dtype and on
    the same device; one that was None gets the dtype of the checkpoint, and the device of the module's other tensors.

    Raises `BufferNameError` for a name that the module cannot take, and `OptionError` for what is no module or no text.
    """
    _check(module, name)
    typed: Any = module
    typed.register_buffer(name, None)
    known: tuple[str, ...] = vars(module).get(LAZY, ())
    if not known:
        typed.register_load_state_dict_pre_hook(_before_loading)
        typed.register_state_dict_post_hook(_after_saving)
    if name not in known:  # as it is where the buffer was deleted
        setattr(module, LAZY, (*known, name))


def _check(module: nn.Module, name: str) -> None:
    if not isinstance(module, nn.Module):
        raise OptionError("not a module", expected="torch.nn.Module", found=type(module).__name__)
    where = type(module).__name__
    if "_buffers" not in vars(module):
        raise OptionError("the module is not initialised", where=where, remedy="call super().__init__() before")
    if not isinstance(name, str):
        raise OptionError("the name of a buffer is text", where=where, expected="str", found=repr(name))
    if not name.isidentifier() or keyword.iskeyword(name):
        raise BufferNameError(
            "no name that an attribute can have",
            where=where,
            expected="letters, digits and underscores, as 'running_table'",
            found=repr(name),
            remedy="register it on the submodule that is meant" if "." in name else "choose another name",
        )
    if name in module._buffers:
        lazy = name in vars(module).get(LAZY, ())
        raise BufferNameError(
            "the module has a buffer of that name",
            where=f"{where}.{name}",
            found="a lazy buffer" if lazy else "a buffer of register_buffer",
            remedy="register it once" if lazy else "take the call of register_buffer away; this one takes its place",
        )
    if hasattr(module, name):
        raise BufferNameError(
            "the module has an attribute of that name",
            where=f"{where}.{name}",
            found=_described(getattr(module, name)),
            remedy="register the buffer before anything is assigned to it (it is None until then), or rename it",
        )


def _described(value: object) -> str:
    return "None" if value is None else f"an object of class {type(value).__name__}"


def _after_saving(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """The hook of `state_dict`: notes which of the lazy buffers were set."""
    local_metadata[NOTE] = {name: module._buffers[name] is not None for name in _names(module)}


def _before_loading(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """The hook of `load_state_dict`: makes each lazy buffer such that torch finds what it expects."""
    noted = local_metadata.get(NOTE)
    noted = noted if isinstance(noted, Mapping) else {}
    if module not in _came or _came[module][0] is not error_msgs:
        _came[module] = error_msgs, {}
    came = _came[module][1]
    for name in _names(module):
        key = prefix + name
        there = key in state_dict
        says = True if there else bool(noted[name]) if name in noted else None
        if says is not None and came.setdefault(name, says) is not says:
            error_msgs.append(f'"{key}" is set under one name of a shared module, and None under another.')
        if there:
            _make_room(module, name, key, state_dict, _is_assigning(local_metadata), error_msgs)
        elif says and strict and module._buffers[name] is None:
            missing_keys.append(key)
        elif says is False or (says is None and name not in came and _speaks_of(state_dict, prefix, module)):
            module._buffers[name] = None


setattr(_before_loading, KEEPS_NAMES, True)


def _names(module: nn.Module) -> list[str]:
    """The lazy buffers of a module, without those that have been deleted, or have been made parameters."""
    return [name for name in vars(module).get(LAZY, ()) if name in module._buffers]


def _is_assigning(local_metadata: Mapping[str, Any]) -> bool:
    """Whether torch is about to put the checkpoint's tensor in the place of the buffer."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    return bool(local_metadata.get("assign_to_params_buffers", False)) and not swaps


def _speaks_of(state_dict: Iterable[str], prefix: str, module: nn.Module) -> bool:
    """Whether a checkpoint has something of every part of a module: of its own tensors, and of each of its children.

    One that has not, as where a part of a model is loaded with `strict=False`, says nothing of the buffer either.
    """
    heads = {key[len(prefix) :].partition(".")[0] for key in state_dict if key.startswith(prefix)}
    children = {name: child for name, child in module._modules.items() if child is not None}
    if _has_own(module) and heads <= set(children):
        return False
    return heads.issuperset(name for name, child in children.items() if any(map(_has_own, child.modules())))


def _has_own(module: nn.Module) -> bool:
    """Whether every checkpoint of a module has something of its own."""
    passed = {*vars(module).get(LAZY, ()), *module._non_persistent_buffers_set}
    own = {
        name for group in (module._parameters, module._buffers) for name, tensor in group.items() if tensor is not None
    }
    return not own <= passed


def _make_room(
    module: nn.Module, name: str, key: str, state_dict: dict[str, Any], assigns: bool, error_msgs: list[str]
) -> None:
    """Gives the buffer the shape of the value that is about to be copied into it."""
    value, buffer = state_dict[key], module._buffers[name]
    if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value):
        if buffer is None:  # otherwise torch complains by itself
            del state_dict[key]
            error_msgs.append(
                f'While copying the buffer named "{key}", '
                f"expected torch.Tensor from checkpoint but received {type(value)}"
            )
    elif buffer is None or not _has_its_shape(buffer, value):
        if assigns:
            module._buffers[name] = value
        elif buffer is not None and _can_be_resized(buffer) and _is_ordinary(value):
            _resize(buffer, value.shape)
        else:
            module._buffers[name] = _empty(value, _device(module) if buffer is None else buffer.device)


def _has_its_shape(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    if nn.parameter.is_lazy(buffer) or buffer.is_nested or value.is_nested:
        return True  # to be decided by torch
    return buffer.shape == value.shape


def _can_be_resized(buffer: torch.Tensor) -> bool:
    return _is_ordinary(buffer) and buffer.is_leaf and not buffer.is_inference()


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and not tensor.is_quantized


@torch.inference_mode(False)
@torch.no_grad()
def _resize(buffer: torch.Tensor, shape: torch.Size) -> None:
    """Gives a buffer memory of another shape under its own identity; whoever shares the old memory keeps that."""
    buffer.grad = None
    buffer.data = torch.empty(shape, dtype=buffer.dtype, device=buffer.device)


@torch.inference_mode(False)
@torch.no_grad()
def _empty(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if _is_ordinary(value):
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    return value.detach().clone().to(device)  # only its class knows what an empty one is


def _device(module: nn.Module) -> torch.device:
    """Where the tensors of a module are, or else those of its descendants; meta only where all of them are there."""
    own = chain(module._parameters.values(), module._buffers.values())
    for tensors in (own, chain(module.parameters(), module.buffers())):
        devices = [tensor.device for tensor in tensors if tensor is not None]
        if devices:
            return next((device for device in devices if device.type != "meta"), devices[0])
    return torch.device("cpu")
