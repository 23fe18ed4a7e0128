"""`PlainTable`: the values of a load that get from files into plain tensors in the same way.

Most slots of most loads are of this kind: plain tensors, on the CPU, a GPU or meta, with the shape that the file has.
A file may have tens of thousands of small ones, and to plan each by itself takes longer than to read it. So all of them
are rows of a few tables, each with one placement and one route. Every other value has an `Assignment` of its own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from modelstate.checkpoint.mapped import UNALIGNED, Maps
from modelstate.io.files import FileFingerprint
from modelstate.io.leased import why_no_lease
from modelstate.planning.assignment import (
    COPYABLE,
    DEVICES_READ_INTO,
    DIRECT,
    LEASED,
    MAPPED,
    NEW_MEMORY,
    STAGED,
    Assignment,
    Placement,
    ReadRoute,
    staged_because,
)
from modelstate.planning.options import LoadOptions
from modelstate.planning.plan import Step
from modelstate.process import cached_attribute
from modelstate.spec import ByteRange, StoredTensors, TensorColumns
from modelstate.torch_compat.dtypes import cast_between, short
from modelstate.torch_compat.plain import is_plain, is_writable_memory
from modelstate.transaction.slots import HIDDEN, Slot, sharing

_CPU = torch.device("cpu")
_DTYPES = {short(dtype): dtype for dtype in COPYABLE}


@dataclass(eq=False)
class PlainTable:
    """Values of files for plain slots, with one device, one placement and one route: a row for each slot."""

    slots: list[Slot]
    columns: TensorColumns
    """Where the values are, in the order of the slots."""
    dtypes: list[torch.dtype]
    """After the load."""
    placement: Placement
    route: ReadRoute
    """Values are streamed that are cast, or get to a GPU. All values of such a table have one dtype in the files."""
    device: torch.device = _CPU
    """After the load."""
    maps: Maps | None = None
    """Maps the values; None where they are read."""
    final: list[torch.Tensor] | None = None
    """The values, mapped or in memory of their own; None until they have been read, and where they are read into their
    slots."""
    seconds: float = 0.0
    params: list[torch.Tensor] = field(init=False)
    """The tensors of the slots."""
    nbytes: int = field(init=False)
    """Bytes to read."""
    is_streamed: bool = field(init=False)
    """Whether the values are read block by block into a buffer, and get from there to where they belong."""

    def __post_init__(self) -> None:
        self.params = [slot.tensor for slot in self.slots]
        self.nbytes, self.is_streamed = sum(self.columns.nbytes), self.route is ReadRoute.STREAMED

    @property
    def casts(self) -> bool:
        """Whether values are cast while they are read."""
        return self.is_streamed and any(dtype is not self.stored_dtype for dtype in self.dtypes)

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory that the values need until they are copied into their slots."""
        if not self.placement.staged:
            return 0
        if not self.is_streamed:
            return self.nbytes
        itemsize = self.stored_dtype.itemsize
        rows = zip(self.columns.nbytes, self.dtypes, strict=True)
        return sum(nbytes // itemsize * dtype.itemsize for nbytes, dtype in rows)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the first value in its file."""
        return _DTYPES[self.columns.dtype_names[0]]

    @property
    def sources(self) -> list[ByteRange]:
        """The range of each value."""
        columns = self.columns
        return [*map(ByteRange, columns.paths, columns.starts, columns.nbytes)]

    @cached_attribute
    def extents(self) -> list[ByteRange]:
        """The ranges of files that the values are read from. Ranges that adjoin are one, and so are equal ranges."""
        columns, numbers = self.columns, dict[str, int]()
        paths = np.array([numbers.setdefault(path, len(numbers)) for path in columns.paths])
        starts, nbytes = np.array(columns.starts), np.array(columns.nbytes)
        order = np.lexsort((starts, paths))
        paths, starts, ends = paths[order], starts[order], (starts + nbytes)[order]
        is_first = np.ones(len(order), bool)
        is_first[1:] = (paths[1:] != paths[:-1]) | (starts[1:] > ends[:-1])
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(order)) - 1
        names = [*numbers]
        runs = zip(paths[first].tolist(), starts[first].tolist(), ends[last].tolist(), strict=True)
        return [ByteRange(names[path], start, end - start) for path, start, end in runs]

    def step_maker(self) -> Callable[[], list[Step]]:
        """Returns a function that makes the step of each row. It holds no tensor."""
        slots = [(slot.names[0], slot.kind) for slot in self.slots]
        how, route, device, columns, dtypes = self.placement, self.route, self.device, self.columns, self.dtypes
        seconds = self.seconds / self.nbytes

        def make() -> list[Step]:
            rows = zip(slots, dtypes, columns.rows(), strict=True)
            return [
                Step(
                    *(name, kind, name, how, torch.Size(shape), dtype, stored_dtype, device, nbytes, (), (), route),
                    seconds=seconds * nbytes,
                )
                for (name, kind), dtype, (stored_dtype, shape, _, _, nbytes) in rows
            ]

        return make

    def rebound(self, slots: Mapping[str, Slot]) -> "PlainTable":
        """Returns the table for the slots of these names, which have been listed anew."""
        self.slots = [slots[slot.names[0]] for slot in self.slots]
        self.params = [slot.tensor for slot in self.slots]
        return self

    def stage_instead(self, reason: str) -> None:
        """Has the values read before the commit that were planned to be read at the commit."""
        self.placement = staged_because(reason)

    @property
    def slot_names(self) -> list[str]:
        """The names of the slots."""
        return [slot.name for slot in self.slots]


Planned = Assignment | PlainTable
"""What a load reads."""
_LEAST_LEASED_BYTES = 1 << 20
"""Fewer bytes are staged: it takes no longer than to hold their files."""


