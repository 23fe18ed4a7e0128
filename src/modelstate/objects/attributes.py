"""Reads the attributes of a module that extra state saves, and sets them, all or nothing."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from modelstate.errors import ExtraStateError, keep_interrupt
from modelstate.planning.recorder import device_after
from modelstate.torch_compat.modules import non_persistent_buffers, own_buffers, own_modules, own_parameters
from modelstate.transaction.transaction import Transaction


def read(module: nn.Module, name: str) -> object:
    """Returns the value of an attribute. Raises `ExtraStateError` where it cannot be saved."""
    check(module, name)
    try:
        value = getattr(module, name)
    except Exception as error:
        raise ExtraStateError(
            "an attribute that is declared as extra state is not there",
            where=place(module, name),
            found=f"{type(error).__name__}: {error}",
            remedy="set it in __init__, to None if it has no value yet",
        ) from error
    check_value(module, name, value)
    return value


def check(module: nn.Module, name: str) -> None:
    """Raises `ExtraStateError` for a parameter, a buffer or a submodule, which torch saves itself."""
    kinds: tuple[tuple[str, Mapping[str, object]], ...] = (
        ("parameter", own_parameters(module)),
        ("buffer", own_buffers(module)),
        ("submodule", own_modules(module)),
    )
    for kind, members in kinds:
        if name in members:
            is_left_out = name in non_persistent_buffers(module)
            raise ExtraStateError(
                f"an attribute that is declared as extra state is a {kind}",
                where=place(module, name),
                remedy="register it with persistent=True instead"
                if is_left_out
                else "take it out of the declaration: the state dict has it already",
            )


def check_value(module: nn.Module, name: str, value: object) -> None:
    """Raises `ExtraStateError` for a value that torch registers with the module when it is set."""
    if isinstance(value, nn.Module | nn.Parameter | nn.Buffer):
        raise ExtraStateError(
            "extra state cannot be a parameter, a buffer or a module",
            where=place(module, name),
            found=type(value).__name__,
            remedy="register it, or have its values in a plain tensor",
        )


def set_all(module: nn.Module, values: Iterable[tuple[str, object]], first: Callable[[], None] | None = None) -> None:
    """Calls `first`, which may also change attributes, and sets the values. Any error undoes all changes."""
    before = dict(module.__dict__)

    def undo() -> None:
        module.__dict__.clear()
        module.__dict__.update(before)

    with Transaction(module) as transaction:
        transaction.register_undo(undo)
        if first is not None:
            first()
        for name, value in values:
            _set(module, name, value, transaction)
        transaction.commit()


def place(module: nn.Module, name: str) -> str:
    """Returns the name of an attribute for a message."""
    return f"{type(module).__qualname__}.{name}"


def _set(module: nn.Module, name: str, value: object, transaction: Transaction) -> None:
    try:
        current = getattr(module, name, None)
    except Exception as error:  # a property that raises
        keep_interrupt(error)
        current = None
    if hasattr(type(module), name):  # a property or a slot, whose value is not in the module's dict
        transaction.register_undo(partial(setattr, module, name, current))
    try:
        has_tensors = any(True for _ in _tensors(value))
        setattr(module, name, _moved(value, _target_device(module, current)) if has_tensors else value)
    except Exception as error:
        raise ExtraStateError(
            "an attribute that is declared as extra state cannot be set",
            where=place(module, name),
            found=f"{type(error).__name__}: {error}",
        ) from error


def _target_device(module: nn.Module, current: object) -> torch.device | None:
    """Returns the device of the tensors that a value replaces, or else of the module's parameters."""
    for tensor in _tensors(current):
        if not tensor.is_meta:
            return tensor.device
    devices = (device_after(module, param) for param in module.parameters())
    return next((device for device in devices if device.type != "meta"), None)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) is list or type(value) is tuple:
        for part in value:
            yield from _tensors(part)
    elif type(value) is dict:
        yield from _tensors(list(value.values()))


def _moved(value: object, device: torch.device | None) -> object:
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if type(value) is list or type(value) is tuple:
        return type(value)(_moved(part, device) for part in value)
    if type(value) is dict:
        return {key: _moved(part, device) for key, part in value.items()}
    return value
