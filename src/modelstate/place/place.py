"""Putting a value into its slot."""

from contextlib import nullcontext
from dataclasses import replace

import torch

from modelstate.place.stage import stage_one
from modelstate.place.swap import become, give_memory, point_to
from modelstate.place.swap_tensors import refusals
from modelstate.plan.assignment import Assignment
from modelstate.plan.journal import Journal, Write
from modelstate.plan.placement import copy_cannot_fail, is_plain
from modelstate.plan.prepare import Preparation
from modelstate.plan.torch_private import module_load


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
            journal.undo(give_memory(param, final))
        else:
            with torch.no_grad():
                self._exchange(param, final, journal)
        if made.freezes and param.requires_grad:
            _freeze(param, journal)

    def _exchange(self, param: torch.Tensor, final: torch.Tensor, journal: Journal) -> None:
        made = self.made
        if made.placement.by_handler or not is_plain(final):
            if made.placement.by_handler:
                journal.save(param)
                _by_handler(made.name, param, final, journal)
            else:
                journal.save_place(param)
                _become(made.name, param, final, journal)
            made.dtype, made.device = param.dtype, param.device
        elif _fits(made):
            journal.save(param)
            param.copy_(final)
        else:
            grad = param.grad if param.is_leaf and final.is_floating_point() else None
            new_grad = None if grad is None else grad.to(final.device, final.dtype)
            journal.undo(point_to(param, final, new_grad))


def _fits(made: Assignment) -> bool:
    """Whether the slot keeps the memory that it has."""
    return made.param.dtype == made.dtype and made.param.device == made.device


def _by_handler(name: str, param: torch.Tensor, value: torch.Tensor, journal: Journal) -> None:
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
    _become(name, param, new, journal)


def _freeze(param: torch.Tensor, journal: Journal | None) -> None:
    """A parameter that gets no gradient any more, and has none."""
    grad = param.grad

    def undo() -> None:
        param.requires_grad_()
        param.grad = grad

    if journal is not None:
        journal.undo(undo)
    param.grad = None
    param.requires_grad_(False)


def _become(name: str, param: torch.Tensor, value: torch.Tensor, journal: Journal) -> None:
    """Makes `param` what `value` is; its gradient stays where that still fits."""
    for error in refusals({name: param}):
        raise error
    grad = param.grad if param.is_leaf else None
    fits = grad is not None and (grad.shape, grad.dtype, grad.device) == (value.shape, value.dtype, value.device)
    # What is made in inference mode could never be trained; what was made there can only be changed there.
    made_there = param.is_inference() or value.is_inference()
    with nullcontext() if made_there else torch.inference_mode(False):
        journal.undo(become(param, value, grad if fits else None))
