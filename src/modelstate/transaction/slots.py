"""The slots of a module that a load can fill, and which of them share memory."""

from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterable, KeysView, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from modelstate.formats.tree import EXTRA_STATE
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.modules import module_tables, non_persistent_buffers, own_modules
from modelstate.torch_compat.plain import extent, has_its_memory, is_plain, is_sharded, same_place, same_values
from modelstate.torch_compat.private import address_range, storage_id
from modelstate.torch_compat.sharding import local_tensor

T = TypeVar("T")

PARAMETER, BUFFER, HIDDEN, EXTRA = "parameter", "buffer", "non-persistent buffer", "extra state"

LAZY = "_modelstate_lazy_buffers"
"""The attribute in which a module names the buffers that may be None; see `modelstate.objects.lazy_buffers`."""

_STRICTEST = (PARAMETER, BUFFER, HIDDEN)


class Slot(NamedTuple):
    """A tensor of a module with all of its names. A tied tensor has several."""

    names: tuple[str, ...]
    kind: str
    """"parameter", "buffer" or "non-persistent buffer"; the first of these where its names differ in kind."""
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Slots:
    """All slots of a module, and its modules."""

    tensors: tuple[Slot, ...]
    by_name: dict[str, Slot]
    """In the order of `state_dict`."""
    left_out: frozenset[str]
    """Names that `state_dict` leaves out: non-persistent buffers."""
    empty: frozenset[str]
    """Names that are registered with None."""
    lazy: frozenset[str]
    """The lazy buffers among `empty`, which a load may set."""
    extra: tuple[str, ...]
    """Names of the extra state of modules that override `set_extra_state`."""
    modules: dict[str, nn.Module]
    """The modules by the prefixes of the names of their tensors, in the order of `state_dict`."""


def slots_of(root: nn.Module) -> Slots:
    """The slots of `root` and its descendants, in the order of `state_dict`."""
    found: dict[int, Slot] = {}
    tied: dict[int, list[str]] = {}
    by_name: dict[str, Slot] = {}
    modules: dict[str, nn.Module] = {}
    left_out, empty, lazy = set[str](), set[str](), set[str]()
    extra: list[str] = []
    for prefix, module, parameters, buffers in module_tables(root):
        modules[prefix] = module
        hidden = non_persistent_buffers(module) if buffers else ()
        for usual, table in ((PARAMETER, parameters), (BUFFER, buffers)):
            if not table:
                continue
            for name, tensor in table.items():
                full_name = prefix + name
                if tensor is None:
                    empty.add(full_name)
                    if name in module.__dict__.get(LAZY, ()):
                        lazy.add(full_name)
                    continue
                kind = usual
                if usual is BUFFER and name in hidden:
                    kind = HIDDEN
                    left_out.add(full_name)
                key = id(tensor)
                known = found.get(key)
                if known is None:
                    # The constructor of a named tuple takes twice as long.
                    found[key] = by_name[full_name] = tuple.__new__(Slot, ((full_name,), kind, tensor))
                else:
                    by_name[full_name] = known
                    tied.setdefault(key, [known.name]).append(full_name)
                    if _STRICTEST.index(kind) < _STRICTEST.index(known.kind):
                        found[key] = known._replace(kind=kind)
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            extra.append(prefix + EXTRA_STATE)
    for key, names in tied.items():
        found[key] = slot = found[key]._replace(names=tuple(names))
        by_name.update(dict.fromkeys(names, slot))
    return Slots(
        tuple(found.values()), by_name, frozenset(left_out), frozenset(empty), frozenset(lazy), tuple(extra), modules
    )


class ComparedNames(NamedTuple):
    """The names of values and of slots, compared."""

    common: list[str]
    """On both sides, in the order of the slots; without those whose values have been taken already."""
    missing: list[str]
    """Of slots without a value, in torch's order."""
    unexpected: list[str]
    """Of values without a slot, in torch's order."""


