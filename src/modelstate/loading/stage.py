"""Bytes into values: read, cast, transformed, each in the memory where it can stay."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import TypeVar

import torch
from torch.autograd.graph import increment_version

from modelstate.errors import MemoryBudgetError, ModelStateError, PlacementError
from modelstate.io.engine import Request
from modelstate.io.memory import aligned, fresh_tensors
from modelstate.io.tensors import elements
from modelstate.loading.stream import read_streamed
from modelstate.planning.assignment import BY_TRANSFORM, Assignment, apply_module_transform, as_target, called
from modelstate.planning.memory import means_within
from modelstate.planning.placement import after_transform
from modelstate.planning.prepare import Preparation
from modelstate.planning.transforms import Transform
from modelstate.process import prefetch_one
from modelstate.rules.expression import Derived, values_of
from modelstate.spec import StoredComposite, StoredTensor, contiguous_stride
from modelstate.torch_compat.dtypes import AT_ONCE, nonfinite
from modelstate.torch_compat.plain import is_dense, is_plain, is_plain_memory
from modelstate.torch_compat.private import storage_id, storage_owners, write_count

Progress = Callable[[int], None]
Pairs = Sequence[tuple[Assignment, torch.Tensor]]
"""What is read, each with the memory that it is read into."""
_T = TypeVar("_T")


def stage(preparation: Preparation, progress: Progress) -> None:
    """Gives every assignment its final value, but for those that are read in place. Nothing of the model is changed.

    Raises `ReadFailedError` and `TransformError`.
    """
    for made in preparation.moves:
        _finish(made, made.value)
    waiting = [made for made in preparation.assignments if made.final is None and not made.placement.direct]
    shown, waiting = _split(waiting, _is_shown)
    for made in shown:
        made.final = made.value
    progress(sum(made.nbytes for made in shown))
    if not waiting:
        return
    waiting.sort(key=_place_in_file)
    from_file, rest = _split(waiting, lambda made: made.is_run_of_bytes and made.reads_plainly)
    streamed, from_file = _split(from_file, lambda made: made.is_streamed)
    straight, others = _split(from_file, lambda made: made.reads_unchanged)
    finals = fresh_tensors([made.layout for made in straight])
    in_order, strided = _split(list(zip(straight, finals, strict=True)), lambda pair: is_plain_memory(pair[1]))
    preparation.held.take(sum(made.staged_bytes for made, _ in in_order))
    _read(preparation, in_order, progress, is_fresh=preparation.means.cached)
    for made, final in in_order:
        made.final = final
    read_streamed(preparation, streamed, progress)
    through = [*others, *(made for made, _ in strided)]
    _read_through_scratch(preparation, through, progress, partial(_finish_staged, preparation))
    transformed, rest = _split(rest, lambda made: made.transform is not None)
    for made in rest:
        stage_one(preparation, made)
        progress(made.nbytes)
    _stage_transformed(preparation, transformed, progress)


def read_in_place(preparation: Preparation, progress: Progress) -> None:
    """Reads the assignments whose bytes go straight to the memory of their slots. Raises `ReadFailedError`."""
    direct = [made for made in preparation.assignments if made.placement.direct and made.final is None]
    if not direct:
        return
    from_file, rest = _split(direct, lambda made: made.is_run_of_bytes)
    straight, cast = _split(
        from_file, lambda made: made.value.dtype == made.param.dtype and is_plain_memory(made.param)
    )
    computed, live = _split(rest, lambda made: isinstance(made.stored, Derived))
    for made in live:  # they are copied when all is read
        stage_one(preparation, made)
        progress(made.nbytes)
    streamed, cast = _split(cast, lambda made: made.is_streamed)
    # The buffer for casts is made before anything is written.
    _read_through_scratch(preparation, cast, progress, _finish_in_place)
    read_streamed(preparation, streamed, progress)
    for made in computed:  # by torch, of tensors that are there: one at a time
        with preparation.held.during(made.buffer_bytes):
            _finish_in_place(made, _own_value(preparation, made))
        progress(made.nbytes)
    _read(preparation, [(made, made.param) for made in straight], progress)
    increment_version([made.param for made in straight])  # autograd has not seen the writes
    for made in straight:
        made.final = made.param


def stage_one(preparation: Preparation, made: Assignment, read: torch.Tensor | None = None) -> None:
    """Gives one assignment its final value, of what has been `read` for a transform, or is read now.

    Raises `PlacementError` where a tensor subclass cannot be copied.
    """
    started = time.perf_counter()
    try:
        with preparation.held.during(_given_bytes(made) if read is None else 0):
            _stage_one(preparation, made, read)
            preparation.held.take(made.staged_bytes)
    except ModelStateError:
        raise
    except Exception as error:
        raise PlacementError(
            "a value cannot be copied out of the checkpoint; nothing has been changed",
            where=made.name,
            found=f"{type(made.value).__name__}: {type(error).__name__}: {error}",
            remedy="convert the value with transform=",
        ) from error
    made.seconds += time.perf_counter() - started


def _given_bytes(made: Assignment) -> int:
    """Memory that the value passes through, and what a module's transform takes."""
    if made.transform is not None:
        return made.passing_bytes
    return made.passing_bytes + (made.buffer_bytes if made.needs_buffer else 0)


