"""`torch.nn.Module.load_state_dict`, all or nothing."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from modelstate.arguments import checked_call
from modelstate.errors import keep_interrupt
from modelstate.formats.tree import refused_in
from modelstate.planning.options import check_model
from modelstate.planning.recorder import IncompatibleKeys, walk
from modelstate.planning.transfer import copy_cannot_fail
from modelstate.process import gc_paused
from modelstate.torch_compat.modules import IncompatibleKeys as ReturnedKeys, needs_protocol
from modelstate.torch_compat.plain import has_its_memory, is_plain, is_sharded, same_place
from modelstate.torch_compat.private import has_registration_hooks, use_count
from modelstate.torch_compat.sharding import refresh_shards, reshard
from modelstate.transaction.slots import compare_names, slots_of
from modelstate.transaction.swap_tensors import exchange
from modelstate.transaction.transaction import Transaction, Write, exclusive


@checked_call("ms.load_state_dict")
def load_state_dict(
    model: nn.Module, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
) -> ReturnedKeys:
    """Loads a state dict as `torch.nn.Module.load_state_dict` does, or leaves the module unchanged.

    Arguments, return value, warnings and error texts are those of torch, under both settings of
    `torch.__future__.set_swap_module_params_on_conversion`. The model's own code (hooks, overrides, `module_load`
    handlers, `set_extra_state`) runs at the same points as in torch, and sees the same values. There are three
    differences. After any error, every tensor, buffer, attribute, gradient and extra state of the module is unchanged,
    bit for bit and object for object. The cost is linear in the number of tensors. `_metadata` is not written to.
    The function can replace the method: `torch.nn.Module.load_state_dict = modelstate.load_state_dict`.

    Where the model's code reads or changes tensors while it loads, the old values of those tensors are kept until the
    end, which needs that much more memory. Only changes through torch's functions, in the same thread, are undone.
    Other changes are not: through a NumPy array or a pointer from before the load, in another thread, in a TorchScript
    function, by `torch.utils.swap_tensors`, of attributes of classes, by a move to shared memory, of NumPy arrays above
    64 MB, of Python objects beyond the first million of the module, or of objects that cannot be inspected.

    Args:
        model: The module to load into.
        state_dict: A mapping from names to values.
        strict: Whether missing and unexpected names raise.
        assign: Whether the values become the module's tensors, instead of being copied into them.

    Returns:
        The named tuple of torch with the lists `missing_keys` and `unexpected_keys`.

    Raises:
        TypeError: The state dict is not a mapping, or (an `OptionError`) the module is not a module.
        RuntimeError: The state dict does not fit the module. The error lists everything that does not fit.
        Exception: Every exception of the model's own code is passed on.

    Examples:
        >>> modelstate.load_state_dict(model, torch.load("model.pt"))
        <All keys matched successfully>
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
    check_model(model)
    versions = getattr(state_dict, "_metadata", None)
    with exclusive(model), Transaction(model) as transaction:
        reshard(model.modules())
        sink = _TorchSink(transaction)
        with gc_paused():
            slots = slots_of(model)
            if assign or needs_protocol(slots.modules, state_dict.keys(), versions):
                outcome = walk(model, slots, state_dict, versions, sink, assign=assign)
            else:
                common, missing, unexpected = compare_names(slots, state_dict.keys())
                outcome = IncompatibleKeys(missing, unexpected)
                for key in common:
                    sink.tensor(key, slots.by_name[key].tensor, state_dict[key], None, outcome.errors)
        errors = outcome.errors
        for kind, keys in (("Unexpected", outcome.unexpected), ("Missing", outcome.missing)) if strict else ():
            if keys:
                quoted = ", ".join(f'"{key}"' for key in keys)
                errors.insert(0, f"{kind} key(s) in state_dict: {quoted}. ")
        if errors:
            lines = "\n\t".join(errors)
            raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{lines}")
        transaction.register_undo(refresh_shards(model.modules()))
        transaction.commit()
    return ReturnedKeys(outcome.missing, outcome.unexpected)