def compare_names(slots: Slots, given: KeysView[str], taken: Collection[str] = ()) -> ComparedNames:
    """Does what torch's loading protocol does for modules without code of their own: compares the names.

    Args:
        slots: The slots of the model.
        given: The names of the values.
        taken: Names on both sides whose values are taken already.
    """
    left_out, compared = slots.left_out, ComparedNames([], [], [])
    if len(taken) < len(slots.by_name):
        for key in slots.by_name:
            if key in left_out or key in taken:
                continue
            (compared.common if key in given else compared.missing).append(key)
    if len(taken) == len(given):
        return compared
    left = [key for key in given if key not in slots.by_name or key in left_out]
    if not left:
        return compared
    positions = {prefix: position for position, prefix in enumerate(slots.modules)}
    unexpected: list[tuple[int, bool, str]] = []
    for key in left:
        prefix = key[: key.rfind(".") + 1]
        while prefix not in positions:
            prefix = prefix[: prefix.rfind(".", 0, -1) + 1]
        name, dot, _ = key[len(prefix) :].partition(".")
        # Where a submodule is None, torch does not report the keys that begin with its name.
        if not (dot and name in own_modules(slots.modules[prefix])):
            unexpected.append((positions[prefix], dot != "" or name != EXTRA_STATE, key))
    compared.unexpected.extend(key for _, _, key in sorted(unexpected, key=itemgetter(0, 1)))
    return compared


class SlotSignature(NamedTuple):
    """What decides how a value gets into a slot, without the value that is there: compared by executing a plan."""

    names: tuple[str, ...]
    kind: str
    cls: type
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    memory: str
    """The first slot in the storage of this one, usually this one itself; empty where it has no memory."""
    offset_bytes: int
    """The bytes from the beginning of that slot to the beginning of this one."""
    is_inference: bool
    """Whether it was created in inference mode, so that it can only be changed there."""

    def __str__(self) -> str:
        what = f"{short(self.dtype)} of shape {self.shape} on {self.device}, a {self.kind} of class {self.cls.__name__}"
        what += f", stride {self.stride}" if self.stride else ""
        what += f", tied to {', '.join(self.names[1:])}" if len(self.names) > 1 else ""
        if self.memory not in ("", self.names[0]):
            what += f", in the memory of {self.memory}, at {self.offset_bytes:+} bytes"
        return what + (", of inference mode" if self.is_inference else "")


def signatures(slots: Slots) -> dict[str, SlotSignature]:
    """The signature of each slot by its first name."""
    first_in: dict[int, tuple[str, int]] = {}
    with_memory = [slot.tensor for slot in slots.tensors if is_plain(slot.tensor) and not slot.tensor.is_meta]
    # Tensors that overlap may have storages of their own, as two that wrap one NumPy array: the first one's counts.
    storages = {id(tensor): storage_id(group[0]) for group in sharing(with_memory, with_memory) for tensor in group}
    found: dict[str, SlotSignature] = {}
    for names, kind, tensor in slots.tensors:
        is_lazy, plain = torch.nn.parameter.is_lazy(tensor), is_plain(tensor)
        has_shape = not (is_lazy or (tensor.is_nested and tensor.layout is torch.strided))
        shape = tuple(tensor.shape) if has_shape else ()
        stride = tuple(tensor.stride()) if plain and has_shape else ()
        has_memory = plain and not is_lazy and not tensor.is_meta and has_its_memory(tensor)
        start = tensor.data_ptr() if has_memory else 0
        storage = storages.get(id(tensor)) or storage_id(tensor) if has_memory else 0
        memory, first_start = first_in.setdefault(storage, (names[0], start)) if has_memory else ("", 0)
        is_inference = not is_lazy and tensor.is_inference()
        found[names[0]] = SlotSignature(
            *(names, kind, type(tensor), shape, stride, tensor.dtype, tensor.device),
            *(memory, start - first_start, is_inference),
        )
    return found