def _is_shown(made: Assignment) -> bool:
    """Whether the slot shows the file, with nobody to ask."""
    return made.placement.mapped and not made.placement.by_handler and made.transform is None


def _stage_one(preparation: Preparation, made: Assignment, read: torch.Tensor | None) -> None:
    if made.transform is not None:
        made.final = _transformed(preparation, made.transform, made, read)
    elif made.placement.mapped:
        made.final = made.value
    elif made.placement.by_handler:
        value = _own_value(preparation, made)
        made.final = value.to(made.dtype) if is_plain(value) else value
        if is_plain(value):
            made.overflows.check(made.name, value, made.final)
    elif made.placement.name == "copy" and isinstance(made.stored, torch.Tensor):
        # A live tensor is as good as a copy of it, unless the load itself is about to overwrite it.
        made.final = made.value.clone() if preparation.own_memory.hold(made.value) else made.value
        made.overflows.check(made.name, made.value, made.dtype)
    elif isinstance(made.stored, Derived):
        value = values_of(made.stored, preparation.checkpoint.read, partial(made.overflows.check, made.name))
        if made.remake is None and _is_as_wanted(made, value):
            made.final = value.detach()
        else:
            _finish(made, value)  # which copies it out of what it may share
    else:
        _finish(made, _own_value(preparation, made))


def _is_as_wanted(made: Assignment, value: torch.Tensor) -> bool:
    """Whether a value can stay where it is: nobody else has it, and it is as the slot wants it."""
    _, stride, dtype = made.layout
    in_order = value.is_contiguous() if stride is None else tuple(value.stride()) == stride
    fits = value.dtype == dtype and value.device == made.device and value.shape == made.param.shape
    own = is_plain(value) and storage_owners(value) == 1 and value.untyped_storage().nbytes() == value.nbytes
    own = own and not value.is_inference() and not value.is_conj()
    return own and fits and in_order


def check_budget(preparation: Preparation, max_memory_bytes: int | None) -> None:
    """Chooses what the load reads with, so that it needs at most so much memory beyond the final tensors.

    Raises `MemoryBudgetError` where nothing needs so little.
    """
    preparation.max_memory_bytes = max_memory_bytes
    preparation.means = means_within(preparation.assignments, max_memory_bytes)
    if max_memory_bytes is not None and (needed := preparation.extra_bytes) > max_memory_bytes:
        could = not preparation.options.in_place and any(made.staged_bytes for made in preparation.assignments)
        raise MemoryBudgetError(
            "the load needs more memory beyond the final tensors than it was given; nothing has been changed",
            expected=f"at most {max_memory_bytes} bytes",
            found=f"{needed} bytes, at the least",
            remedy=f"max_memory_bytes={needed}" + (", or in_place=True, which needs no second copy" if could else ""),
        )


def _own_value(preparation: Preparation, made: Assignment) -> torch.Tensor:
    """The value in memory that nobody else has, read from the file where that is where it is."""
    if made.is_run_of_bytes:
        fresh = _memory_for(made)
        _read(preparation, [(made, fresh)], lambda _: None, alone=True)
        return fresh
    if isinstance(made.stored, StoredComposite):
        return preparation.checkpoint.read(made.stored)
    if isinstance(made.stored, Derived):
        value = values_of(made.stored, preparation.checkpoint.read, partial(made.overflows.check, made.name))
        return value.clone() if storage_owners(value) > 1 else value.detach()
    if isinstance(made.stored, StoredTensor):
        value = preparation.checkpoint.read(made.stored)
        return value if is_dense(value) else value.clone()
    if is_plain(made.value):
        return made.value.detach().clone()
    return made.value.detach().to(copy=True)  # the one copy that even the smallest subclasses have


