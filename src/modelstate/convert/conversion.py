"""One conversion of a module: what becomes of each tensor, made and checked first, then put in place at once.

This is `torch.nn.Module._apply` in two phases. Modules with an `_apply` of their own (recurrent ones, sharded ones,
metrics) have it called, with torch's part replaced for this thread; they find their tensors converted when torch's
part returns, as they would in torch, and what they did is undone if the conversion fails.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from modelstate.convert.target import Target
from modelstate.errors import MemoryBudgetError, ModelStateError, PlacementError, SwapError, TransformError
from modelstate.place.holders import holders_of
from modelstate.place.swap import become, give_memory, point_to
from modelstate.plan.dtypes import device_name, short
from modelstate.plan.journal import Journal, Write
from modelstate.plan.memento import has_dispatch
from modelstate.plan.overlap import overlap
from modelstate.plan.placement import is_plain
from modelstate.plan.plan import Step, cast_text
from modelstate.plan.slots import Slot, slots_of
from modelstate.plan.torch_private import can_set_data, payload_of, storage_id

Apply = Callable[[torch.Tensor], torch.Tensor]
stock_apply: Any = nn.Module._apply


class Change(Write):
    """A tensor that becomes another one: the write that does it."""

    __slots__ = ("fills", "grad", "how", "name", "step", "why")

    def __init__(self, slot: Slot, value: torch.Tensor, grad: torch.Tensor | None, fills: bool) -> None:
        super().__init__(slot.tensor, value)
        self.name = slot.name
        self.grad = grad
        self.fills = fills
        """Whether `value` is memory that the tensor has yet to be copied to."""
        self.how, self.why = _way(slot.tensor, value)
        self.step = self._describe(slot)

    def run(self, journal: Journal | None) -> None:
        tensor, value = self.target, self.value
        with torch.no_grad():
            if self.fills:
                value.copy_(tensor)
                if self.grad is not None and tensor.grad is not None:
                    self.grad.copy_(tensor.grad)
            if self.how == "data":
                undo = point_to(tensor, value, self.grad)
            elif is_plain(tensor) and is_plain(value):
                undo = give_memory(tensor, value)
            else:
                undo = become(tensor, value, self.grad)
        if journal is not None:
            journal.undo(undo)

    def _describe(self, slot: Slot) -> Step:
        tensor, value = slot.tensor, self.value
        return Step(
            slot.name,
            slot.kind,
            "",
            self.how,
            self.why,
            () if torch.nn.parameter.is_lazy(tensor) else tuple(tensor.shape),
            short(value.dtype),
            cast_text(tensor.dtype, value.dtype),
            device_name(value.device),
            nbytes_of(tensor),
            False,
            slot.names[1:],
        )


def _way(tensor: torch.Tensor, value: torch.Tensor) -> tuple[str, str]:
    """The placement of a new value, and why: the cheapest that keeps every reference."""
    if has_dispatch(tensor) or has_dispatch(value):
        return "swap", "a tensor subclass: its payload has to change with it"
    if tensor.layout is not torch.strided or value.layout is not torch.strided or tensor.is_nested or value.is_nested:
        return "swap", "a layout that has no data pointer to be changed"
    if tensor.is_meta is not value.is_meta:
        return "swap", "has no memory, or will have none"
    if tensor.is_inference() or not can_set_data(tensor, value):
        return "swap", "torch cannot change what it points to"
    return "data", "other memory under the same object"


class Conversion:
    """The conversion of a module and everything below it."""

    def __init__(self, root: nn.Module, target: Target, max_memory_bytes: int | None = None) -> None:
        self.root, self.target = root, target
        self.journal = Journal(root)
        self.changes: list[Change] = []
        self.notes: list[str] = []
        self.slots = slots_of(root)
        self.extra_bytes = 0
        """The most memory that it takes on top of what the module has, at any time."""
        self._max_memory_bytes = max_memory_bytes
        self._slot_of = {id(slot.tensor): slot for slot in self.slots.tensors}
        self._modules = {id(module) for module in root.modules()}
        self._recorded: list[tuple[Slot, Apply | None]] = []
        self._seen: set[int] = set()
        self._sources: dict[int, tuple[str, int]] = {}

    # Phase one: every new tensor is made and checked.

    def record(self, recurse: bool = True) -> None:
        """Makes every new tensor."""
        with _active(self):
            if overrides_apply(self.root) and recurse:
                self.visit(self.root, None)
            else:
                self._base(self.root, None, recurse)
            self._make()
        self.check(self.changes)

    def fn(self, tensor: torch.Tensor) -> torch.Tensor:
        """What modules with an `_apply` of their own are given to apply to what they hold besides their slots."""
        slot = self._slot_of.get(id(tensor))
        return self.target.make(slot.name if slot else "", tensor)

    def visit(self, module: nn.Module, fn: Apply | None) -> None:
        """Converts a module, by its own `_apply` where it has one."""
        if overrides_apply(module):
            own_apply: Any = module._apply
            with self.journal.model_code():
                own_apply(fn or self.fn)
        else:
            self._base(module, fn, True)

    def base(self, module: nn.Module, fn: Apply, recurse: bool) -> None:
        """torch's part, when a module's own `_apply` calls it: it sees its tensors converted afterwards."""
        with self.journal.our_code():
            first, waiting = len(self.changes), self._recorded
            self._recorded = []
            self._base(module, None if fn == self.fn else fn, recurse)
            self._make()
            self._recorded = waiting
            made = self.changes[first:]
            self.check(made)
            for change in made:
                if not change.done:
                    _run(change, self.journal)

    def _base(self, module: nn.Module, fn: Apply | None, recurse: bool) -> None:
        if recurse:
            for child in module.children():
                self.visit(child, fn)
        for group in (module._parameters, module._buffers):
            for tensor in group.values():
                if tensor is not None and id(tensor) not in self._seen:
                    self._seen.add(id(tensor))
                    slot = self._slot_of.get(id(tensor)) or Slot(("",), "", tensor)
                    self._recorded.append((slot, fn))

    def _make(self) -> None:
        """Makes the new tensors of everything that has been recorded."""
        together, alone = self._by_memory() if self._recorded else ([], [])
        for group in together:
            self._make_together(group)
        for slot, fn in alone:
            self._make_one(slot, fn)

    def _make_one(self, slot: Slot, fn: Apply | None) -> None:
        tensor = slot.tensor
        grad = tensor.grad if tensor.is_leaf else None
        room = self.target.room(tensor) if fn is None else None
        if room is tensor:
            return
        grad_room = self.target.room(grad) if room is not None and grad is not None else None
        if room is not None and (grad is None or (grad_room is not None and grad_room is not grad)):
            self._add(slot, room, grad_room, True)
            return
        with torch.no_grad():
            value = self.target.make(slot.name, tensor) if fn is None else fn(tensor)
            if value is tensor:
                return
            _check_shape(slot.name, tensor, value)
            value = value.detach() if value.requires_grad and not value.is_leaf else value
            new_grad = None
            if grad is not None:
                new_grad = self.target.grad(grad, value) if fn is None else fn(grad)
                if new_grad is None:
                    self.notes.append(f"{slot.name}: its gradient is dropped, for it does not fit any more")
        self._check_alone(slot, value)
        self._add(slot, value, new_grad, False)

    def _check_alone(self, slot: Slot, value: torch.Tensor) -> None:
        """Two tensors that are not tied must not be made to share memory."""
        for part in payload_of(value):
            key = storage_id(part)
            if not key or part.is_meta or not part.numel():
                continue
            if key in self._sources:
                raise TransformError(
                    "the function returned the same tensor, or the same memory, for two names",
                    where=f"{self._sources[key][0]} and {slot.name}",
                    expected="a tensor of its own for each",
                    remedy="return a clone, or tie the two in the module",
                )
            self._sources[key] = slot.name, id(value)

    def _add(self, slot: Slot, value: torch.Tensor, grad: torch.Tensor | None, fills: bool) -> None:
        change = Change(slot, value, grad, fills)
        self.changes.append(change)
        self.journal.add(change)
        if not fills:
            self.extra_bytes += nbytes_of(value) + (nbytes_of(grad) if grad is not None else 0)
            self._check_budget(self.extra_bytes)

    def _check_budget(self, needed: int) -> None:
        if self._max_memory_bytes is not None and needed > self._max_memory_bytes:
            raise MemoryBudgetError(
                "the conversion needs more memory than it was given, for new tensors beside the old ones; "
                "nothing has been changed",
                expected=f"at most {self._max_memory_bytes} bytes",
                found=f"{needed} bytes, or more",
                remedy="convert the parts of the module one after the other",
            )

    # Tensors that show common memory go on doing so.

    def _by_memory(self) -> tuple[list[list[Slot]], list[tuple[Slot, Apply | None]]]:
        by_storage: dict[int, list[Slot]] = {}
        for slot, fn in self._recorded:
            if fn is None and is_plain(slot.tensor) and not slot.tensor.is_meta:
                by_storage.setdefault(storage_id(slot.tensor), []).append(slot)
        groups = [group for group in by_storage.values() if len(group) > 1 and self.target.keeps_sharing]
        together = [clique for group in groups for clique in _overlapping(group)]
        taken = {id(slot.tensor) for clique in together for slot in clique}
        return together, [(slot, fn) for slot, fn in self._recorded if id(slot.tensor) not in taken]

    def _make_together(self, group: Sequence[Slot]) -> None:
        tensors = [slot.tensor for slot in group]
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            if all(self.target.make("", tensor[:0] if tensor.dim() else tensor) is tensor for tensor in tensors):
                return
            raise PlacementError(
                "tensors that show the same memory as different dtypes cannot be converted together",
                where=" and ".join(slot.name for slot in group),
                found=", ".join(short(tensor.dtype) for tensor in tensors),
                remedy="give each memory of its own first",
            )
        start = min(tensor.storage_offset() for tensor in tensors)
        end = max(_end(tensor) for tensor in tensors)
        with torch.no_grad():
            flat = tensors[0].detach().as_strided((end - start,), (1,), start)
            new = self.target.make(group[0].name, flat)
            if new is flat:
                return
            for slot in group:
                tensor = slot.tensor
                value = new.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - start)
                grad = tensor.grad if tensor.is_leaf else None
                self._add(slot, value.detach(), self.target.grad(grad, value) if grad is not None else None, False)

    # Between the phases.

    def check(self, changes: Sequence[Change]) -> None:
        """Raises `SwapError` for tensors that somebody would go on with as they were, and `MemoryBudgetError`."""
        self._check_budget(self._peak())
        waiting = [change for change in changes if not change.done]
        holders = holders_of(change.target for change in waiting)
        found: list[tuple[Change, list[str]]] = []
        for change in waiting:
            held = holders.get(id(change.target))
            if held is None:
                continue
            texts = held.all() if change.how == "swap" else held.of_the_graph()
            if texts:
                found.append((change, texts))
            elif held.views:
                self.notes.append(f"{change.name}: views of it that were taken before keep the old memory")
        if found:
            first = holders[id(found[0][0].target)]
            raise SwapError(
                f"{len(found)} tensors are held by somebody who would go on with what they were; "
                "nothing has been changed",
                where=", ".join(change.name for change, _ in found[:4]) + (", ..." if len(found) > 4 else ""),
                expected="tensors that only Python refers to",
                found="; ".join(dict.fromkeys(text for _, texts in found[:4] for text in texts)),
                remedy=first.remedy,
            )

    def _peak(self) -> int:
        """What is made beforehand, and the most that the copying adds, which frees the old memory as it goes."""
        now = self.extra_bytes
        most = now
        for change in self.changes:
            if change.fills and not change.done:
                grad, old_grad = change.grad, change.target.grad
                now += nbytes_of(change.value) + (nbytes_of(grad) if grad is not None else 0)
                most = max(most, now)
                now -= nbytes_of(change.target) + (nbytes_of(old_grad) if old_grad is not None else 0)
        self.peak_bytes = most
        return most

    # Phase two.

    def commit(self, *last: Callable[[], None]) -> None:
        """Puts everything in its place: first what may fail and can be undone, then the rest, uninterrupted."""
        for change in self.changes:
            if not change.done and change.how == "swap":
                _run(change, self.journal)
        self.journal.commit(*last)

    def rollback(self) -> None:
        """Makes everything what it was."""
        self.journal.rollback()


def _run(change: Change, journal: Journal) -> None:
    try:
        change.run(journal)
    except ModelStateError:
        raise
    except (RuntimeError, TypeError) as error:
        raise SwapError(
            "torch cannot put the new tensor in the place of the old one; nothing has been changed",
            where=change.name,
            expected=f"something that a {type(change.target).__name__} can become",
            found=f"{type(change.value).__name__}, {short(change.value.dtype)}: {error}",
            remedy="replace the parameter by hand, and build the optimizer afterwards",
        ) from error
    change.done = True


def _check_shape(name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_nested or value.is_nested:
        return
    if tensor.shape != value.shape:
        raise TransformError(
            "the function returned a tensor of another shape; nothing has been changed",
            where=name,
            expected=str(tuple(tensor.shape)),
            found=str(tuple(value.shape)),
            remedy="build the module with the new shape, and load the values into it with transform=",
        )


def _overlapping(group: Sequence[Slot]) -> Iterator[list[Slot]]:
    """The parts of a group with one storage that show common elements of it."""
    cliques: list[list[Slot]] = []
    for slot in group:
        touching = [clique for clique in cliques if any(overlap(slot.tensor, one.tensor) for one in clique)]
        cliques = [clique for clique in cliques if clique not in touching]
        cliques.append([*(one for clique in touching for one in clique), slot])
    return (clique for clique in cliques if len(clique) > 1)


def _end(tensor: torch.Tensor) -> int:
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + (1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, or of its parts' where it is made of several."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return 0
    return sum(part.numel() * part.itemsize for part in payload_of(tensor))


# torch's own part, replaced while a conversion runs.

_running = threading.local()
_lock = threading.Lock()


def overrides_apply(module: nn.Module) -> bool:
    """Whether a module converts itself in a way of its own."""
    function = getattr(module._apply, "__func__", module._apply)
    return function is not nn.Module._apply and function is not stock_apply


def running(module: nn.Module) -> "Conversion | None":
    """The conversion in this thread that a module belongs to."""
    stack: list[Conversion] = getattr(_running, "stack", [])
    return stack[-1] if stack and id(module) in stack[-1]._modules else None


@contextmanager
def _active(conversion: Conversion) -> Iterator[None]:
    stack: list[Conversion] = getattr(_running, "stack", [])
    _running.stack = stack
    depth = len(stack)
    stack.append(conversion)
    try:
        yield
    finally:
        del stack[depth:]


def dispatch(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """What stands in the place of torch's `_apply`: the running conversion's part, else torch's own."""
    conversion = running(module)
    if conversion is None:
        stock_apply(module, fn, recurse)
    else:
        conversion.base(module, fn, recurse)
    return module
