"""`Place` writes values into slots; `StagedLoad` reads values in the background for a load that commits later."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from modelstate.checkpoint.checkpoint import what_to_verify
from modelstate.loading.stage import Progress, stage, stage_one
from modelstate.loading.staging import Staging, bring_in, prefetch_range
from modelstate.planning.assignment import Assignment, copy_cannot_fail
from modelstate.planning.plan import LoadPlan
from modelstate.rules.expression import Derived, Source
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import module_load
from modelstate.transaction.swap_tensors import become, give_memory, point_to, refusals
from modelstate.transaction.transaction import Transaction, Write


class Place(Write):
    """The write that executes an assignment. The final value decides how."""

    __slots__ = ("assignment", "staging")

    def __init__(self, staging: Staging, assignment: Assignment) -> None:
        super().__init__(assignment.param, assignment.value)
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
                    assignment.stage("code of the model uses it")
                assignment.placement = replace(assignment.placement, mapped=False)  # model code uses the value
                assignment.choose_route()
            stage_one(self.staging, assignment)
        final = assignment.final
        assert final is not None
        if final is param:
            return  # the value was read in place
        if transaction is None:
            param.copy_(final)
        elif param.is_meta and not assignment.placement.by_handler and is_plain(final):
            transaction.register_undo(give_memory(param, final))
        else:
            with torch.no_grad():
                self._replace(param, final, transaction)
        if assignment.freezes and param.requires_grad:
            _freeze(param, transaction)

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
            grad = param.grad if param.is_leaf and final.is_floating_point() else None
            new_grad = None if grad is None else grad.to(final.device, final.dtype)
            transaction.register_undo(point_to(param, final, new_grad))


def _keeps_memory(assignment: Assignment) -> bool:
    """Whether the slot keeps its memory."""
    return assignment.param.dtype == assignment.dtype and assignment.param.device == assignment.device


def _by_handler(name: str, param: torch.Tensor, value: torch.Tensor, transaction: Transaction) -> None:
    """Replaces a tensor by the result of its `module_load` handler, as torch does when swapping is switched on."""
    new = module_load(param, value, assign=param.is_meta)
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


class StagedLoad:
    """The values of a load that reads in the background.

    The load is planned, its effects are undone, and `result` executes the plan. The staged values depend on the
    checkpoint and on the metadata of the slots, not on the slots' values, so the model may be used and trained in the
    meantime. `result` computes the other values: values that the model's own loading code uses, because that code runs
    again; values that depend on the model's values; and values that need no read.
    """

    def __init__(self, plan: LoadPlan, staging: Staging, verify: bool, notes: Sequence[str] = ()) -> None:
        """Takes over what a load reads, before the transaction in which it was planned is undone.

        Args:
            plan: The plan of the load.
            staging: What the load reads. The caller must not use it afterwards.
            verify: Whether `read` compares the file with its checksums.
            notes: Notes for the report.

        Raises:
            ChecksumError: `verify` is true and the checkpoint has no checksums.
        """
        if verify:
            what_to_verify(staging.checkpoint)
        self.plan = plan
        self.verified_bytes = 0
        self._verify, self._notes = verify, [*notes]
        self._handed_over: list[Assignment] = []
        waiting = [assignment for assignment in staging.assignments if _is_staged(assignment)]
        for assignment in waiting:
            if is_plain(assignment.param):
                assignment.param = assignment.param.detach()  # keeps its metadata when the model changes
        staging.assignments, staging.moves = waiting, []
        if staging.options.transform is not None:
            _ = staging.own_memory  # computed now, in the thread that uses the model
        self._staging: Staging | None = staging
        self.nbytes = staging.nbytes

    def read(self, progress: Progress) -> None:
        """Reads, casts and transforms the values.

        Args:
            progress: Called with numbers of bytes that are done; may raise to end the read.

        Raises:
            ReadFailedError: A file cannot be read, or has changed since it was opened.
            ChecksumError: The file is damaged.
            TransformError: A transform raises, or returns a tensor that cannot be loaded.
        """
        staging = self._staging
        assert staging is not None
        if self._verify:
            self.verified_bytes = staging.checkpoint.verify(lambda _: progress(0))
        self._notes += prefetch_range(staging)
        for assignment in staging.assignments:
            if assignment.placement.mapped:
                assignment.final = assignment.value
        stage(staging, progress)
        _wait_for_devices(staging.assignments)
        self._notes += bring_in(staging.assignments, progress)

    def hand_over(self, staging: Staging) -> list[str]:
        """Hands the values to the load that commits. Returns notes for the report."""
        assert self._staging is not None
        ready = {
            assignment.name: assignment for assignment in self._staging.assignments if assignment.final is not None
        }
        for assignment in staging.assignments:
            staged = ready.get(assignment.name)
            if staged is not None and assignment.final is None and assignment.stored is not None:
                self._hand_over_value(staged, assignment, staging)
        staging.strategy = self._staging.strategy  # the reads change it for a file that was not cached
        staging.held = self._staging.held
        staging.overflows.add(self._staging.overflows.counts)
        return self._notes

    def _hand_over_value(self, staged: Assignment, assignment: Assignment, staging: Staging) -> None:
        final = staged.final
        # The model may have come to hold the memory that a transform returned.
        if final is not None and assignment.placement.name == "copy" and staged.transform is not None:
            final = final.clone() if staging.own_memory.hold(final) else final
        assignment.final, assignment.dtype, assignment.placement = final, staged.dtype, staged.placement
        assignment.freezes, assignment.seconds = staged.freezes, staged.seconds
        self._handed_over.append(assignment)

    def release(self) -> None:
        """Frees all values that have been read, also where other objects still refer to the plans."""
        for assignment in (
            *(self._staging.assignments if self._staging is not None else ()),
            *self._handed_over,
        ):
            assignment.final = None
        self._staging, self._handed_over = None, []


LOAD_AGAIN = "load again, and do not change the model's slots until the result"


def _is_staged(assignment: Assignment) -> bool:
    """Whether the value must still be read, and depends on the checkpoint alone."""
    if assignment.final is not None or assignment.stored is None or not _is_from_checkpoint(assignment.stored):
        return False
    stays = assignment.placement.name == "copy" and assignment.transform is None and assignment.remake is None
    return not (stays and isinstance(assignment.stored, torch.Tensor))


def _is_from_checkpoint(stored: Source) -> bool:
    """Whether no part of the value is computed by code of the model, as initialisers do."""
    if isinstance(stored, Derived):
        return bool(stored.parts) and all(map(_is_from_checkpoint, stored.parts))
    return True


def _wait_for_devices(assignments: Iterable[Assignment]) -> None:
    """Waits for the copies on this thread's CUDA streams, because other threads use the tensors on other streams."""
    finals = [assignment.final for assignment in assignments if assignment.final is not None]
    for device in {final.device for final in finals if final.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