@torch.inference_mode(False)
@torch.no_grad()
def _finish(made: Assignment, value: torch.Tensor) -> None:
    """Gives the slot's dtype, device and layout to a value that nobody else holds, or that is about to be reused."""
    if made.remake is not None:
        apply_module_transform(made, made.remake, value)
    else:
        made.final = as_target(made, value)


def _finish_staged(preparation: Preparation, made: Assignment, value: torch.Tensor) -> None:
    with preparation.held.during(made.passing_bytes):
        _finish(made, value)
        preparation.held.take(made.staged_bytes)


def _finish_in_place(made: Assignment, value: torch.Tensor) -> None:
    with torch.no_grad():
        made.param.copy_(value)
        made.overflows.check(made.name, value, made.param)
    made.final = made.param


def _transformed(
    preparation: Preparation, transform: Transform, made: Assignment, read: torch.Tensor | None
) -> torch.Tensor:
    value = _own_value(preparation, made) if read is None else read
    references, owners = sys.getrefcount(value), storage_owners(value)
    version = _version_of(value)
    result = called(transform, made.name, value, made.param.shape)
    # A tensor that others hold, or memory that they do, cannot be the slot's own: they may write to it before the slot
    # has it, as a function does that returns the same buffer again and again, or afterwards.
    references, owners = (references + 1, owners) if result is value else (2, 1)
    own = sys.getrefcount(result) <= references and storage_owners(result) <= owners
    result = result.detach()
    # A function that works in place leaves nothing to compare its result with.
    untouched = version is not None and write_count(value) == version and storage_id(value) != storage_id(result)
    before = partial(nonfinite, value) if untouched else partial(_nonfinite_before, preparation, made)
    return _as_asked(preparation, made, result, own, before)


def _version_of(value: torch.Tensor) -> int | None:
    """The counter of writes to a plain tensor, where it has one."""
    return write_count(value) if is_plain(value) and not value.is_inference() else None


def _nonfinite_before(preparation: Preparation, made: Assignment) -> int:
    """The infinite and NaN values of what a transform was given, which is read once more."""
    stored, read_all = made.stored, preparation.checkpoint.read_all
    if isinstance(stored, StoredTensor) and made.is_run_of_bytes:
        starts = range(0, stored.numel, AT_ONCE)
        return sum(nonfinite(elements(stored, at, min(AT_ONCE, stored.numel - at), read_all)) for at in starts)
    with preparation.held.during(made.buffer_bytes):
        return nonfinite(made.value if stored is None else values_of(stored, preparation.checkpoint.read))


@torch.inference_mode(False)
@torch.no_grad()
def _as_asked(
    preparation: Preparation, made: Assignment, result: torch.Tensor, own: bool, before: Callable[[], int]
) -> torch.Tensor:
    """The result with the dtype and device that were asked for, and memory that nobody else has."""
    asked, cast = preparation.options.dtype, result
    if asked is not None and result.is_floating_point() and type(result) is torch.Tensor:
        cast = result.to(asked)
    if not made.overflows.check(made.name, result, cast) and is_plain(result):
        made.overflows.check_function(made.name, BY_TRANSFORM, result, before)
    result = cast.to(made.device)
    made.dtype = result.dtype
    made.placement = after_transform(made.placement, made.param, result, made.value)
    if not is_plain(result):
        return result
    if made.placement.name == "copy":
        return result if own and not preparation.own_memory.hold(result) else result.clone()
    fits = own and is_dense(result) and (made.placement.mapped or not result.is_inference())
    return result if fits else result.clone(memory_format=torch.contiguous_format)


def _stage_transformed(preparation: Preparation, transformed: Sequence[Assignment], progress: Progress) -> None:
    """Has them transformed one after the other, each while the next one is read."""
    ahead = preparation.means.ahead and len(transformed) > 1

    def fetch(item: tuple[Assignment, torch.Tensor | None], check: Callable[[], None]) -> None:
        made, into = item
        assert into is not None
        _read(preparation, [(made, into)], lambda _: check(), alone=True)

    def use(item: tuple[Assignment, torch.Tensor | None]) -> None:
        made, read = item
        stage_one(preparation, made, read)
        preparation.held.take(0 if read is None else -made.nbytes)
        progress(made.nbytes)

    def with_memory(made: Assignment) -> tuple[Assignment, torch.Tensor | None]:
        if not (ahead and made.is_read_ahead):
            return made, None
        preparation.held.take(made.nbytes)
        return made, _memory_for(made)

    items = map(with_memory, transformed)
    prefetch_one(items, fetch, use, is_fetched=lambda item: item[1] is not None)


