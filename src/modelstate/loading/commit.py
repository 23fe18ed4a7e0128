"""`commit`: puts staged values into slots, each by its `Place`, all or nothing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import ModelStateError, PlacementError, ReadFailedError
from modelstate.io.held import HeldFiles, held_files, why_not_held
from modelstate.loading.stage import Progress, limit_memory, read_leased, stage, stage_one
from modelstate.loading.staging import Staging
from modelstate.planning.assignment import Assignment, copy_cannot_fail
from modelstate.planning.plain_table import PlainTable, Planned, leased
from modelstate.planning.plan import Options
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.sharding import dtensor_like
from modelstate.transaction.swap_tensors import become, give_memory, give_memory_to_all, point_to, refusals
from modelstate.transaction.transaction import Transaction, Write

_LEAST_LEASED_BYTES = 1 << 20
"""Fewer bytes are staged: it takes no longer than to hold their files."""


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
            _rewrap(assignment.sharded.tensor, final, transaction)
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
            grad = param.grad if param.is_leaf and final.is_floating_point() else None
            new_grad = None if grad is None else grad.to(final.device, final.dtype)
            transaction.register_undo(point_to(param, final, new_grad))


def _keeps_memory(assignment: Assignment) -> bool:
    """Whether the slot keeps its memory."""
    return assignment.param.dtype == assignment.dtype and assignment.param.device == assignment.device


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


def _rewrap(tensor: torch.Tensor, local: torch.Tensor, transaction: Transaction) -> None:
    """Gives a DTensor another local tensor, of any dtype and device. It stays the same object."""
    # Outside inference mode, where the DTensor would become an inference tensor, which cannot be trained.
    with torch.inference_mode(local.is_inference()), torch.no_grad():
        transaction.save_metadata(tensor)
        grad = tensor.grad if tensor.is_leaf and local.is_floating_point() else None
        new_grad = None if grad is None else grad.to(local.device, local.dtype)
        transaction.register_undo(become(tensor, dtensor_like(tensor, local), new_grad))


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


def place_fallible(transaction: Transaction, options: Options, planned: Iterable[Planned]) -> None:
    """Gives memory to slots on meta, and places values that may run code of a tensor subclass: all can be undone."""
    for item in planned:
        if isinstance(item, PlainTable) and item.final is not None and item.placement.name == "swap":
            try:
                give_memory_to_all(item.params, item.final, transaction.register_undo)
            except Exception as error:
                rows = zip(item.slots, item.final, strict=True)
                slot, value = next((slot, value) for slot, value in rows if not value.is_meta)
                raise _placement_error(slot.name, slot.tensor, value, error) from error
    # What planning has checked holds as long as no code of a user has run.
    is_as_planned = not (transaction.armed or options.transform or options.rules)
    for write in transaction.writes:
        if not isinstance(write, Place) or write.done or write.assignment.placement.direct:
            continue
        if write.target.is_meta or not ((is_as_planned and write.assignment.is_checked_copy) or write.cannot_fail):
            try:
                write.run(transaction)
            except ModelStateError:
                raise
            except Exception as error:
                raise _placement_error(write.assignment.name, write.target, write.value, error) from error
            write.done = True


def _placement_error(name: str, target: torch.Tensor, value: torch.Tensor, error: Exception) -> PlacementError:
    return PlacementError(
        "a value cannot be put in its place; nothing has been changed",
        where=name,
        expected=f"{type(target).__name__}, {target.dtype}",
        found=f"{type(value).__name__}, {value.dtype}: {error}",
        remedy="give the tensor subclass a module_load handler, or convert the value with transform=",
    )


def stage_unleased(checkpoint: Checkpoint, planned: Iterable[Planned], in_use: str) -> None:
    """Has values staged that are planned to be read at the commit, where it is known that their files cannot be held.

    `in_use` is another reason to stage them; empty without one.
    """
    waiting = leased(planned)
    if sum(item.nbytes for item in waiting) < _LEAST_LEASED_BYTES:
        reason = "they are small"
    else:
        extents = [extent for item in waiting for extent in item.extents]
        reason = why_not_held(extents, checkpoint.fingerprints) or in_use
    for item in waiting if reason else ():
        item.stage_instead(reason)


@contextmanager
def held_for_commit(
    staging: Staging, waiting: Sequence[Planned], planned: Sequence[Planned], advance: Progress
) -> Iterator[HeldFiles | None]:
    """Holds the files that are read at the commit. Where they cannot be held, their values are staged now.

    Args:
        staging: How the values are read.
        waiting: What is read at the commit.
        planned: Everything that the load reads.
        advance: Called with numbers of bytes that are done.

    Yields:
        The files; None where they cannot be held.

    Raises:
        ReadFailedError: A file cannot be read, or has changed.
        MemoryBudgetError: The values have to be staged, and need too much memory.
    """
    # Progress may be shown in a way that fails, so it comes before the commit.
    extents = [extent for item in waiting for extent in item.extents]
    with held_files(extents, staging.checkpoint.fingerprints, lambda _: advance(0)) as files:
        if not files.refusal:
            advance(sum(item.nbytes for item in waiting))
            yield files
            return
    for item in waiting:
        item.stage_instead(files.refusal)
    limit_memory(staging, planned)
    stage(staging, planned, advance)
    yield None


def commit(
    transaction: Transaction,
    staging: Staging,
    planned: Sequence[Planned],
    files: HeldFiles | None,
    last: Sequence[Callable[[], None]],
) -> None:
    """Commits, and reads what is read at the commit.

    Args:
        transaction: The transaction of the load.
        staging: How the values are read.
        planned: Everything that the load reads.
        files: The files that `held_for_commit` holds.
        last: Called at the end of the commit; they must not raise.

    Raises:
        ReadFailedError: After the commit, where a read failed that should not have: with the names of the tensors.
    """
    waiting, errors = [] if files is None else leased(planned), list[Exception]()
    tables = (item for item in planned if isinstance(item, PlainTable) and item.placement.staged)
    staged = [(table.params, table.final) for table in tables if table.final is not None]

    @torch.no_grad()
    def first() -> None:
        if files is not None:
            errors.extend(read_leased(staging, waiting, files))
        for params, values in staged:
            for param, value in zip(params, values, strict=True):
                param.copy_(value)

    transaction.commit(*last, first=first if waiting or staged else None)
    if errors and files is not None:
        names = [name for item in waiting for name in item.names_in(files.failed)]
        names = names or [name for item in waiting for name in item.names_in(item.extents)]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise ReadFailedError(
            "bytes that had just been read could not be read again: the values of these tensors are old or damaged, "
            "and all other tensors are loaded",
            where=", ".join(names[:8]) + more,
            found=errors[0],
            remedy="load again from a file that can be read; in_place=False keeps the old values until all is read",
        ) from errors[0]
