"""`torch.nn.Module.load_state_dict`, all or nothing."""

import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from modelstate.checkpoint.open import argument_order, is_module, is_source
from modelstate.planning.placement import copy_cannot_fail
from modelstate.planning.recorder import IncompatibleKeys, walk
from modelstate.process import gc_paused
from modelstate.torch_compat.plain import has_its_memory, is_plain, same_place
from modelstate.torch_compat.private import IncompatibleKeys as ReturnedKeys
from modelstate.torch_compat.private import has_registration_hooks, is_tensor_like, module_load, swap_tensors, use_count
from modelstate.transaction.exclusive import exclusive
from modelstate.transaction.swap_tensors import exchange
from modelstate.transaction.transaction import Transaction, Write


@argument_order("ms.load_state_dict", is_module, is_source, call_for_paths="ms.load")
def load_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> ReturnedKeys:
    """Loads a state dict as `torch.nn.Module.load_state_dict` does, or leaves the module as it was.

    Arguments, return value, warnings and error texts are torch's, under both settings of
    `torch.__future__.set_swap_module_params_on_conversion`, and the model's own code (hooks, overrides, `module_load`
    handlers, `set_extra_state`) runs when torch would run it and sees what it would see there. The differences: after
    an error, whoever raised it, every tensor, buffer, attribute, gradient and extra state of the module is what it
    was, bit for bit and object for object; the cost is linear in the number of tensors; and `_metadata` is not
    written to. It can take the place of the method: `torch.nn.Module.load_state_dict = modelstate.load_state_dict`.

    Where the model's code reads or changes tensors while it loads, the old values of those tensors are kept until
    the end: that much memory is needed on top. What that code does is seen through torch's functions in its own
    thread: what reaches tensors in other ways (through a NumPy array or a pointer that it got before, in another
    thread, in a TorchScript function, by `torch.utils.swap_tensors`) is not, and neither are attributes of classes, a
    move to shared memory, NumPy arrays above 64 MB, Python objects beyond the first million that the module holds, or
    those that raise when they are asked what they hold.

    Raises what torch raises: `TypeError` for a state dict that is no mapping, `RuntimeError` that lists everything
    that does not fit, and whatever the model's code raises.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
    outcome = IncompatibleKeys()
    versions = getattr(state_dict, "_metadata", None)
    with exclusive(module), Transaction(module) as transaction:
        take = _TorchTake(transaction)
        with gc_paused():
            walk(module, state_dict, versions, assign=assign, transaction=transaction, take=take, outcome=outcome)
        _raise_errors(module, outcome, strict)
        transaction.commit()
    return ReturnedKeys(outcome.missing, outcome.unexpected)


def _raise_errors(module: nn.Module, outcome: IncompatibleKeys, strict: bool) -> None:
    errors = outcome.errors
    if strict and outcome.unexpected:
        errors.insert(0, f"Unexpected key(s) in state_dict: {_quoted(outcome.unexpected)}. ")
    if strict and outcome.missing:
        errors.insert(0, f"Missing key(s) in state_dict: {_quoted(outcome.missing)}. ")
    if errors:
        lines = "\n\t".join(errors)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{lines}")


def _quoted(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


class _TorchTake:
    """What torch does with each value: checked now, written when it must be."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._swaps = torch.__future__.get_swap_module_params_on_conversion()

    def extra_state(self, module: nn.Module, key: str, value: Any) -> None:
        module.set_extra_state(value)

    def device_after(self, param: torch.Tensor) -> torch.device:
        return param.device

    def tensor(
        self, module: nn.Module, name: str, key: str, param: torch.Tensor, value: Any, assign: bool, errors: list[str]
    ) -> None:
        if not is_tensor_like(value):
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
        if param.is_meta and not value.is_meta and not assign:
            warnings.warn(
                f"for {key}: copying from a non-meta parameter in the checkpoint to a meta "
                "parameter in the current model, which is a no-op. (Did you mean to "
                "pass `assign=True` to assign items in the state dictionary to their "
                "corresponding key in the module instead of copying them in place?)",
                stacklevel=2,
            )
        try:
            with torch.no_grad():
                self._write(module, name, param, value, assign)
        except Exception as error:
            action = "swapping" if self._swaps else "copying"
            errors.append(
                f'While {action} the parameter named "{key}", '
                f"whose dimensions in the model are {param.size()} and "
                f"whose dimensions in the checkpoint are {value.size()}, "
                f"an exception occurred : {error.args}."
            )

    def _write(self, module: nn.Module, name: str, param: torch.Tensor, value: torch.Tensor, assign: bool) -> None:
        transaction = self._transaction
        for one in () if assign else (param, value):  # torch would use the memory where they were
            if is_plain(one) and not one.is_meta and not has_its_memory(one):
                raise RuntimeError(f"the memory of the {'parameter' if one is param else 'value'} has been freed")
        write: Write
        if self._swaps:
            sure = _swap_cannot_fail(param, value, assign)
            write = _Swap(param, value, assign, checked=sure)
        elif assign:
            write, sure = _Assign(module, name, param, value), _assign_cannot_fail(module, param, value)
        elif is_plain(param) and is_plain(value) and same_place(param, value):
            return
        else:
            write, sure = _Copy(param, value), copy_cannot_fail(param, value)
        if sure:
            transaction.add(write)
        else:
            transaction.run_now(write)


