"""Putting a value into its slot."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from modelstate.place.stage import stage_one
from modelstate.place.swap import give_memory, swap_unchecked
from modelstate.plan.journal import Journal, Write
from modelstate.plan.placement import copy_cannot_fail, is_plain
from modelstate.plan.prepare import Assignment, Preparation
from modelstate.plan.torch_private import keep_hooks, module_load, swap_impl, swap_tensors


class Place(Write):
    """The write that carries an assignment out, by what the value has become in the end."""

    __slots__ = ("made", "preparation")

    def __init__(self, preparation: Preparation, made: Assignment) -> None:
        super().__init__(made.param, made.value)
        self.preparation, self.made = preparation, made

    @property
    def cannot_fail(self) -> bool:
        """Whether all that remains is a copy between memory that is there."""
        made, final = self.made, self.made.final
        if final is None or made.placement.by_handler or made.param.is_meta or not _fits(made):
            return False
        return final is made.param or copy_cannot_fail(made.param, final)

    def run(self, journal: Journal | None) -> None:
        made, param = self.made, self.target
        if made.final is None:
            if journal is not None:
                made.placement = replace(made.placement, mapped=False)  # model code has the value in its hands
            stage_one(self.preparation, made)
        final = made.final
        assert final is not None
        if final is param:
            return  # it was read in place
        if journal is None:
            with torch.no_grad():
                param.copy_(final)
        elif param.is_meta and not made.placement.by_handler and is_plain(final):
            other = give_memory(param, final)
            journal.undo(partial(swap_impl, param, other))
        else:
            with torch.no_grad():
                self._exchange(param, final, journal)

    def _exchange(self, param: torch.Tensor, final: torch.Tensor, journal: Journal) -> None:
        made = self.made
        if made.placement.by_handler or not is_plain(final):
            journal.save(param)
            _by_handler(param, final, journal) if made.placement.by_handler else _become(param, final, journal)
            made.dtype, made.device = param.dtype, param.device
        elif _fits(made):
            journal.save(param)
            param.copy_(final)
        else:
            journal.save_place(param)
            _point_to(param, final)


def _fits(made: Assignment) -> bool:
    """Whether the slot keeps the memory that it has."""
    return made.param.dtype == made.dtype and made.param.device == made.device


def _by_handler(param: torch.Tensor, value: torch.Tensor, journal: Journal) -> None:
    """What torch does when swapping is switched on: the subclass says what becomes of the value.

    See `torch.Tensor.module_load`.
    """
    new = module_load(param, value, assign=param.is_meta)
    if new is value or new is param:
        raise RuntimeError("module_load returned one of self or other; it must return a new tensor")
    if is_plain(new) and not is_plain(param):
        raise RuntimeError(
            f"its class would no longer be {type(param).__name__}, for nothing says how a tensor becomes one"
        )
    _become(param, new, journal)


def _as(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value as what the slot holds: a parameter that needs a gradient or does not, or a buffer."""
    if not isinstance(param, nn.Parameter):
        return value
    differentiable = value.is_floating_point() or value.is_complex()
    requires_grad = param.requires_grad and differentiable
    if isinstance(value, nn.Parameter):
        return value.requires_grad_(requires_grad)
    return nn.Parameter(value, requires_grad=requires_grad)


def _become(param: torch.Tensor, value: torch.Tensor, journal: Journal) -> None:
    """Makes `param` what `value` is: class, attributes and memory; its gradient stays where that still fits."""
    new = _as(param, value)
    grad = param.grad if param.is_leaf else None
    restore_hooks = keep_hooks(param)
    swap_tensors(param, new)
    journal.undo(lambda: swap_unchecked(param, new))
    restore_hooks()
    if grad is not None and (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device):
        param.grad = grad


def _point_to(param: torch.Tensor, final: torch.Tensor) -> None:
    """Other memory of another dtype or device under the same object; its gradient goes with it."""
    grad = param.grad if param.is_leaf else None
    if grad is None or not final.is_floating_point():
        param.data = final
        return
    new_grad = grad.to(final.device, final.dtype)
    param.grad = None
    param.data = final
    param.grad = new_grad
