"""Predicts the memory that a load needs beyond the final tensors, and chooses a strategy that fits a budget."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from modelstate.io.engine import ReadStrategy, read_threads
from modelstate.io.memory import aligned
from modelstate.planning.assignment import Assignment, ReadRoute
from modelstate.planning.plain_table import PlainTable, Planned


def strategy_within(planned: Sequence[Planned], max_bytes: int, usual: ReadStrategy) -> ReadStrategy:
    """The fastest strategy that needs at most `max_bytes`; the one that needs least, if none does."""
    for strategy in (usual, *usual.smaller()):
        if peak_bytes(planned, strategy) <= max_bytes:
            break
    return strategy


def peak_bytes(planned: Iterable[Planned], strategy: ReadStrategy) -> int:
    """The memory beyond the final tensors: staged values, and buffers of casts and moves."""
    needing = list[Assignment]()
    tables = list[PlainTable]()
    for item in planned:
        if not item.placement.mapped:
            tables.append(item) if isinstance(item, PlainTable) else needing.append(item)
    streamed: list[Assignment] = []
    computed: list[Assignment] = []
    whole: list[Assignment] = []
    groups = {ReadRoute.STREAMED: streamed, ReadRoute.COMPUTED: computed}
    for assignment in needing:
        groups.get(assignment.route, whole).append(assignment)
    staged = sum(assignment.staged_bytes for assignment in needing) + sum(table.staged_bytes for table in tables)
    # These reads follow each other, and each frees its memory.
    in_runs = any(strategy.remote or assignment.is_run_of_bytes for assignment in whole)
    in_runs = in_runs or any(not table.is_streamed for table in tables)
    read = strategy.buffer_bytes if in_runs else 0
    read += max(_scratch(whole, strategy), _alone(whole, strategy))
    read += placed_bytes(whole)
    computing = max((assignment.combined.thread_bytes for assignment in computed if assignment.combined), default=0)
    streams = [_stream((), [table], strategy) for table in tables if table.is_streamed]
    streams += [_stream(streamed, (), strategy)] if streamed else []
    devices = {assignment.device for assignment in streamed} | {table.device for table in tables}
    # They follow each other and share their buffers. Each device has memory for a block.
    streaming = max((nbytes for nbytes, _ in streams), default=0)
    streaming += sum(device.type == "cuda" for device in devices) * max(
        (block_bytes for _, block_bytes in streams), default=0
    )
    return staged + max(streaming, read_threads() * computing, read)


def placed_bytes(assignments: Iterable[Assignment]) -> int:
    """The memory of the threads that read runs together with the gaps between them."""
    parts = (part.buffer_bytes for assignment in assignments for part in assignment.placed)
    return read_threads() * max(parts, default=0)


def _stream(streamed: Sequence[Assignment], tables: Sequence[PlainTable], strategy: ReadStrategy) -> tuple[int, int]:
    """The memory of the threads of one stream of these values, and of one of its blocks."""
    nbytes = [assignment.nbytes for assignment in streamed]
    nbytes += [each for table in tables for each in table.columns.nbytes]
    units = [min(assignment.unit_bytes, assignment.nbytes) for assignment in streamed]
    devices = [assignment.device for assignment in streamed] + [table.device for table in tables]
    return strategy.stream_bytes(
        total=sum(map(aligned, nbytes)),
        unit=max([*units, *(table.stored_dtype.itemsize for table in tables)]),
        working=max((assignment.working_bytes(strategy.block_bytes) for assignment in streamed), default=0),
        to_device=any(device.type == "cuda" for device in devices),
    )


def _scratch(whole: Sequence[Assignment], strategy: ReadStrategy) -> int:
    through = [assignment for assignment in whole if assignment.needs_buffer and assignment.transform is None]
    together = [aligned(assignment.buffer_bytes) for assignment in through if assignment.is_read_together]
    others = [aligned(assignment.buffer_bytes) for assignment in through if not assignment.is_read_together]
    buffer = max(max(together, default=0), min(sum(together), strategy.turn_bytes))
    buffers = 2 if strategy.ahead and sum(together) > buffer else 1
    # Transforms read from the buffers.
    passing = max((item.passing_bytes for item in whole if item.module_transform is not None), default=0)
    return max(buffers * buffer, max(others, default=0)) + passing


def _alone(whole: Sequence[Assignment], strategy: ReadStrategy) -> int:
    """The memory of the value that one transform gets, and of the value that is read for the next one."""
    passing_bytes = attrgetter("passing_bytes")
    given = sorted((assignment for assignment in whole if assignment.transform is not None), key=passing_bytes)
    if not given:
        return 0
    ahead = max((one for one in given if one.is_read_ahead), key=passing_bytes, default=None)
    if not strategy.ahead or ahead is None:
        return given[-1].passing_bytes
    rest = [assignment.passing_bytes for assignment in given if assignment is not ahead]
    return ahead.passing_bytes + max(rest, default=0)
