"""The slots of a module that a load can fill, and which of them share memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterable, KeysView, Sequence
from operator import itemgetter, lt
from typing import NamedTuple, TypeVar

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.formats.tree import EXTRA_STATE
from modelstate.spec import span
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.modules import module_tables, non_persistent_buffers, own_modules
from modelstate.torch_compat.plain import same_values
from modelstate.torch_compat.private import address_range, payload_of

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


class Slots(msgspec.Struct, frozen=True):
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
    tied: tuple[Slot, ...]
    """Those with several names."""
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
    several = tuple(map(found.__getitem__, tied))
    sets = frozenset(left_out), frozenset(empty), frozenset(lazy)
    return Slots(tuple(found.values()), by_name, *sets, several, tuple(extra), modules)


def compare_names(
    slots: Slots, given: KeysView[str], taken: Collection[str] = ()
) -> tuple[list[str], list[str], list[str]]:
    """Does what torch's loading protocol does for modules without code of their own: compares the names.

    Args:
        slots: The slots of the model.
        given: The names of the values.
        taken: Names on both sides whose values are taken already.

    Returns:
        The names on both sides, without those that are taken; the missing ones; the unexpected ones, in torch's order.
    """
    left_out = slots.left_out
    common, missing, unexpected = list[str](), list[str](), list[tuple[int, bool, str]]()
    if len(taken) < len(slots.by_name):
        for key in slots.by_name:
            if key not in left_out and key not in taken:
                (common if key in given else missing).append(key)
    left = [key for key in given if key not in slots.by_name or key in left_out] if len(taken) < len(given) else []
    positions = {prefix: position for position, prefix in enumerate(slots.modules)} if left else {}
    for key in left:
        prefix = key[: key.rfind(".") + 1]
        while prefix not in positions:
            prefix = prefix[: prefix.rfind(".", 0, -1) + 1]
        name, dot, _ = key[len(prefix) :].partition(".")
        # Where a submodule is None, torch does not report the keys that begin with its name.
        if not (dot and name in own_modules(slots.modules[prefix])):
            unexpected.append((positions[prefix], dot != "" or name != EXTRA_STATE, key))
    return common, missing, [key for _, _, key in sorted(unexpected, key=itemgetter(0, 1))]


class SlotSignatures(msgspec.Struct, frozen=True):
    """The slots of a model without the values that are there, in columns, which decide whether a plan holds for it.

    A model may have tens of thousands of slots, and an object for each of them takes longer to create than the values
    take to load.
    """

    names: list[tuple[str, ...]]
    kinds: list[str]
    classes: list[type]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    devices: list[torch.device]

    def as_text(self) -> dict[str, str]:
        """The signature of each slot, for a message, by its first name."""
        texts: dict[str, str] = {}
        columns = (self.names, self.kinds, self.classes, self.shapes, self.dtypes, self.devices)
        for (name, *others), kind, cls, shape, dtype, device in zip(*columns, strict=True):
            text = f"{short(dtype)} of shape {tuple(shape)} on {device}, a {kind} of class {cls.__name__}"
            texts[name] = text + (f", tied to {', '.join(others)}" if others else "")
        return texts


def signatures(slots: Slots) -> SlotSignatures:
    """Returns the signatures of the slots of a model."""
    tensors = [slot.tensor for slot in slots.tensors]
    # Neither a lazy tensor nor a nested one has a shape.
    without = [is_lazy(tensor) or (tensor.is_nested and tensor.layout is torch.strided) for tensor in tensors]
    return SlotSignatures(
        [slot.names for slot in slots.tensors],
        [slot.kind for slot in slots.tensors],
        [*map(type, tensors)],
        [() if lacks_shape else tensor.shape for tensor, lacks_shape in zip(tensors, without, strict=True)],
        [tensor.dtype for tensor in tensors],
        [tensor.device for tensor in tensors],
    )


class Addresses:
    """The address ranges of the storages of some tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        ranges = sorted({address_range(part) for tensor in tensors for part in payload_of(tensor)} - {(0, 0)})
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
    """The addresses of the first element of a plain tensor and behind the last; equal for one without memory."""
    (start,), (end,) = _addresses_of([tensor])
    return start, end


def sharing(items: Sequence[T], tensors: Sequence[torch.Tensor]) -> list[list[T]]:
    """Returns the groups of items whose plain tensors overlap, each in the order of the items.

    Tensors may overlap that have storages of their own, as two that wrap one NumPy array. The addresses are sorted.

    Args:
        items: Anything.
        tensors: The tensor of each item.
    """
    starts, ends = _addresses_of(tensors)
    # Ranges are disjoint where each one but the first begins behind as many ends as there are ranges before it.
    if not any(map(lt, sorted(starts)[1:], sorted(ends))):
        return []
    groups: list[list[int]] = []
    last: dict[torch.device, tuple[list[int], int]] = {}
    """The last run of tensors that overlap on each device, and where it ends: devices may use the same addresses."""
    for index in sorted(range(len(starts)), key=starts.__getitem__):
        start, end, device = starts[index], ends[index], tensors[index].device
        if start == end:
            continue
        run, run_end = last.get(device, ([], 0))
        if start < run_end:
            run.append(index)
            if len(run) == 2:
                groups.append(run)
        else:
            run = [index]
        last[device] = run, max(end, run_end)
    return [[items[index] for index in sorted(group)] for group in groups]


def _addresses_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Returns where the elements of each tensor begin in memory, and where they end.

    Both are equal for tensors without elements in memory: empty ones, and those on meta.
    """
    starts = [tensor.data_ptr() for tensor in tensors]
    ends = [
        start and start + (each.nbytes if each.is_contiguous() else span(each.size(), each.stride()) * each.itemsize)
        for start, each in zip(starts, tensors, strict=True)
    ]
    return starts, ends


def clash(a: torch.Tensor, a_value: torch.Tensor, b: torch.Tensor, b_value: torch.Tensor) -> bool:
    """Whether a write of `b_value` to `b` changes an element of `a`, which overlaps it and holds `a_value`."""
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
