"""`PlainCopies`: the values of a load that are copied as they are from files into the memory of their slots.

Most slots of most loads are of this kind: plain tensors on the CPU, with the shape and the dtype that the file has. A
file may have tens of thousands of small ones, and to plan each by itself takes longer than to read it. So all of them
are rows of one table, with one placement. Every other value has an `Assignment` of its own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from modelstate.io.engine import Request
from modelstate.planning.assignment import COPYABLE, Assignment, Placement, ReadRoute, staged_because
from modelstate.planning.plan import Step
from modelstate.spec import ByteRange, StoredTensors, TensorColumns, overlapping
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.plain import is_plain, writable_storage
from modelstate.torch_compat.private import address_range
from modelstate.transaction.slots import HIDDEN, Slot

_CPU = torch.device("cpu")
_DTYPES = {short(dtype): dtype for dtype in COPYABLE}


@dataclass(slots=True, eq=False)
class PlainCopies:
    """Values that are copied as they are from files into plain memory of the CPU: one row for each slot."""

    slots: list[Slot]
    columns: TensorColumns
    """Where the values are, in the order of the slots."""
    placement: Placement
    final: list[torch.Tensor] | None = None
    """The values in temporary memory; None until they have been read, and where they are read into their slots."""
    seconds: float = 0.0

    @property
    def params(self) -> list[torch.Tensor]:
        """The tensors of the slots."""
        return [slot.tensor for slot in self.slots]

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(self.columns.nbytes)

    @property
    def extents(self) -> list[ByteRange]:
        """The ranges of files that the values are read from. Ranges that adjoin are one."""
        columns, numbers = self.columns, dict[str, int]()
        paths = np.array([numbers.setdefault(path, len(numbers)) for path in columns.paths])
        starts, nbytes = np.array(columns.starts), np.array(columns.nbytes)
        order = np.lexsort((starts, paths))
        paths, starts, ends = paths[order], starts[order], (starts + nbytes)[order]
        is_first = np.ones(len(order), bool)
        is_first[1:] = (paths[1:] != paths[:-1]) | (starts[1:] != ends[:-1])
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(order)) - 1
        names = [*numbers]
        runs = zip(paths[first].tolist(), starts[first].tolist(), ends[last].tolist(), strict=True)
        return [ByteRange(names[path], start, end - start) for path, start, end in runs]

    def steps(self) -> Callable[[], list[Step]]:
        """Returns a function that makes a step for each slot, with its part of the time. It holds no tensor."""
        slots, columns, placement = [(slot.name, slot.kind) for slot in self.slots], self.columns, self.placement
        seconds = self.seconds / self.nbytes

        def make() -> list[Step]:
            rows = zip(slots, columns.dtype_names, columns.shapes, columns.nbytes, strict=True)
            return [
                Step(
                    *(name, kind, name, placement, torch.Size(shape), (dtype := _DTYPES[dtype_name]), dtype, _CPU),
                    *(nbytes, (), (), ReadRoute.DIRECT),
                    seconds=seconds * nbytes,
                )
                for (name, kind), dtype_name, shape, nbytes in rows
            ]

        return make

    def requests(self, targets: Iterable[torch.Tensor]) -> list[Request]:
        """Returns the read of each value into a tensor."""
        columns = self.columns
        sources = map(ByteRange, columns.paths, columns.starts, columns.nbytes)
        return [*map(Request, sources, [target.data_ptr() for target in targets])]

    def stage_instead(self, reason: str) -> None:
        """Has the values read before the commit that were planned to be read at the commit."""
        self.placement = staged_because(reason)

    def names_in(self, ranges: Sequence[ByteRange]) -> list[str]:
        """Returns the names of the slots whose values are in one of these ranges."""
        columns = self.columns
        rows = zip(self.slots, map(ByteRange, columns.paths, columns.starts, columns.nbytes), strict=True)
        return [slot.name for slot, extent in rows if any(overlapping(extent, other) for other in ranges)]


Planned = Assignment | PlainCopies
"""What a load reads."""


def leased(planned: Iterable[Planned]) -> list[Planned]:
    """Returns what is read at the commit, from files that are held."""
    return [item for item in planned if item.placement.leased and item.final is None]


def plain_copies(slots: Iterable[Slot], tensors: StoredTensors, placement: Placement) -> PlainCopies | None:
    """Returns the slots that get the tensor of their name by a copy that cannot fail; None without such slots.

    A slot that shares its storage with another one is left out.
    """
    rows, columns = tensors.rows, tensors.columns
    copied: list[Slot] = []
    chosen: list[int] = []
    storages: list[int] = []
    others: list[Slot] = []
    for slot in slots:
        names, kind, param = slot
        row = rows.get(names[0])
        if (
            row is not None
            and not param.is_meta
            and len(names) == 1
            and kind != HIDDEN
            and (storage := writable_storage(param))
            and param.shape == tuple(columns.shapes[row])
            and param.dtype == _DTYPES.get(columns.dtype_names[row])
        ):
            copied.append(slot)
            chosen.append(row)
            storages.append(storage)
        elif not param.is_meta:
            others.append(slot)
    slots_of_storage = Counter(storages)
    slots_of_storage.update(address_range(slot.tensor)[0] for slot in others if is_plain(slot.tensor))
    if len(slots_of_storage) < len(storages) + len(others):
        kept = [index for index, storage in enumerate(storages) if slots_of_storage[storage] == 1]
        copied, chosen = [copied[index] for index in kept], [chosen[index] for index in kept]
    return PlainCopies(copied, columns.selected(chosen), placement) if copied else None