class _TorchSink:
    """Does with each value what torch does. Values are checked at once; writes that cannot fail wait for the commit."""

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction
        self._swaps = torch.__future__.get_swap_module_params_on_conversion()

    def extra_state(self, module: nn.Module, key: str, value: object) -> None:
        if unread := refused_in(value, key):
            from modelstate.formats.construct import refusal

            raise refusal(unread, "the state dict")
        module.set_extra_state(value)

    def device_after(self, param: torch.Tensor) -> torch.device:
        return param.device

    def tensor(self, key: str, param: torch.Tensor, value: Any, owner: nn.Module | None, errors: list[str]) -> None:
        if not torch.overrides.is_tensor_like(value):  # type: ignore[no-untyped-call]
            errors.append(
                f'While copying the parameter named "{key}", '
                f"expected torch.Tensor or Tensor-like object from checkpoint but received {type(value)}"
            )
            return
        lazy = torch.nn.parameter.is_lazy(param)
        # Files from before torch 0.4 hold scalars as one element.
        if not lazy and len(param.shape) == 0 and len(value.shape) == 1 and value.shape[0] == 1:
            value = value[0]
        if not lazy and value.shape != param.shape:
            errors.append(
                f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
                f"the shape in current model is {param.shape}."
            )
            return
        if param.is_meta and not value.is_meta and owner is None:
            warnings.warn(
                f"for {key}: copying from a non-meta parameter in the checkpoint to a meta "
                "parameter in the current model, which is a no-op. (Did you mean to "
                "pass `assign=True` to assign items in the state dictionary to their "
                "corresponding key in the module instead of copying them in place?)",
                stacklevel=2,
            )
        try:
            with torch.no_grad():
                self._write(key, param, value, owner)
        except Exception as error:
            keep_interrupt(error)
            action = "swapping" if self._swaps else "copying"
            errors.append(
                f'While {action} the parameter named "{key}", '
                f"whose dimensions in the model are {param.size()} and "
                f"whose dimensions in the checkpoint are {value.size()}, "
                f"an exception occurred : {error.args}."
            )

    def _write(self, key: str, param: torch.Tensor, value: torch.Tensor, owner: nn.Module | None) -> None:
        transaction, assigns, cannot_fail = self.transaction, owner is not None, False
        for tensor in () if assigns else (param, value):  # torch would access memory that is freed
            if is_plain(tensor) and not tensor.is_meta and not has_its_memory(tensor):
                raise RuntimeError(f"the memory of the {'parameter' if tensor is param else 'value'} has been freed")
        write = Write(param, value)
        if self._swaps:
            cannot_fail = _swap_cannot_fail(param, value, assigns)
            write = Write(param, value, partial(_module_load, param, value, assigns, cannot_fail))
        elif owner is not None:
            name = key.rpartition(".")[2]
            write = Write(param, value, partial(_assign, owner, name, param, value))
            if _assign_cannot_fail(owner, param, value):
                # At once, since code of the model can see the new object without a use of the tensor.
                transaction.register_undo(partial(setattr, owner, name, param))
                write.run(transaction)
                return
        elif is_plain(param, value) and same_place(param, value):
            return
        else:
            cannot_fail = copy_cannot_fail(param, value)
        if cannot_fail:
            transaction.add(write)
        else:
            transaction.run_now(write)


def _assign(owner: nn.Module, name: str, param: torch.Tensor, value: torch.Tensor, transaction: Transaction) -> None:
    if isinstance(param, nn.Parameter):
        if isinstance(value, nn.Parameter):
            transaction.register_undo(partial(setattr, value, "requires_grad", value.requires_grad))
        value = _as_parameter(value, param.requires_grad)
    setattr(owner, name, value)


def _as_parameter(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    if isinstance(value, nn.Parameter):
        return value.requires_grad_(requires_grad)
    return nn.Parameter(value, requires_grad=requires_grad)


def _module_load(
    param: torch.Tensor, value: torch.Tensor, assign: bool, is_checked: bool, transaction: Transaction | None
) -> None:
    """Does what torch does when swapping is switched on.

    `is_checked` says that torch's checks have been passed. References that are created later are not checked.
    """
    if transaction is not None:
        transaction.save_tensor(param)
    with torch.no_grad():
        new = param.module_load(value, assign=assign)  # type: ignore[no-untyped-call]
        if new is value or new is param:
            raise RuntimeError(
                "module_load returned one of self or other, please .detach() "
                "the result if returning one of the inputs in module_load"
            )
        if isinstance(param, nn.Parameter):
            new = _as_parameter(new, param.requires_grad)

        def swap() -> Callable[[], object]:
            (exchange if is_checked else torch.utils.swap_tensors)(param, new)
            return partial(exchange, param, new)

        swap() if transaction is None else transaction.change(swap)


def _assign_cannot_fail(module: nn.Module, param: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether wrapping the value and setting it as an attribute cannot fail."""
    return (
        type(module).__setattr__ is nn.Module.__setattr__
        and not has_registration_hooks()
        and is_plain(value)
        and not is_sharded(param)  # FSDP2 looks at its parameters before the commit
        and not value.is_inference()
        and (not param.requires_grad or value.is_floating_point() or value.is_complex())
        and isinstance(param, nn.Parameter) >= isinstance(value, nn.Parameter)  # else it becomes a parameter
    )


def _swap_cannot_fail(param: torch.Tensor, value: torch.Tensor, assign: bool) -> bool:
    """Whether torch's `module_load` and `swap_tensors` cannot fail."""
    fits = not (assign and param.requires_grad) or value.is_floating_point() or value.is_complex()
    is_free = is_plain(param, value) and not value.is_inference() and not weakref.getweakrefs(param)
    return fits and is_free and use_count(param) == 1 and (assign or copy_cannot_fail(param, value))