class _Copy(Write):
    __slots__ = ()

    def run(self, transaction: Transaction | None) -> None:
        if transaction is not None:
            transaction.save_tensor(self.target)
        with torch.no_grad():
            self.target.copy_(self.value)


class _Assign(Write):
    __slots__ = ("module", "name")
    replaces_object = True

    def __init__(self, module: nn.Module, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__(target, value)
        self.module, self.name = module, name

    def run(self, transaction: Transaction | None) -> None:
        value, requires_grad = self.value, self.target.requires_grad
        if isinstance(self.target, nn.Parameter):
            if not isinstance(value, nn.Parameter):
                value = nn.Parameter(value, requires_grad=requires_grad)
            else:
                before = value.requires_grad
                value.requires_grad_(requires_grad)
                if transaction is not None and before != requires_grad:
                    transaction.register_undo(partial(setattr, value, "requires_grad", before))
        setattr(self.module, self.name, value)


class _Swap(Write):
    __slots__ = ("assign", "checked")

    def __init__(self, target: torch.Tensor, value: torch.Tensor, assign: bool, checked: bool) -> None:
        super().__init__(target, value)
        self.assign = assign
        self.checked = checked
        """Whether torch's checks have been passed: what has come to refer to the tensor since does not count."""

    def run(self, transaction: Transaction | None) -> None:
        param = self.target
        if transaction is not None:
            transaction.save_tensor(param)
        with torch.no_grad():
            new = module_load(param, self.value, assign=self.assign)
            if new is self.value or new is param:
                raise RuntimeError(
                    "module_load returned one of self or other, please .detach() "
                    "the result if returning one of the inputs in module_load"
                )
            if isinstance(param, nn.Parameter):
                if not isinstance(new, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=param.requires_grad)
                else:
                    new.requires_grad_(param.requires_grad)
            if self.checked:
                undo = exchange(param, new)
            else:
                swap_tensors(param, new)
                undo = partial(exchange, param, new)
        if transaction is not None:
            transaction.register_undo(undo)


def _assign_cannot_fail(module: nn.Module, param: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether wrapping the value and setting it as an attribute is sure to succeed."""
    return (
        type(module).__setattr__ is nn.Module.__setattr__
        and not has_registration_hooks()
        and is_plain(value)
        and not value.is_inference()
        and (not param.requires_grad or value.is_floating_point() or value.is_complex())
    )


def _swap_cannot_fail(param: torch.Tensor, value: torch.Tensor, assign: bool) -> bool:
    """Whether torch's `module_load` and `swap_tensors` are sure to succeed."""
    if not (is_plain(param) and is_plain(value)) or value.is_inference() or weakref.getweakrefs(param):
        return False
    if assign and param.requires_grad and not (value.is_floating_point() or value.is_complex()):
        return False
    return use_count(param) == 1 and (assign or copy_cannot_fail(param, value))
