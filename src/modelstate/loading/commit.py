"""The end of a load: values get into their slots. What can fail comes first, and can be undone; then the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from modelstate.errors import MemoryBudgetError, ModelStateError, PlacementError, ReadFailedError
from modelstate.io.page_cache import leased_files
from modelstate.loading.place import Place
from modelstate.loading.stage import reads_into_slots, stage
from modelstate.loading.staging import Staging, limit_memory
from modelstate.loading.stream import Progress
from modelstate.planning.transfer import Transfer, Transfers, Way
from modelstate.text_format import listed
from modelstate.torch_compat.plain import is_dense, is_plain
from modelstate.torch_compat.private import without_modes
from modelstate.transaction.swap_tensors import give_memory_to_all
from modelstate.transaction.transaction import Transaction


def overwrite(staging: Staging, transfers: Iterable[Transfers], advance: Progress) -> None:
    """Reads values straight into the memory of their slots, as a load with `in_place=True` does.

    Raises:
        ReadFailedError, MemoryBudgetError, PlacementError: Values may be partly overwritten, and the error says so.
    """
    try:
        for read in reads_into_slots(staging, transfers, advance):
            read()
    except Exception as error:
        kind: type[ModelStateError] = PlacementError  # of torch: what was read could not be cast or copied
        if isinstance(error, ReadFailedError | MemoryBudgetError):
            kind = type(error)
        raise kind(
            "the model was read in place, and that has failed: its values may be partly overwritten",
            where=getattr(error, "where", ""),
            found=error if kind is type(error) else f"{type(error).__name__}: {error}",
            remedy="load again; without in_place=True, the old values are kept until all is read and cast",
        ) from error


def place_fallible(transaction: Transaction, transfers: Iterable[Transfers]) -> None:
    """Gives memory to slots on meta, and places values that may run code of a tensor subclass: all can be undone."""
    for item in transfers:
        if not isinstance(item, Transfer) and item.way in (Way.MAP, Way.NEW):
            try:
                with without_modes():
                    give_memory_to_all(item.params, item.finals, transaction.register_undo)
            except Exception as error:
                row = next(row for row, value in enumerate(item.finals) if not value.is_meta)
                raise _placement_error(item.names[row], item.params[row], item.finals[row], error) from error
    for write in transaction.writes:
        if not isinstance(write, Place) or write.done or write.transfer.way is Way.INTO:
            continue
        if write.target.is_meta or not write.cannot_fail:
            try:
                transaction.run(write)
            except ModelStateError:
                raise
            except Exception as error:
                raise _placement_error(write.transfer.name, write.target, write.value, error) from error


def _placement_error(name: str, target: torch.Tensor, value: torch.Tensor, error: Exception) -> PlacementError:
    return PlacementError(
        "a value cannot be put in its place; nothing has been changed",
        where=name,
        expected=f"{type(target).__name__}, {target.dtype}",
        found=f"{type(value).__name__}, {value.dtype}: {error}",
        remedy=_placement_remedy(target),
    )


def _placement_remedy(target: torch.Tensor) -> str:
    if target.is_inference():
        return "load under torch.inference_mode(), as the model was built, or build the model outside of it"
    if target.layout is torch.strided and is_plain(target) and not is_dense(target):
        return "if its elements share memory (expand), give each its own: tensor.data = tensor.data.clone()"
    return "give the tensor subclass a module_load handler, or convert the value with transform="


@contextmanager
def leased_for_commit(
    staging: Staging, waiting: Sequence[Transfers], transfers: Sequence[Transfers], advance: Progress
) -> Iterator[None]:
    """Leases the files that are read at the commit. Where they cannot be leased, their values are staged now.

    Args:
        staging: How the values are read.
        waiting: What is read at the commit.
        transfers: Everything that the load reads.
        advance: Called with numbers of bytes that are done.

    Raises:
        ReadFailedError: A file cannot be read, or has changed.
        MemoryBudgetError: The values have to be staged, and need too much memory.
    """
    # Progress may be shown in a way that fails, so it comes before the commit.
    extents = [extent for item in waiting for extent in item.extents]
    with leased_files(extents, staging.files, lambda _: advance(0)) as refusal:
        if not refusal:
            advance(sum(item.nbytes for item in waiting))
            yield
            return
    for item in waiting:
        item.stage_instead(refusal)
    limit_memory(staging, transfers)
    stage(staging, transfers, advance)
    yield


def commit_values(
    transaction: Transaction,
    waiting: Sequence[Transfers],
    transfers: Sequence[Transfers],
    reads: Sequence[Callable[[], object]],
    last: Sequence[Callable[[], None]],
) -> None:
    """Commits, and reads what is read at the commit.

    Args:
        transaction: The transaction of the load.
        waiting: What is read at the commit, if files are leased.
        transfers: Everything that the load reads.
        reads: Read from leased files. All of them are called, and the first error is raised after the commit.
        last: Called at the end of the commit; they must not raise.

    Raises:
        ReadFailedError: After the commit, where a read failed that should not have: with the names of the tensors.
        PlacementError: The same for what was read, and could not be cast or copied.
    """
    error: Exception | None = None
    staged = [item for item in transfers if not isinstance(item, Transfer) and item.way is Way.STAGED]

    @torch.no_grad()
    def first() -> None:
        nonlocal error
        for read in reads:
            try:
                read()
            except Exception as raised:
                error = error or raised
        for item in waiting if reads else ():
            item.finals = item.params  # also after an error: nothing reads them again
        for item in staged:
            for param, value in zip(item.params, item.finals, strict=True):
                param.copy_(value)

    transaction.commit(*last, first=first if reads or staged else None)
    if error is not None:
        kind = ReadFailedError if isinstance(error, ReadFailedError) else PlacementError
        raise kind(
            "values could not be read into the model at the commit: these tensors may be old or damaged, and all "
            "others are loaded",
            where=listed([name for item in waiting for name in item.names], 8),
            found=error if isinstance(error, ModelStateError) else f"{type(error).__name__}: {error}",
            remedy="load again with in_place=False, which keeps the old values until all is read",
        ) from error
