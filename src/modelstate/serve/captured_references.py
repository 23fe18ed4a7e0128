"""What a second instance of a module would still have of the first: weights that no version of it may serve.

A deep copy keeps functions as they are. What they hold, by closure, default, attribute or a global of theirs, is the
first instance, also where the copy calls them. And a tensor that is no part of the state is copied as it is, so a view
of a weight becomes a tensor that nothing changes any more.
"""

import dis
import functools
import types
import weakref
from collections import deque
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from modelstate.errors import LiveTargetError
from modelstate.torch_compat.private import payload_of, slots_of_class, storage_id

_LISTED = 4
_CONTAINERS = (list, tuple, set, frozenset, deque)
_NO_ANSWERS = ("_backward_hooks", "_backward_pre_hooks", "_non_persistent_buffers_set")
"""Attributes of modules that no request and no load comes to."""
_CALLED = frozenset(
    [
        *("forward", "__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward"),
        *("load_state_dict", "_load_from_state_dict", "set_extra_state"),
        *("get_parameter", "get_buffer", "get_submodule"),
    ]
)
"""Methods of every module that requests and loads do come to; libraries wrap others, as `to` and `extra_repr`."""
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
Found = tuple[str, Any]


def check_captured_references(module: nn.Module, made: nn.Module) -> None:
    """Raises `LiveTargetError` where a copy of a module would serve weights of the module itself."""
    state = _state(module)
    own = {id(one): f"module {path!r}" if path else "the module" for path, one in module.named_modules()}
    own |= {id(one): name for name, one in (*module.named_parameters(), *module.named_buffers())}
    memory = {storage: name for name, one in state.items() for storage in _storages(one)}
    found: list[str] = []
    for path, value in _reached(made, own):
        if id(value) in own:
            found.append(f"{path} is {own[id(value)]} of the first version")
    for path, value in _reached(module, ()):
        if not isinstance(value, torch.Tensor) or id(value) in own:
            continue
        shown = next((memory[storage] for storage in _storages(value) if storage in memory), None)
        if shown is not None:
            found.append(f"{path} is a view of {shown}")
    if found:
        raise LiveTargetError(
            "later versions would serve weights of the first one, which the module keeps where no copy follows",
            where=type(module).__name__,
            found="; ".join(found[:_LISTED]) + (f"; and {len(found) - _LISTED} more" if found[_LISTED:] else ""),
            remedy="patch the class, or the instance by types.MethodType; let hooks use the module that they "
            "are given; compile the whole, torch.compile(module); make a property of a view",
        )


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """What versions have of their own: not the buffers that no checkpoint has, whose views a copy keeps."""
    state: dict[str, torch.Tensor] = dict(module.named_parameters())
    for path, one in module.named_modules():
        for name, buffer in one._buffers.items():
            if buffer is not None and name not in one._non_persistent_buffers_set:
                state[f"{path}.{name}" if path else name] = buffer
    return state


def _storages(tensor: torch.Tensor) -> set[int]:
    """The addresses of what has a tensor's memory."""
    return {storage_id(part) for part in payload_of(tensor) if not part.is_meta} - {0}


def _reached(root: nn.Module, ends: Container[int]) -> Iterator[Found]:
    """Each module and tensor that is reached from a module, with its path. What is behind those of `ends` is not."""
    registered = {id(one): path for path, one in root.named_modules()}
    seen: set[int] = set()
    kept: list[Any] = []  # ids stand for these
    waiting = deque[Found](root.named_modules())  # the shortest paths first
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen or type(value) in weakref.ProxyTypes:
            continue
        seen.add(id(value))
        kept.append(value)
        if isinstance(value, torch.Tensor | nn.Module):
            yield path, value
        if id(value) in ends:
            continue
        if isinstance(value, nn.Module):
            waiting.extend(_of_module(registered.get(id(value), path), value))
        elif not isinstance(value, torch.Tensor):
            waiting.extend(_within(path, value))


def _of_module(path: str, module: nn.Module) -> Iterator[Found]:
    """Its attributes, less those that a hook makes anew before each call, as that of `spectral_norm` does."""
    made = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
    for name, value in list(vars(module).items()):
        if name in _NO_ANSWERS or name in made or (hasattr(nn.Module, name) and name not in _CALLED):
            continue
        if name == "_modules" or name == "_parameters" or name == "_buffers":
            yield from ((f"{path}.{key}" if path else key, one) for key, one in list(value.items()))
        else:
            yield f"{path}.{name}" if path else name, value


def _within(path: str, value: Any) -> Iterable[Found]:
    """What a value holds: functions, methods, containers, and objects that are nobody's in torch."""
    if isinstance(value, types.FunctionType):
        return _of_function(path, value)
    if isinstance(value, _METHODS):
        return [(f"{path}.__self__", value.__self__), (path, getattr(value, "__func__", None))]
    if isinstance(value, functools.partial):
        parts = [(f"{path}.func", value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords)]
        return [*parts, *_attributes(path, value)]
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", one) for key, one in list(dict.items(value))]
    if isinstance(value, _CONTAINERS):
        return [(f"{path}[{at}]", one) for at, one in enumerate(list(_items(value)))]
    if isinstance(value, weakref.ref):
        return [(f"{path}()", value())] if isinstance(value(), nn.Module) else []
    home = type(value).__module__
    of_torch = home.partition(".")[0] in ("torch", "builtins") and not home.startswith("torch.nn.")
    return [] if isinstance(value, type | types.ModuleType) or of_torch else _attributes(path, value)


def _of_function(path: str, value: types.FunctionType) -> Iterator[Found]:
    """Its closure, defaults and attributes, and what it finds of modules and functions among its globals."""
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f"{path}: {name}", cell.cell_contents
        except ValueError:
            continue  # nothing has been put into it yet
    yield f"{path}.__defaults__", value.__defaults__
    yield f"{path}.__kwdefaults__", value.__kwdefaults__
    yield from _attributes(path, value)
    for name in _names(value.__code__):
        one = value.__globals__.get(name)
        foreign = isinstance(one, types.FunctionType) and one.__globals__ is not value.__globals__
        if isinstance(one, (*_METHODS, types.FunctionType, functools.partial, torch.Tensor, nn.Module)) and not foreign:
            yield f"{path}: {name}", one


def _names(code: types.CodeType) -> set[str]:
    """The globals that code reads, and that the functions within it read."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_names(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def _attributes(path: str, value: Any) -> Iterator[Found]:
    """Instance attributes. `__wrapped__` is left out: it says what a function was made of, and is not called."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    for name, one in list(own.items()):
        if name != "__wrapped__":
            yield f"{path}.{name}", one
    for name in slots_of_class(type(value)):
        one = getattr(value, name, None)
        if one is not None:
            yield f"{path}.{name}", one


def _items(value: Any) -> Iterator[Any]:
    """The items that are there, whatever a subclass makes of iteration."""
    kind = next(kind for kind in _CONTAINERS if isinstance(value, kind))
    return kind.__iter__(value)