def _memory_for(made: Assignment) -> torch.Tensor:
    """What its bytes are read into as they are."""
    (fresh,) = fresh_tensors([(made.value.size(), None, made.value.dtype)])
    return fresh


def _read_through_scratch(
    preparation: Preparation,
    made: Sequence[Assignment],
    progress: Progress,
    finish: Callable[[Assignment, torch.Tensor], None],
) -> None:
    """Reads into buffers that are used again and again, and lets `finish` cast or move what is there."""
    groups = list(_groups(made, preparation.means.turn_bytes))
    if not groups:
        return
    layout = torch.Size([max(size for _, size in groups)]), None, torch.uint8
    buffers = fresh_tensors([layout] * (2 if preparation.means.ahead and len(groups) > 1 else 1))
    turns = cycle(buffers)

    def use(pairs: Pairs) -> None:
        for one, buffer in pairs:
            started = time.perf_counter()
            finish(one, buffer)
            one.seconds += time.perf_counter() - started

    laid_out = (_laid_out(group, next(turns)) for group, _ in groups)
    with preparation.held.during(sum(buffer.nbytes for buffer in buffers)):
        if len(buffers) > 1:
            prefetch_one(laid_out, partial(_fetch, preparation, progress), use, is_fetched=bool)
            return
        for pairs in laid_out:
            _read(preparation, pairs, progress)
            use(pairs)


def _fetch(preparation: Preparation, progress: Progress, pairs: Pairs, check: Callable[[], None]) -> None:
    def on_read(nbytes: int) -> None:
        check()
        progress(nbytes)

    _read(preparation, pairs, on_read)


def _laid_out(group: Sequence[Assignment], scratch: torch.Tensor) -> Pairs:
    """Each with its place in the buffer, one behind the other."""
    pairs, at, storage = [], 0, scratch.untyped_storage()
    for one in group:
        empty, size = torch.empty(0, dtype=one.value.dtype, device="cpu"), one.value.size()
        pairs.append((one, empty.set_(storage, at // one.value.itemsize, size, contiguous_stride(size))))
        at += aligned(one.nbytes)
    return pairs


def _groups(made: Iterable[Assignment], scratch_bytes: int) -> Iterator[tuple[list[Assignment], int]]:
    """What is read at once, with the bytes that it takes: as much as the scratch buffer holds, or one larger tensor."""
    group: list[Assignment] = []
    total = 0
    for one in made:
        if group and total + aligned(one.nbytes) > scratch_bytes:
            yield group, total
            group, total = [], 0
        group.append(one)
        total += aligned(one.nbytes)
    if group:
        yield group, total


def _read(
    preparation: Preparation, pairs: Pairs, progress: Progress, *, alone: bool = False, is_fresh: bool = False
) -> None:
    requests = []
    for made, tensor in pairs:
        assert isinstance(made.stored, StoredTensor)
        requests.append(Request(made.stored.extent, tensor.data_ptr()))
    started = time.perf_counter()
    uncached = frozenset[str]() if alone else preparation.means.uncached
    with preparation.held.during(preparation.means.uncached_bytes if uncached else 0):
        preparation.checkpoint.read_all(requests, progress, uncached=uncached, is_fresh=is_fresh)
    seconds, total = time.perf_counter() - started, sum(made.nbytes for made, _ in pairs)
    for made, _ in pairs:
        made.seconds += seconds * made.nbytes / max(total, 1)


def _place_in_file(made: Assignment) -> tuple[str, int]:
    if isinstance(made.stored, StoredTensor):
        return made.stored.extent.path, made.stored.extent.start
    return "", 0


def _split(items: Sequence[_T], goes_first: Callable[[_T], bool]) -> tuple[list[_T], list[_T]]:
    first: list[_T] = []
    second: list[_T] = []
    for item in items:
        (first if goes_first(item) else second).append(item)
    return first, second
