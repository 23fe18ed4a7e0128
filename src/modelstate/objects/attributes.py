"""Attributes of a module: read for saving, and set all together or not at all."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from modelstate.errors import ExtraStateAttributeError
from modelstate.planning.recorder import device_after

Undo = list[Callable[[], None]]


def read(module: nn.Module, name: str) -> Any:
    """The value of an attribute that is to be saved."""
    check(module, name)
    try:
        value = getattr(module, name)
    except Exception as error:
        raise ExtraStateAttributeError(
            "an attribute that is declared as extra state is not there",
            where=place(module, name),
            found=f"{type(error).__name__}: {error}",
            remedy="set it in __init__, to None if it has no value yet",
        ) from error
    check_value(module, name, value)
    return value


def check(module: nn.Module, name: str) -> None:
    """Raises `ExtraStateAttributeError` for what torch keeps itself."""
    kinds = (("parameter", module._parameters), ("buffer", module._buffers), ("submodule", module._modules))
    for kind, group in kinds:
        if name in group:
            hidden = name in module._non_persistent_buffers_set
            raise ExtraStateAttributeError(
                f"an attribute that is declared as extra state is a {kind}",
                where=place(module, name),
                remedy="register it with persistent=True instead"
                if hidden
                else "take it out of the declaration: the state dict has it already",
            )


def check_value(module: nn.Module, name: str, value: object) -> None:
    """Raises `ExtraStateAttributeError` for a value that would become part of the module if it were set."""
    if isinstance(value, nn.Module | nn.Parameter | nn.Buffer):
        raise ExtraStateAttributeError(
            "extra state cannot be a parameter, a buffer or a module",
            where=place(module, name),
            found=type(value).__name__,
            remedy="register it, or have its values in a plain tensor",
        )


def put(module: nn.Module, values: Iterable[tuple[str, Any]], first: Callable[[], None] | None = None) -> None:
    """Calls `first`, which may change attributes of the module too, and sets the values; an error undoes all of it."""
    with _undone_by_an_error(module) as undo:
        if first is not None:
            first()
        for name, value in values:
            _put(module, name, value, undo)


def place(module: nn.Module, name: str) -> str:
    """An attribute, as a message has it."""
    return f"{type(module).__qualname__}.{name}"


@contextmanager
def _undone_by_an_error(module: nn.Module) -> Iterator[Undo]:
    kept = dict(module.__dict__)
    undo: Undo = []
    try:
        yield undo
    except BaseException:
        for step in reversed(undo):
            step()
        module.__dict__.clear()
        module.__dict__.update(kept)
        raise


def _put(module: nn.Module, name: str, value: Any, undo: Undo) -> None:
    there = _there(module, name)
    if undo_stream := _continue_stream(there, value):
        undo.append(undo_stream)
        return
    if hasattr(type(module), name):  # a property or a slot, whose value is not in the module's dict
        undo.append(partial(setattr, module, name, there))
    try:
        setattr(module, name, _moved(value, _device(module, there)) if any(True for _ in _tensors(value)) else value)
    except Exception as error:
        raise ExtraStateAttributeError(
            "an attribute that is declared as extra state cannot be set",
            where=place(module, name),
            found=f"{type(error).__name__}: {error}",
        ) from error


def _there(module: nn.Module, name: str) -> Any:
    """The value that is there now; None where there is none, or a property raises."""
    try:
        return getattr(module, name, None)
    except Exception:
        return None


def _continue_stream(there: Any, value: Any) -> Callable[[], None] | None:
    """Gives a generator that is there the state of another one, so that whoever holds it draws from the right stream.

    Returns the undo; None for anything else.
    """
    if type(there) is not type(value):
        return None
    numpys = type(value).__module__.startswith("numpy.random")
    same_device = isinstance(value, torch.Generator) and there.device == value.device
    if same_device or (numpys and hasattr(value, "set_state")):
        set_, kept, new = there.set_state, there.get_state(), value.get_state()
    elif numpys and hasattr(value, "bit_generator") and type(there.bit_generator) is type(value.bit_generator):
        bits = there.bit_generator
        set_, kept, new = partial(setattr, bits, "state"), bits.state, value.bit_generator.state
    else:
        return None
    set_(new)
    return partial(set_, kept)


def _device(module: nn.Module, there: Any) -> torch.device | None:
    """Where tensors of a value belong: where those are that it replaces, or else the module's parameters."""
    for tensor in _tensors(there):
        if not tensor.is_meta:
            return tensor.device
    devices = (device_after(module, param) for param in module.parameters())
    return next((device for device in devices if device.type != "meta"), None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple):
        for part in value:
            yield from _tensors(part)
    elif type(value) is dict:
        yield from _tensors(list(value.values()))


def _moved(value: Any, device: torch.device | None) -> Any:
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(part, device) for part in value)
    if type(value) is dict:
        return {key: _moved(part, device) for key, part in value.items()}
    return value
