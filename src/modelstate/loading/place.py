"""`Place`: the write that puts a staged value into its slot."""

from contextlib import nullcontext
from dataclasses import replace

import torch

from modelstate.loading.stage import stage_one
from modelstate.loading.staging import Staging
from modelstate.planning.assignment import Assignment, copy_cannot_fail
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.sharding import dtensor_like
from modelstate.transaction.swap_tensors import become, give_memory, point_to, refusals
from modelstate.transaction.transaction import Transaction, Write


class Place(Write):
    """The write that executes an assignment. The final value decides how."""

    __slots__ = ("assignment", "staging")

    def __init__(self, staging: Staging, assignment: Assignment) -> None:
        self.target, self.value, self.done, self.order = assignment.param, assignment.value, False, 0
        self.staging, self.assignment = staging, assignment

    @property
    def cannot_fail(self) -> bool:
        """Whether only a copy between existing memory remains."""
        assignment, final = self.assignment, self.assignment.final
        if (
            final is None
            or assignment.placement.by_handler
            or assignment.param.is_meta
            or not _keeps_memory(assignment)
        ):
            return False
        return final is assignment.param or copy_cannot_fail(assignment.param, final)

    def run(self, transaction: Transaction | None) -> None:
        assignment, param = self.assignment, self.target
        if assignment.final is None:
            if transaction is not None:
                if assignment.placement.leased:
                    assignment.stage_instead("code of the model uses it")
                assignment.placement = replace(assignment.placement, mapped=False)  # model code uses the value
                assignment.choose_route()
            stage_one(self.staging, assignment)
        final = assignment.final
        assert final is not None
        if final is param:
            return  # the value was read in place
        if transaction is None:
            param.copy_(final)
        elif assignment.sharded is not None and (param.is_meta or not _keeps_memory(assignment) or not is_plain(final)):
            # The DTensor stays the same object. In inference mode it would become one that cannot be trained.
            held = assignment.sharded.tensor
            with torch.inference_mode(final.is_inference()), torch.no_grad():
                transaction.save_metadata(held)
                transaction.register_undo(become(held, dtensor_like(held, final), _converted_grad(held, final)))
        elif param.is_meta and not assignment.placement.by_handler and is_plain(final):
            transaction.register_undo(give_memory(param, final))
        else:
            with torch.no_grad():
                self._replace(param, final, transaction)
        if assignment.freezes and assignment.slot_tensor.requires_grad:
            _freeze(assignment.slot_tensor, transaction)

    def _replace(self, param: torch.Tensor, final: torch.Tensor, transaction: Transaction) -> None:
        assignment = self.assignment
        if assignment.placement.by_handler or not is_plain(final):
            if assignment.placement.by_handler:
                transaction.save_tensor(param)
                _by_handler(assignment.name, param, final, transaction)
            else:
                transaction.save_metadata(param)
                _take_over(assignment.name, param, final, transaction)
            assignment.dtype, assignment.device = param.dtype, param.device
        elif _keeps_memory(assignment):
            transaction.save_tensor(param)
            param.copy_(final)
        else:
            transaction.register_undo(point_to(param, final, _converted_grad(param, final)))


def _keeps_memory(assignment: Assignment) -> bool:
    """Whether the slot keeps its memory."""
    return assignment.param.dtype == assignment.dtype and assignment.param.device == assignment.device


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