def stage_unleased(planned: Iterable[Planned], fingerprints: Mapping[str, FileFingerprint], in_use: str) -> None:
    """Has values staged that are planned to be read at the commit, where it is known that their files cannot be held.

    Args:
        planned: What a load reads.
        fingerprints: The files, by path.
        in_use: Another reason to stage them; empty without one.
    """
    waiting = [item for item in planned if item.placement.leased and item.final is None]
    if sum(item.nbytes for item in waiting) < _LEAST_LEASED_BYTES:
        reason = "they are small"
    else:
        extents = [extent for item in waiting for extent in item.extents]
        reason = why_no_lease(extents, fingerprints) or in_use
    for item in waiting if reason else ():
        item.stage_instead(reason)


_Row = tuple[Slot, int, torch.dtype]
"""A slot, the row of its value, and the dtype after the load."""


def plain_tables(
    slots: Iterable[Slot], tensors: StoredTensors, options: LoadOptions, maps_of_load: Callable[[], Maps]
) -> list[PlainTable]:
    """Returns the tables of the slots that get the tensor of their name in a way that cannot fail.

    A slot whose memory overlaps that of another one is left out.

    Args:
        slots: All slots of a model.
        tensors: The values, by the names of the model.
        options: The options of the load.
        maps_of_load: Returns what maps values, where a slot may be a map.
    """
    rows, columns, by_tensor = tensors.rows, tensors.columns, options.device_of_meta
    # By whether the slots are on meta, the stored dtype where values are streamed, and the device after the load.
    groups: defaultdict[tuple[bool, str, torch.device], list[_Row]] = defaultdict(list)
    kinds: dict[tuple[str, torch.dtype, bool, int | torch.device], tuple[list[_Row], torch.dtype] | None] = {}
    others: list[torch.Tensor] = []
    for slot in slots:
        names, kind, param = slot
        row = rows.get(names[0])
        if (
            row is not None
            and len(names) == 1
            and kind != HIDDEN
            and is_writable_memory(param)
            and param.shape == tuple(columns.shapes[row])
        ):
            is_meta = param.is_meta
            where = param.get_device() if by_tensor is None or not is_meta else by_tensor(param)
            key = columns.dtype_names[row], param.dtype, is_meta, where
            if key not in kinds:
                dtype, device = _dtype_after(*key[:3], options), options.device_after(param)
                is_streamed = device != _CPU or dtype != _DTYPES.get(key[0])
                stays = device.type in DEVICES_READ_INTO and (is_meta or param.device == device)
                group_key = is_meta, key[0] if is_streamed else "", device
                kinds[key] = (groups[group_key], dtype) if dtype is not None and stays else None
            found = kinds[key]
            if found is not None:
                group, dtype = found
                group.append((slot, row, dtype))
                continue
        if is_plain(param) and not param.is_meta:
            others.append(param)
    filled = [slot.tensor for (is_meta, *_), group in groups.items() if not is_meta for slot, _, _ in group]
    with_memory = [*filled, *others]
    shared = {id(tensor) for tensors in sharing(with_memory, with_memory) for tensor in tensors}
    in_place = {None: LEASED, True: DIRECT, False: STAGED}[options.in_place]
    parts: list[tuple[list[_Row], Placement, ReadRoute, torch.device, Maps | None]] = []
    for (is_meta, streamed_from, device), group in groups.items():
        route = ReadRoute.STREAMED if streamed_from else ReadRoute.DIRECT
        if not is_meta:
            group = [row for row in group if id(row[0].tensor) not in shared]
            parts.append((group, in_place, route, device, None))
            continue
        if not (streamed_from or options.map is False):
            maps = maps_of_load()
            mapped, group = _split_by_map(group, columns, options.map, maps)
            parts.append((mapped, MAPPED, ReadRoute.MAPPED, device, maps))
        parts.append((group, NEW_MEMORY, route, device, None))
    return [
        PlainTable(
            [slot for slot, _, _ in part],
            columns.selected([row for _, row, _ in part]),
            [dtype for _, _, dtype in part],
            *(placement, route, device, maps),
        )
        for part, placement, route, device, maps in parts
        if part
    ]


def _dtype_after(stored_name: str, dtype: torch.dtype, is_meta: bool, options: LoadOptions) -> torch.dtype | None:
    """Returns the dtype of a slot after the load; None where a value of the file cannot be copied or cast to it."""
    stored, own_dtype = _DTYPES.get(stored_name), dtype
    if stored is None:
        return None
    if options.dtype is not None and stored.is_floating_point and dtype.is_floating_point:
        dtype = options.dtype
    if dtype not in COPYABLE or not (is_meta or dtype == own_dtype):
        return None
    cast = cast_between(stored, dtype)
    return dtype if cast in ("same", "lossless") or (cast == "lossy" and dtype == options.dtype) else None


def _split_by_map(
    on_meta: list[_Row], columns: TensorColumns, requested: bool | None, maps: Maps
) -> tuple[list[_Row], list[_Row]]:
    """Returns the slots that may be maps of their file, and those that get memory. No two slots map the same bytes."""
    can_map: dict[str, bool] = {}
    mapped: dict[int, _Row] = {}
    rest: list[_Row] = []
    for row in on_meta:
        _, index, _ = row
        path, start, nbytes = columns.paths[index], columns.starts[index], columns.nbytes[index]
        is_aligned = start % _DTYPES[columns.dtype_names[index]].itemsize == 0
        if not is_aligned:
            maps.note(UNALIGNED, path)
        elif path not in can_map:
            can_map[path] = maps.can_map(ByteRange(path, start, nbytes), requested)
        if is_aligned and can_map[path] and index not in mapped:
            mapped[index] = row
        else:
            rest.append(row)
    return [*mapped.values()], rest