class Addresses:
    """The address ranges of the storages of some tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        ranges = sorted({address_range(part) for tensor in tensors for part in _parts(tensor)} - {(0, 0)})
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of a tensor overlaps one of the ranges."""
        start, end = address_range(tensor)
        if start == end:
            return False
        before = bisect_right(self._starts, start) - 1
        return (before >= 0 and start < self._ends[before]) or (
            before + 1 < len(self._starts) and self._starts[before + 1] < end
        )


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the local tensor of a DTensor; of any other tensor, the tensor itself."""
    return [local_tensor(tensor)] if is_sharded(tensor) else [tensor]


def overlapping(group: Sequence[T], tensors: Sequence[torch.Tensor]) -> list[tuple[T, T]]:
    """Returns the pairs of items whose tensors overlap, from their first to their last element, in the order of items.

    Args:
        group: A group that `sharing` has found, or a part of one.
        tensors: The tensor of each item.
    """
    pairs: list[tuple[int, int]] = []
    open_ranges: list[tuple[int, int]] = []
    """Where the ranges end that reach behind the current start, and the indices of their items."""
    for start, end, index in sorted((*_addresses(tensor), index) for index, tensor in enumerate(tensors)):
        open_ranges = [(other_end, other) for other_end, other in open_ranges if other_end > start]
        pairs += [(min(index, other), max(index, other)) for _, other in open_ranges]
        open_ranges.append((end, index))
    return [(group[first], group[second]) for first, second in sorted(pairs)]


def place_of(tensor: torch.Tensor) -> Hashable:
    """Returns what two plain tensors on one device have in common that are the same view of the same memory."""
    address = _addresses(tensor)
    return address, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first element of a tensor and behind the last; zeros for one without memory."""
    storage_start, storage_end = address_range(tensor)
    if storage_start == storage_end:
        return 0, 0
    start, end = extent(tensor)
    return storage_start + start * tensor.itemsize, storage_start + end * tensor.itemsize


def sharing(items: Sequence[T], tensors: Sequence[torch.Tensor]) -> list[list[T]]:
    """Returns the groups of items whose plain tensors overlap, each in the order of the items.

    Tensors may overlap that have storages of their own, as two that wrap one NumPy array. The addresses are sorted.

    Args:
        items: Anything.
        tensors: The tensor of each item.
    """
    # Empty tensors, and those on meta, have no elements in memory.
    starts = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    sizes = np.array([tensor.nbytes if tensor.is_contiguous() else span_bytes(tensor) for tensor in tensors], np.uint64)
    order = np.argsort(starts, kind="stable")
    order = order[(starts[order] > 0) & (sizes[order] > 0)]
    starts, ends = starts[order], (starts + sizes)[order]
    if not (starts[1:] < np.maximum.accumulate(ends)[:-1]).any():
        return []
    groups: list[list[int]] = []
    last: dict[torch.device, tuple[list[int], int]] = {}
    """The last run of tensors that overlap on each device, and where it ends: devices may use the same addresses."""
    for index, start, end in zip(order.tolist(), starts.tolist(), ends.tolist(), strict=True):
        device = tensors[index].device
        run, run_end = last.get(device, ([], 0))
        if start < run_end:
            run.append(index)
            if len(run) == 2:
                groups.append(run)
        else:
            run = [index]
        last[device] = run, max(end, run_end)
    return [[items[index] for index in sorted(group)] for group in groups]


def span_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes from the first element of a tensor to behind the last, with those between the elements."""
    first, end = extent(tensor)
    return (end - first) * tensor.itemsize


def clash(a: torch.Tensor, a_value: torch.Tensor, b: torch.Tensor, b_value: torch.Tensor) -> bool:
    """Whether a write of `b_value` to `b` changes an element of `a`, which overlaps it and holds `a_value`."""
    if same_place(a, b):
        return not same_values(a_value, b_value)
    (a_start, a_end), (b_start, b_end) = _addresses(a), _addresses(b)
    first = min(a_start, b_start)
    memory = bytearray(max(a_end, b_end) - first)
    views = []
    for tensor, value, start, end in ((a, a_value, a_start, a_end), (b, b_value, b_start, b_end)):
        # Memory of NumPy need not be aligned.
        count = (end - start) // tensor.itemsize
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=start - first)
        value = value.conj() if tensor.is_conj() else value
        views.append((flat.as_strided(tensor.size(), tensor.stride()), value.neg() if tensor.is_neg() else value))
    (a_view, a_stored), (b_view, b_stored) = views
    before = a_view.copy_(a_stored).clone()
    b_view.copy_(b_stored)
    return not same_values(a_view, before)
