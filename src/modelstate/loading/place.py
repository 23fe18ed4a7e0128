"""`Place`: the write that puts a staged value into its slot."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from modelstate.loading.stage import stage_one
from modelstate.loading.staging import Staging
from modelstate.planning.transfer import Transfer, Way, copy_cannot_fail
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.sharding import dtensor_like
from modelstate.transaction.swap_tensors import become, give_memory, point_to, refusals
from modelstate.transaction.transaction import Transaction, Write


class Place(Write):
    """The write that executes a transfer. The final value decides how."""

    __slots__ = ("staging", "transfer")

    def __init__(self, staging: Staging, transfer: Transfer) -> None:
        super().__init__(transfer.param, transfer.value)
        self.staging, self.transfer = staging, transfer

    @property
    def cannot_fail(self) -> bool:
        """Whether only a copy between existing memory remains."""
        transfer, param, final = self.transfer, self.transfer.param, self.transfer.final
        if final is None or transfer.way is Way.CODE or param.is_meta or not _keeps_memory(transfer):
            return False
        return final is param or copy_cannot_fail(param, final)

    def run(self, transaction: Transaction | None) -> None:
        transfer, param = self.transfer, self.target
        if transfer.final is None:
            if transaction is not None:
                if transfer.way is Way.INTO and self.staging.options.in_place is None:
                    transfer.stage_instead("code of the model uses it")
                transfer.maps = None  # the value is read: code uses it
                if transfer.way is Way.MAP:
                    transfer.way, transfer.why = Way.NEW, "was on meta: code of the model uses it"
            stage_one(self.staging, transfer)
        final = transfer.final
        assert final is not None
        if final is param:
            return  # the value was read in place
        if transaction is None:
            param.copy_(final)
        elif transfer.sharded is not None and (param.is_meta or not _keeps_memory(transfer) or not is_plain(final)):
            # The DTensor stays the same object. In inference mode it would become one that cannot be trained.
            held = transfer.sharded.tensor
            with torch.inference_mode(final.is_inference()), torch.no_grad():
                transaction.save_metadata(held)
                transaction.register_undo(become(held, dtensor_like(held, final), _converted_grad(held, final)))
        elif param.is_meta and transfer.way is not Way.CODE and is_plain(final):
            transaction.register_undo(give_memory(param, final))
        else:
            with torch.no_grad():
                self._replace(param, final, transaction)
        if transfer.freezes and transfer.slot_tensor.requires_grad:
            _freeze(transfer.slot_tensor, transaction)

    def _replace(self, param: torch.Tensor, final: torch.Tensor, transaction: Transaction) -> None:
        transfer = self.transfer
        if transfer.way is Way.CODE or not is_plain(final):
            if transfer.way is Way.CODE:
                transaction.save_tensor(param)
                _by_handler(transfer.name, param, final, transaction)
            else:
                transaction.save_metadata(param)
                _take_over(transfer.name, param, final, transaction)
            transfer.dtypes, transfer.device = [param.dtype], param.device
        elif _keeps_memory(transfer):
            transaction.save_tensor(param)
            param.copy_(final)
        else:
            transaction.register_undo(point_to(param, final, _converted_grad(param, final)))


def _keeps_memory(transfer: Transfer) -> bool:
    """Whether the slot keeps its memory."""
    return transfer.param.dtype == transfer.dtype and transfer.param.device == transfer.device


def _converted_grad(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a tensor with the dtype and device of its new value; None where the value cannot have one."""
    grad = tensor.grad if tensor.is_leaf and (value.is_floating_point() or value.is_complex()) else None
    return None if grad is None else grad.to(value.device, value.dtype)


def _by_handler(name: str, param: torch.Tensor, value: torch.Tensor, transaction: Transaction) -> None:
    """Replaces a tensor by the result of its `module_load` handler, as torch does when swapping is switched on."""
    new = param.module_load(value, assign=param.is_meta)  # type: ignore[no-untyped-call]
    if new is value or new is param:
        raise RuntimeError("module_load returned self or other; it must return a new tensor")
    if is_plain(new) and not is_plain(param):
        raise RuntimeError(
            f"its class would no longer be {type(param).__name__}: no handler converts a plain tensor to this class"
        )
    _take_over(name, param, new, transaction)


def _freeze(param: torch.Tensor, transaction: Transaction | None) -> None:
    """Clears `requires_grad` and the gradient of a parameter."""
    grad = param.grad

    def undo() -> None:
        param.requires_grad_()
        param.grad = grad

    if transaction is not None:
        transaction.register_undo(undo)
    param.grad = None
    param.requires_grad_(False)


def _take_over(name: str, param: torch.Tensor, value: torch.Tensor, transaction: Transaction) -> None:
    """Gives `param` the class, metadata and memory of `value`. A gradient stays if it still fits."""
    for error in refusals({name: param}):
        raise error
    grad = param.grad if param.is_leaf else None
    fits = grad is not None and (grad.shape, grad.dtype, grad.device) == (value.shape, value.dtype, value.device)
    # An inference tensor can only be changed in inference mode. Other tensors must not become inference tensors, which
    # cannot be trained.
    in_inference_mode = param.is_inference() or value.is_inference()
    with nullcontext() if in_inference_mode else torch.inference_mode(False):
        transaction.register_undo(become(param, value, grad if fits else None))
