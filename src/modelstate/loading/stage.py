"""`stage`: reads, casts and transforms values, each into its final memory where possible."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import TypeVar

import torch
from msgspec.structs import replace
from torch.autograd.graph import increment_version

from modelstate.errors import MemoryBudgetError, ModelStateError, PlacementError
from modelstate.io.engine import ReadStrategy, Request, Rows, block_reads, read_ranges, read_threads
from modelstate.io.leased import LeasedFiles
from modelstate.io.linux import trim_heap
from modelstate.io.memory import aligned, fresh_tensors
from modelstate.io.prefetch import LEAST_BYTES, is_cold, read_ahead
from modelstate.io.tensors import compute, elements
from modelstate.loading.staging import Staging
from modelstate.loading.stream import Leased, StreamBuffers, streamed_read, table_read
from modelstate.planning.assignment import (
    BY_TRANSFORM,
    Assignment,
    ReadRoute,
    after_transform,
    apply_module_transform,
    as_target,
    called,
)
from modelstate.planning.memory import peak_bytes, placed_bytes, strategy_within
from modelstate.planning.plain_table import PlainTable, Planned
from modelstate.planning.transforms import Transform
from modelstate.process import ONE_VARIABLE, prefetch_one, reference_count
from modelstate.remote.location import CONNECTIONS
from modelstate.rules.expression import Derived, values_of
from modelstate.spec import ByteRange, StoredComposite, StoredTensor, contiguous_stride
from modelstate.text_format import size
from modelstate.torch_compat.dtypes import AT_ONCE, nonfinite
from modelstate.torch_compat.plain import is_dense, is_plain, is_plain_memory
from modelstate.torch_compat.private import storage_id, storage_owners, write_count

Progress = Callable[[int], None]
Pairs = Sequence[tuple[Assignment, torch.Tensor]]
"""What is read, each with the memory that it is read into."""
_T = TypeVar("_T")
_LEAST_TRIMMED_BYTES = 4 << 20
"""A transform that frees so much leaves holes in the heap. Without trimming, 16 weights of 16 MB that become float8
were measured to take 600 instead of 280 MB."""
_NOT_IN_A_FILE = ByteRange("", 0, 0)


def limit_memory(staging: Staging, planned: Sequence[Planned]) -> None:
    """Chooses a read strategy that keeps to the memory budget. Raises `MemoryBudgetError` if there is none."""
    most_bytes = staging.options.max_memory_bytes
    if most_bytes is None:
        return
    usual = ReadStrategy.fastest()
    if any(file.is_remote for file in staging.checkpoint.fingerprints.values()):
        usual = replace(usual, threads=CONNECTIONS, remote=True)
    staging.strategy = strategy_within(planned, most_bytes, usual)
    needed = peak_bytes(planned, staging.strategy)
    if needed <= most_bytes:
        return
    staged = 0 if staging.options.in_place else sum(item.staged_bytes for item in planned)
    could = staged > 0 and needed - staged <= most_bytes
    raise MemoryBudgetError(
        "the load needs more memory beyond the final tensors than it was given; nothing has been changed",
        expected=f"at most {most_bytes} bytes",
        found=f"{needed} bytes, at the least",
        remedy=f"max_memory_bytes={needed}" + (", or in_place=True, which needs no second copy" if could else ""),
    )


def prefetch_range(staging: Staging, planned: Sequence[Planned]) -> list[str]:
    """Makes the kernel read what is not in the page cache, and does not wait. Returns remarks for the report."""
    fingerprints = staging.checkpoint.fingerprints
    if any(file.is_remote for file in fingerprints.values()):
        if staging.options.max_memory_bytes is None:
            staging.strategy = replace(staging.strategy, threads=CONNECTIONS)
        return []
    whole = [ByteRange(path, 0, file.nbytes) for path, file in fingerprints.items()]
    if sum(span.nbytes for span in whole) < LEAST_BYTES or not any(is_cold(span, fingerprints) for span in whole):
        return []
    nbytes = read_ahead([extent for item in planned for extent in item.extents], fingerprints)
    return [f"the file was not in the page cache: {size(nbytes)} of it are read ahead"] if nbytes else []


def stage(staging: Staging, planned: Iterable[Planned], progress: Progress) -> None:
    """Computes every final value that is not read in place. The model is not changed.

    Raises `ReadFailedError` and `TransformError`.
    """
    shown: list[Assignment] = []
    straight: list[Assignment] = []
    streamed: list[Assignment] = []
    computed: list[Assignment] = []
    together: list[Assignment] = []
    alone: list[Assignment] = []
    for assignment in planned:
        if assignment.final is not None or assignment.placement.direct:
            continue
        if isinstance(assignment, PlainTable):
            _stage_table(staging, assignment, progress)
            continue
        match assignment.route:
            case ReadRoute.MAPPED if not assignment.placement.by_handler:
                assignment.final = assignment.value
                shown.append(assignment)
            case ReadRoute.DIRECT if assignment.own_stride is None:
                straight.append(assignment)
            case ReadRoute.STREAMED:
                streamed.append(assignment)
            case ReadRoute.COMPUTED:
                computed.append(assignment)
            case _:
                (together if assignment.is_read_together else alone).append(assignment)
    progress(sum(assignment.nbytes for assignment in shown))
    for group in (straight, streamed, together):
        group.sort(key=lambda assignment: assignment.extents[0])
    alone.sort(key=lambda assignment: getattr(assignment.stored, "extent", _NOT_IN_A_FILE))
    if straight:
        staging.held.take(sum(item.nbytes for item in straight if item.placement.name == "copy"))
        memory = fresh_tensors([(assignment.param.size(), None, assignment.dtype) for assignment in straight])
        finals = list(zip(straight, memory, strict=True))
        _read(staging, finals, progress)
        for assignment, final in finals:
            assignment.final = final
    if streamed:
        streamed_read(staging, streamed, progress)()
    if computed:
        _compute(staging, computed, fresh_tensors([assignment.layout for assignment in computed]), progress)
    if together:
        _read_through_scratch(staging, together, progress, partial(_finish_staged, staging))
    if alone:
        _stage_alone(staging, alone, progress)


def _stage_table(staging: Staging, table: PlainTable, progress: Progress) -> None:
    if table.maps is not None:
        table.final = table.maps.tensors(table.columns)
        progress(table.nbytes)
        return
    staging.held.take(table.staged_bytes)
    shapes = map(torch.Size, table.columns.shapes)  # not those of the slots, which may change meanwhile
    if table.device.type == "cpu":
        memory = fresh_tensors([(shape, None, dtype) for shape, dtype in zip(shapes, table.dtypes, strict=True)])
    else:
        rows = zip(shapes, table.dtypes, strict=True)
        with torch.inference_mode(False):
            memory = [torch.empty(shape, dtype=dtype, device=table.device) for shape, dtype in rows]
    _read_table(staging, table, memory, progress)
    table.final = memory


def read_in_place(staging: Staging, planned: Iterable[Planned], progress: Progress) -> None:
    """Reads the values whose bytes go straight to the memory of their slots. Raises `ReadFailedError`."""
    direct: list[Assignment] = []
    tables: list[PlainTable] = []
    for item in planned:
        if item.placement.direct and not item.placement.leased and item.final is None:
            tables.append(item) if isinstance(item, PlainTable) else direct.append(item)
    from_file, rest = _split(direct, lambda assignment: assignment.is_read_into_place)
    straight, cast = _split(
        from_file,
        lambda assignment: assignment.value.dtype == assignment.param.dtype and is_plain_memory(assignment.param),
    )
    computed, rest = _split(rest, lambda assignment: assignment.route is ReadRoute.COMPUTED)
    derived, live = _split(rest, lambda assignment: isinstance(assignment.stored, Derived))
    for assignment in live:  # they are copied when all is read
        stage_one(staging, assignment)
        progress(assignment.nbytes)
    streamed, cast = _split(cast, lambda assignment: assignment.route is ReadRoute.STREAMED)
    # The buffer for casts is made before anything is written.
    _read_through_scratch(staging, cast, progress, _finish_in_place)
    if streamed:
        streamed_read(staging, streamed, progress)()
    _compute(staging, computed, [assignment.param for assignment in computed], progress)
    for assignment in derived:  # by torch, of tensors that are there: one at a time
        with staging.held.during(assignment.buffer_bytes):
            _finish_in_place(assignment, _own_value(staging, assignment))
        progress(assignment.nbytes)
    if straight:
        _read(staging, [(assignment, assignment.param) for assignment in straight], progress)
        increment_version([assignment.param for assignment in straight])  # autograd has not seen the writes
    for assignment in straight:
        assignment.final = assignment.param
    for table in tables:
        _read_table(staging, table, table.params, progress)


def leased_reads(staging: Staging, planned: Sequence[Planned], files: LeasedFiles) -> Callable[[], Exception | None]:
    """Returns a function that reads what is read at the commit, from leased files.

    It returns the first error, which there should not be. The buffers of values that are streamed are made before this
    returns.
    """
    waiting = [item for item in planned if isinstance(item, Assignment)]
    tables = [item for item in planned if isinstance(item, PlainTable)]
    straight, rest = _split(waiting, lambda assignment: assignment.route is ReadRoute.DIRECT)
    computed, cast = _split(rest, lambda assignment: assignment.route is ReadRoute.COMPUTED)
    direct, streamed = _split(tables, lambda table: not table.is_streamed)
    params = [assignment.param for assignment in computed]
    devices = {item.device for item in cast} | {table.device for table in streamed}
    leased = Leased(files, StreamBuffers(staging, devices))
    reads: list[Callable[[], None]] = [
        *([streamed_read(staging, cast, lambda _: None, leased)] if cast else []),
        *(table_read(staging, table, table.params, lambda _: None, leased) for table in streamed),
        leased.buffers.release,
        partial(_compute, staging, computed, params, lambda _: None, files=files),
        partial(_read_leased, staging, straight, direct, files),
        files.check_unchanged,
    ]
    leased.buffers.reserve()

    def run() -> Exception | None:
        first: Exception | None = None
        for read in reads:
            try:
                read()
            except Exception as error:
                first = first or error
        for assignment in waiting:
            assignment.final = assignment.param
        return first

    return run


def _read_leased(
    staging: Staging, assignments: Sequence[Assignment], tables: Sequence[PlainTable], files: LeasedFiles
) -> None:
    """Reads values that are not cast into their slots. Raises `ReadFailedError`."""
    started = time.perf_counter()
    requests = [request for assignment in assignments for request in assignment.requests(assignment.param.data_ptr())]
    for table in tables:
        requests += _requests(table, table.params)
    try:
        with staging.held.during(placed_bytes(assignments)):
            read_ranges(requests, fingerprints=staging.checkpoint.fingerprints, leased=files)
    finally:  # autograd has not seen the writes
        increment_version(
            [*(item.param for item in assignments), *(param for table in tables for param in table.params)]
        )
    items: list[Planned] = [*assignments, *tables]
    seconds, total = time.perf_counter() - started, sum(item.nbytes for item in items)
    for item in items:
        item.seconds += seconds * item.nbytes / max(total, 1)


def _compute(
    staging: Staging,
    computed: Sequence[Assignment],
    finals: Sequence[torch.Tensor],
    progress: Progress,
    files: LeasedFiles | None = None,
) -> None:
    """Computes combined tensors into their final memory. Raises `ReadFailedError`."""
    targets = [
        (assignment.combined, final)
        for assignment, final in zip(computed, finals, strict=True)
        if assignment.combined is not None
    ]
    if not targets:
        return
    started, checkpoint = time.perf_counter(), staging.checkpoint
    staging.held.take(sum(assignment.staged_bytes for assignment in computed))
    paths = {extent.path for assignment in computed for extent in assignment.extents}
    thread_bytes = max(stored.thread_bytes for stored, _ in targets)
    with (
        block_reads(paths, fingerprints=checkpoint.fingerprints, leased=files) as read,
        staging.held.during(read_threads() * thread_bytes),
    ):
        compute(targets, read, read_whole=checkpoint.read, on_done=lambda _: progress(0))
    seconds, total = time.perf_counter() - started, sum(assignment.nbytes for assignment in computed)
    for assignment, final in zip(computed, finals, strict=True):
        assignment.final = final
        assignment.seconds += seconds * assignment.nbytes / total
        progress(assignment.nbytes)


def stage_one(staging: Staging, assignment: Assignment, read: torch.Tensor | None = None) -> None:
    """Computes the final value of one assignment. `read` is the argument of a transform, if it has been read before.

    Raises `PlacementError` where a tensor subclass cannot be copied.
    """
    started, temporary_bytes = time.perf_counter(), 0
    if read is None:
        has_buffer = assignment.transform is None and assignment.needs_buffer
        temporary_bytes = assignment.passing_bytes + (assignment.buffer_bytes if has_buffer else 0)
    try:
        with staging.held.during(temporary_bytes):
            _stage_one(staging, assignment, read)
            staging.held.take(assignment.staged_bytes)
    except ModelStateError:
        raise
    except Exception as error:
        raise PlacementError(
            "a value cannot be copied out of the checkpoint; nothing has been changed",
            where=assignment.name,
            found=f"{type(assignment.value).__name__}: {type(error).__name__}: {error}",
            remedy="convert the value with transform=",
        ) from error
    assignment.seconds += time.perf_counter() - started


def _stage_one(staging: Staging, assignment: Assignment, read: torch.Tensor | None) -> None:
    if assignment.transform is not None:
        assignment.final = _transformed(staging, assignment.transform, assignment, read)
    elif assignment.placement.mapped:
        assignment.final = assignment.value
    elif assignment.placement.by_handler:
        value = _own_value(staging, assignment)
        assignment.final = value.to(assignment.dtype) if is_plain(value) else value
        if is_plain(value):
            assignment.overflows.check(assignment.name, value, assignment.final)
    elif assignment.placement.name == "copy" and isinstance(assignment.stored, torch.Tensor):
        # A live tensor needs no copy, unless the load overwrites it.
        assignment.final = assignment.value.clone() if staging.own_memory.hold(assignment.value) else assignment.value
        assignment.overflows.check(assignment.name, assignment.value, assignment.dtype)
    elif isinstance(assignment.stored, Derived):
        value = values_of(
            assignment.stored, staging.checkpoint.read, partial(assignment.overflows.check, assignment.name)
        )
        if assignment.module_transform is None and _is_as_wanted(assignment, value):
            assignment.final = value.detach()
        else:
            _finish(assignment, value)  # which copies it out of what it may share
    elif (
        isinstance(assignment.stored, torch.Tensor)
        and assignment.module_transform is None
        and (assignment.on_cpu or assignment.device != assignment.value.device)
    ):
        _finish(assignment, assignment.value)  # which copies it
    else:
        _finish(assignment, _own_value(staging, assignment))


def _is_as_wanted(assignment: Assignment, value: torch.Tensor) -> bool:
    """Whether a value needs no copy: nothing else refers to its memory, and it fits the slot."""
    _, stride, dtype = assignment.layout
    in_order = value.is_contiguous() if stride is None else tuple(value.stride()) == stride
    fits = value.dtype == dtype and value.device == assignment.device and value.shape == assignment.param.shape
    own = is_plain(value) and storage_owners(value) == 1 and value.untyped_storage().nbytes() == value.nbytes
    own = own and not value.is_inference() and not value.is_conj()
    return own and fits and in_order


def _own_value(staging: Staging, assignment: Assignment) -> torch.Tensor:
    """Returns the value in memory that nothing else refers to. Reads it if it is in a file."""
    if assignment.is_read_into_place:
        fresh = _memory_for(assignment)
        _read(staging, [(assignment, fresh)], lambda _: None)
        return fresh
    if isinstance(assignment.stored, StoredComposite):
        return staging.checkpoint.read(assignment.stored)
    if isinstance(assignment.stored, Derived):
        value = values_of(
            assignment.stored, staging.checkpoint.read, partial(assignment.overflows.check, assignment.name)
        )
        return value.clone() if storage_owners(value) > 1 else value.detach()
    if isinstance(assignment.stored, StoredTensor):
        value = staging.checkpoint.read(assignment.stored)
        return value if is_dense(value) else value.clone()
    if is_plain(assignment.value):
        return assignment.value.detach().clone()
    return assignment.value.detach().to(copy=True)  # the one copy that even the smallest subclasses have


@torch.inference_mode(False)
@torch.no_grad()
def _finish(assignment: Assignment, value: torch.Tensor) -> None:
    """Computes the final value of an assignment from a value whose memory may be reused afterwards."""
    if assignment.module_transform is not None:
        apply_module_transform(assignment, assignment.module_transform, value)
    else:
        assignment.final = as_target(assignment, value)


def _finish_staged(staging: Staging, assignment: Assignment, value: torch.Tensor) -> None:
    with staging.held.during(assignment.passing_bytes):
        _finish(assignment, value)
        staging.held.take(assignment.staged_bytes)


def _finish_in_place(assignment: Assignment, value: torch.Tensor) -> None:
    with torch.no_grad():
        assignment.param.copy_(value)
        assignment.overflows.check(assignment.name, value, assignment.param)
    assignment.final = assignment.param


def _transformed(
    staging: Staging, transform: Transform, assignment: Assignment, read: torch.Tensor | None
) -> torch.Tensor:
    value = _own_value(staging, assignment) if read is None else read
    references, owners = reference_count(value), storage_owners(value)
    version = write_count(value) if is_plain(value) and not value.is_inference() else None
    result = called(transform, assignment.name, value, assignment.param.shape)
    # A tensor that others hold, or memory that they do, cannot be the slot's own: they may write to it before the slot
    # has it, as a function does that returns the same buffer again and again, or afterwards.
    references, owners = (references + 1, owners) if result is value else (ONE_VARIABLE, 1)
    own = reference_count(result) <= references and storage_owners(result) <= owners
    result = result.detach()
    # A function that works in place leaves nothing to compare its result with.
    untouched = version is not None and write_count(value) == version and storage_id(value) != storage_id(result)
    before = partial(nonfinite, value) if untouched else partial(_nonfinite_before, staging, assignment)
    return _as_asked(staging, assignment, result, own, before)


def _nonfinite_before(staging: Staging, assignment: Assignment) -> int:
    """The infinite and NaN values of what a transform was given, which is read once more."""
    stored, read_all = assignment.stored, partial(read_ranges, fingerprints=staging.checkpoint.fingerprints)
    if isinstance(stored, StoredTensor) and assignment.is_run_of_bytes:
        starts = range(0, stored.numel, AT_ONCE)
        return sum(nonfinite(elements(stored, at, min(AT_ONCE, stored.numel - at), read_all)) for at in starts)
    with staging.held.during(assignment.buffer_bytes):
        return nonfinite(assignment.value if stored is None else values_of(stored, staging.checkpoint.read))


@torch.inference_mode(False)
@torch.no_grad()
def _as_asked(
    staging: Staging, assignment: Assignment, result: torch.Tensor, own: bool, before: Callable[[], int]
) -> torch.Tensor:
    """Returns the result of a transform with the requested dtype and device, in memory that nothing else refers to."""
    requested, cast = staging.options.dtype, result
    if requested is not None and result.is_floating_point() and type(result) is torch.Tensor:
        cast = result.to(requested)
    if not assignment.overflows.check(assignment.name, result, cast) and is_plain(result):
        assignment.overflows.check_function(assignment.name, BY_TRANSFORM, result, before)
    result = cast.to(assignment.device)
    assignment.dtype = result.dtype
    assignment.placement = after_transform(assignment.placement, assignment.param, result, assignment.value)
    if not is_plain(result):
        return result
    if assignment.placement.name == "copy":
        return result if own and not staging.own_memory.hold(result) else result.clone()
    fits = own and is_dense(result) and (assignment.placement.mapped or not result.is_inference())
    return result if fits else result.clone(memory_format=torch.contiguous_format)


def _stage_alone(staging: Staging, assignments: Sequence[Assignment], progress: Progress) -> None:
    """Computes values one after the other. While a transform runs, the next value is read."""
    transformed, rest = _split(assignments, lambda assignment: assignment.transform is not None)
    copied, rest = _split(rest, _is_copied)
    _copy_live(staging, copied, progress)
    for assignment in rest:
        stage_one(staging, assignment)
        if assignment.transform_bytes >= _LEAST_TRIMMED_BYTES:
            trim_heap()
        progress(assignment.nbytes)
    ahead = staging.strategy.ahead and len(transformed) > 1

    def fetch(item: tuple[Assignment, torch.Tensor | None], check: Callable[[], None]) -> None:
        assignment, into = item
        assert into is not None
        _read(staging, [(assignment, into)], lambda _: check())

    def use(item: tuple[Assignment, torch.Tensor | None]) -> None:
        assignment, read = item
        stage_one(staging, assignment, read)
        staging.held.take(0 if read is None else -assignment.nbytes)
        progress(assignment.nbytes)

    def with_memory(assignment: Assignment) -> tuple[Assignment, torch.Tensor | None]:
        if not (ahead and assignment.is_read_ahead):
            return assignment, None
        staging.held.take(assignment.nbytes)
        return assignment, _memory_for(assignment)

    items = map(with_memory, transformed)
    prefetch_one(items, fetch, use, is_fetched=lambda item: item[1] is not None)


def _is_copied(assignment: Assignment) -> bool:
    """Whether the slot gets new memory with a copy of a plain tensor in memory."""
    live = assignment.on_cpu and isinstance(assignment.stored, torch.Tensor) and is_plain_memory(assignment.value)
    placement = assignment.placement
    is_moved = placement.name == "copy" or placement.mapped or placement.by_handler
    return live and not is_moved and assignment.module_transform is None


@torch.inference_mode(False)
@torch.no_grad()
def _copy_live(staging: Staging, assignments: Sequence[Assignment], progress: Progress) -> None:
    """Copies tensors to new memory. Small ones share mappings: one of its own takes a tensor at least a page."""
    finals = fresh_tensors([assignment.layout for assignment in assignments])
    for assignment, final in zip(assignments, finals, strict=True):
        started = time.perf_counter()
        final.copy_(assignment.value)
        assignment.overflows.check(assignment.name, assignment.value, final)
        assignment.final = final
        assignment.seconds += time.perf_counter() - started
        progress(assignment.nbytes)


def _memory_for(assignment: Assignment) -> torch.Tensor:
    """Returns new memory for the value as it is in the checkpoint."""
    (fresh,) = fresh_tensors([(assignment.value.size(), None, assignment.value.dtype)])
    return fresh


def _read_through_scratch(
    staging: Staging,
    assignments: Sequence[Assignment],
    progress: Progress,
    finish: Callable[[Assignment, torch.Tensor], None],
) -> None:
    """Reads groups of values into reused buffers, and calls `finish` for each value to cast or move it."""
    groups = list(_groups(assignments, staging.strategy.turn_bytes))
    if not groups:
        return
    layout = torch.Size([max(size for _, size in groups)]), None, torch.uint8
    buffers = fresh_tensors([layout] * (2 if staging.strategy.ahead and len(groups) > 1 else 1))
    turns = cycle(buffers)

    def use(pairs: Pairs) -> None:
        for assignment, buffer in pairs:
            started = time.perf_counter()
            finish(assignment, buffer)
            if assignment.transform_bytes >= _LEAST_TRIMMED_BYTES:
                trim_heap()
            assignment.seconds += time.perf_counter() - started

    laid_out = (_laid_out(group, next(turns)) for group, _ in groups)
    with staging.held.during(sum(buffer.nbytes for buffer in buffers)):
        if len(buffers) > 1:
            prefetch_one(laid_out, partial(_fetch, staging, progress), use, is_fetched=bool)
            return
        for pairs in laid_out:
            _read(staging, pairs, progress)
            use(pairs)


def _fetch(staging: Staging, progress: Progress, pairs: Pairs, check: Callable[[], None]) -> None:
    def on_read(nbytes: int) -> None:
        check()
        progress(nbytes)

    _read(staging, pairs, on_read)


def _laid_out(group: Sequence[Assignment], scratch: torch.Tensor) -> Pairs:
    """Returns a view of the buffer for each assignment, one after the other."""
    pairs, at, storage = [], 0, scratch.untyped_storage()
    for assignment in group:
        empty, size = torch.empty(0, dtype=assignment.value.dtype, device="cpu"), assignment.value.size()
        pairs.append((assignment, empty.set_(storage, at // assignment.value.itemsize, size, contiguous_stride(size))))
        at += aligned(assignment.nbytes)
    return pairs


def _groups(assignments: Iterable[Assignment], scratch_bytes: int) -> Iterator[tuple[list[Assignment], int]]:
    """Yields groups that fit into a buffer, or single larger values, with their bytes."""
    group: list[Assignment] = []
    total = 0
    for assignment in assignments:
        if group and total + aligned(assignment.nbytes) > scratch_bytes:
            yield group, total
            group, total = [], 0
        group.append(assignment)
        total += aligned(assignment.nbytes)
    if group:
        yield group, total


def _read(staging: Staging, pairs: Pairs, progress: Progress) -> None:
    """Reads values that are ranges of files into tensors. Raises `ReadFailedError`."""
    started = time.perf_counter()
    requests = [request for assignment, tensor in pairs for request in assignment.requests(tensor.data_ptr())]
    with staging.held.during(placed_bytes(assignment for assignment, _ in pairs)):
        _read_requests(staging, requests, progress)
    seconds, total = time.perf_counter() - started, sum(assignment.nbytes for assignment, _ in pairs)
    for assignment, _ in pairs:
        assignment.seconds += seconds * assignment.nbytes / max(total, 1)


def _read_table(staging: Staging, table: PlainTable, targets: Sequence[torch.Tensor], progress: Progress) -> None:
    """Reads the values of a table into tensors: memory of their own, or their slots."""
    if table.is_streamed:
        table_read(staging, table, targets, progress)()
        return
    started = time.perf_counter()
    try:
        _read_requests(staging, _requests(table, targets), progress)
    finally:
        if table.placement.direct:
            increment_version(targets)  # autograd has not seen the writes
    table.seconds += time.perf_counter() - started


def _read_requests(staging: Staging, requests: Sequence[Request | Rows], progress: Progress) -> None:
    strategy = staging.strategy
    with staging.held.during(strategy.buffer_bytes):
        read_ranges(
            requests,
            fingerprints=staging.checkpoint.fingerprints,
            on_read=progress,
            threads=strategy.threads if strategy.remote else None,
            batch_bytes=strategy.block_bytes if strategy.remote else None,
        )


def _requests(table: PlainTable, targets: Iterable[torch.Tensor]) -> list[Request | Rows]:
    columns = table.columns
    sources = map(ByteRange, columns.paths, columns.starts, columns.nbytes)
    return [*map(Request, sources, [target.data_ptr() for target in targets])]


def _split(items: Sequence[_T], goes_first: Callable[[_T], bool]) -> tuple[list[_T], list[_T]]:
    first: list[_T] = []
    second: list[_T] = []
    for item in items:
        (first if goes_first(item) else second).append(item)
    return first, second
