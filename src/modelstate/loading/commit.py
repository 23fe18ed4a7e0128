"""Puts values into slots, and hands values that were read in the background to the load that commits."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from modelstate.checkpoint.checkpoint import what_to_verify
from modelstate.loading.prefetch import bring_in, prefetch_range
from modelstate.loading.stage import Progress, stage, stage_one
from modelstate.planning.assignment import Assignment
from modelstate.planning.placement import copy_cannot_fail
from modelstate.planning.prepare import Preparation
from modelstate.rules.expression import Derived, Source
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import module_load
from modelstate.transaction.swap_tensors import become, give_memory, point_to, refusals
from modelstate.transaction.transaction import Transaction, Write


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

    def run(self, transaction: Transaction | None) -> None:
        made, param = self.made, self.target
        if made.final is None:
            if transaction is not None:
                made.placement = replace(made.placement, mapped=False)  # model code has the value in its hands
            stage_one(self.preparation, made)
        final = made.final
        assert final is not None
        if final is param:
            return  # it was read in place
        if transaction is None:
            with torch.no_grad():
                param.copy_(final)
        elif param.is_meta and not made.placement.by_handler and is_plain(final):
            transaction.register_undo(give_memory(param, final))
        else:
            with torch.no_grad():
                self._exchange(param, final, transaction)
        if made.freezes and param.requires_grad:
            _freeze(param, transaction)

    def _exchange(self, param: torch.Tensor, final: torch.Tensor, transaction: Transaction) -> None:
        made = self.made
        if made.placement.by_handler or not is_plain(final):
            if made.placement.by_handler:
                transaction.save_tensor(param)
                _by_handler(made.name, param, final, transaction)
            else:
                transaction.save_metadata(param)
                _become(made.name, param, final, transaction)
            made.dtype, made.device = param.dtype, param.device
        elif _fits(made):
            transaction.save_tensor(param)
            param.copy_(final)
        else:
            grad = param.grad if param.is_leaf and final.is_floating_point() else None
            new_grad = None if grad is None else grad.to(final.device, final.dtype)
            transaction.register_undo(point_to(param, final, new_grad))


def _fits(made: Assignment) -> bool:
    """Whether the slot keeps the memory that it has."""
    return made.param.dtype == made.dtype and made.param.device == made.device


def _by_handler(name: str, param: torch.Tensor, value: torch.Tensor, transaction: Transaction) -> None:
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
    _become(name, param, new, transaction)


def _freeze(param: torch.Tensor, transaction: Transaction | None) -> None:
    """A parameter that gets no gradient any more, and has none."""
    grad = param.grad

    def undo() -> None:
        param.requires_grad_()
        param.grad = grad

    if transaction is not None:
        transaction.register_undo(undo)
    param.grad = None
    param.requires_grad_(False)


def _become(name: str, param: torch.Tensor, value: torch.Tensor, transaction: Transaction) -> None:
    """Makes `param` what `value` is; its gradient stays where that still fits."""
    for error in refusals({name: param}):
        raise error
    grad = param.grad if param.is_leaf else None
    fits = grad is not None and (grad.shape, grad.dtype, grad.device) == (value.shape, value.dtype, value.device)
    # What is made in inference mode could never be trained; what was made there can only be changed there.
    made_there = param.is_inference() or value.is_inference()
    with nullcontext() if made_there else torch.inference_mode(False):
        transaction.register_undo(become(param, value, grad if fits else None))


class StagedLoad:
    """The values of a load that has been planned and undone, and that is going to be planned again.

    They depend on the checkpoint and on what the slots are like, not on what is in them: the model may be used, and
    trained, while they are brought in. What the model's own loading code has looked at is left to the second plan,
    since that code will look again; so is what depends on the model's values, or costs nothing.
    """

    def __init__(self, preparation: Preparation, verify: bool, notes: Sequence[str] = ()) -> None:
        """Takes the preparation over, before it is undone; `notes` are for the report.

        Raises `ChecksumError` where nothing can be verified.
        """
        if verify:
            what_to_verify(preparation.checkpoint)
        self.plan = preparation.plan()
        self.verified_bytes = 0
        self._verify, self._notes = verify, [*notes]
        self._given: list[Assignment] = []
        waiting = [made for made in preparation.assignments if _comes_from_elsewhere(made)]
        for made in waiting:
            if is_plain(made.param):
                made.param = made.param.detach()  # which stays what it is, whatever becomes of the model meanwhile
        preparation.assignments, preparation.moves = waiting, []
        if preparation.options.transform is not None:
            _ = preparation.own_memory  # looked up now, in the thread that has the model
        self._preparation: Preparation | None = preparation
        self.nbytes = preparation.nbytes

    def bring_in(self, progress: Progress) -> None:
        """Reads, casts and transforms. `progress` hears of the bytes, and ends it by raising.

        Raises `ReadFailedError`, `ChecksumError` and `TransformError`.
        """
        preparation = self._preparation
        assert preparation is not None
        if self._verify:
            self.verified_bytes = preparation.checkpoint.verify(lambda _: progress(0))
        self._notes += prefetch_range(preparation)
        for made in preparation.assignments:
            if made.placement.mapped:
                made.final = made.value
        stage(preparation, progress)
        _wait_for_devices(preparation.assignments)
        self._notes += bring_in(preparation.assignments, progress)

    def give(self, preparation: Preparation) -> None:
        """Hands the values to a second preparation of the same load. Raises `StalePlanError` where a slot changed."""
        assert self._preparation is not None
        ready = {made.name: made for made in self._preparation.assignments if made.final is not None}
        for made in preparation.assignments:
            first = ready.get(made.name)
            if first is not None and made.final is None and made.stored is not None:
                self._hand_over(first, made, preparation)
        preparation.notes += self._notes
        preparation.overflows.add(self._preparation.overflows.counts)
        preparation.means = self._preparation.means  # which may have become others, for a file that was cold
        preparation.held = self._preparation.held

    def _hand_over(self, first: Assignment, made: Assignment, preparation: Preparation) -> None:
        final = first.final
        # What a transform returned may be memory that the model has come to hold since.
        if final is not None and made.placement.name == "copy" and first.transform is not None:
            final = final.clone() if preparation.own_memory.hold(final) else final
        made.final, made.dtype, made.placement = final, first.dtype, first.placement
        made.freezes, made.seconds = first.freezes, first.seconds
        self._given.append(made)

    def release(self) -> None:
        """Frees everything that has been brought in, whoever still holds the plans."""
        for made in (*(self._preparation.assignments if self._preparation is not None else ()), *self._given):
            made.final = None
        self._preparation, self._given = None, []


LOAD_AGAIN = "load again, and leave the model's parameters what they are until the result"


def _comes_from_elsewhere(made: Assignment) -> bool:
    """Whether the value waits to be brought in, and comes from the checkpoint alone."""
    if made.final is not None or made.stored is None or not _of_checkpoint(made.stored):
        return False
    stays = made.placement.name == "copy" and made.transform is None and made.remake is None
    return not (stays and isinstance(made.stored, torch.Tensor))


def _of_checkpoint(stored: Source) -> bool:
    """Whether it is not made by code of the model's, as an initialiser is."""
    if isinstance(stored, Derived):
        return bool(stored.parts) and all(map(_of_checkpoint, stored.parts))
    return True


def _wait_for_devices(assignments: Iterable[Assignment]) -> None:
    """What was begun on the stream of this thread is done, before other threads use it on theirs."""
    finals = [made.final for made in assignments if made.final is not None]
    for device in {final.device for final in finals if final.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
