"""One conversion of a module: what becomes of each tensor, made and checked first, then put in place at once.

This is `torch.nn.Module._apply` in two phases. Modules with an `_apply` of their own (recurrent ones, sharded ones,
metrics) have it called, with torch's part replaced for this thread; they find their tensors converted when torch's
part returns, as they would in torch, and what they did is undone if the conversion fails.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import nn

from modelstate.convert.target import Target
from modelstate.errors import MemoryBudgetError, ModelStateError, PlacementError, SwapError, TransformError
from modelstate.place.holders import holders_of
from modelstate.place.identity import lost_references
from modelstate.place.swap import become, give_memory, point_to
from modelstate.plan.dtypes import device_name, short
from modelstate.plan.journal import Journal, Write
from modelstate.plan.memento import has_dispatch
from modelstate.plan.overlap import overlap
from modelstate.plan.placement import is_plain
from modelstate.plan.plan import Step, cast_text
from modelstate.plan.shield import uninterrupted
from modelstate.plan.slots import BUFFER, PARAMETER, Slot, modules_of, slots_of
from modelstate.plan.torch_private import can_set_data, payload_of, shards_in_use, storage_id

Apply = Callable[[torch.Tensor], torch.Tensor]
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
stock_apply: Any = nn.Module._apply


Way = tuple[str, str]
"""A placement, and why it was chosen."""
_DATA = "data", "other memory under the same object"
_SUBCLASS = "swap", "a tensor subclass: its payload has to change with it"
_LAYOUT = "swap", "a layout that has no data pointer to be changed"
_MEMORY = "swap", "has no memory, or will have none"
_CORE = "swap", "torch cannot change what it points to"


Row = tuple[tuple[str, ...], str, Way, Any, torch.dtype, torch.dtype, torch.device, int]
"""Names, kind, way, shape, old and new dtype, device, and bytes."""


def _way(tensor: torch.Tensor, value: torch.Tensor) -> Way:
    """The cheapest placement of a new value that keeps every reference."""
    if has_dispatch(tensor) or has_dispatch(value):
        return _SUBCLASS
    if tensor.layout is not torch.strided or value.layout is not torch.strided or tensor.is_nested or value.is_nested:
        return _LAYOUT
    if torch.nn.parameter.is_lazy(tensor):
        return _DATA
    if tensor.is_meta is not value.is_meta:
        return _MEMORY
    if tensor.is_inference() or _stops_training(tensor, value) or not can_set_data(tensor, value):
        return _CORE
    return _DATA


def _stops_training(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor that needs a gradient becomes one that cannot have any."""
    return tensor.requires_grad and not (value.is_floating_point() or value.is_complex())


class Change(Write):
    """A tensor that becomes another one: the write that does it."""

    __slots__ = ("grad", "has_grad", "row", "slot", "waits", "way")

    def __init__(
        self,
        slot: Slot,
        value: torch.Tensor,
        way: Way,
        has_grad: bool,
        grad: torch.Tensor | None = None,
        waits: bool = False,
        row: Row | None = None,
    ) -> None:
        self.target, self.value, self.done = slot.tensor, value, False
        self.slot, self.way = slot, way
        self.has_grad, self.grad = has_grad, grad
        """What the gradient becomes; None where there is none, or where it has no place any more."""
        self.waits = waits
        """Whether the value is a cast that is made when it is time; until then `value` has its dtype only."""
        self.row: Row = row or _row(slot, value, way)

    @property
    def name(self) -> str:
        return self.slot.names[0]

    def run(self, journal: Journal | None) -> None:
        tensor, value, grad = self.target, self.value, self.grad
        if self.waits:
            value = tensor.to(self.value.dtype)
            if self.has_grad and tensor.grad is not None:
                grad = tensor.grad.to(self.value.dtype)
        if self.way is _DATA:
            if journal is None and not self.has_grad:
                tensor.data = value
                return
            undo = point_to(tensor, value, grad, undoable=journal is not None)
        elif is_plain(tensor) and is_plain(value):
            undo = give_memory(tensor, value)
        else:
            undo = become(tensor, value, grad)
        if journal is not None:
            journal.undo(undo)


def _row(slot: Slot, value: torch.Tensor, way: Way) -> Row:
    """What has to be known of a change before it is carried out, to describe it afterwards. It holds no tensor."""
    tensor = slot.tensor
    shape: Any = () if torch.nn.parameter.is_lazy(tensor) or tensor.is_nested else tensor.shape
    return slot.names, slot.kind, way, shape, tensor.dtype, value.dtype, value.device, nbytes_of(tensor)


def step_of(row: Row) -> Step:
    """The description of a change."""
    (name, *ties), kind, (placement, why), shape, old, new, device, nbytes = row
    return Step(
        name,
        kind,
        "",
        placement,
        why,
        tuple(shape),
        short(new),
        cast_text(old, new),
        device_name(device),
        nbytes,
        False,
        tuple(ties),
    )


class Conversion:
    """The conversion of a module and everything below it."""

    def __init__(self, root: nn.Module, target: Target, max_memory_bytes: int | None = None) -> None:
        self.root, self.target = root, target
        self.journal = Journal(root)
        self.changes: list[Change] = []
        self.notes: list[str] = []
        self.modules = modules_of(root)
        self.slots = slots_of(root)
        self._objects = _registered(self.modules)
        self.peak_bytes = 0
        """The most memory that it takes on top of what the module has, at any time."""
        self._now = self._reserve = 0
        self._max_memory_bytes = max_memory_bytes
        self._recorded: list[tuple[Slot, Apply | None]] = []
        self._seen: set[int] = set()
        self._sources: dict[int, str] = {}
        self._parted: list[list[Slot]] = []

    @cached_property
    def _slot_of(self) -> dict[int, Slot]:
        return {id(slot.tensor): slot for slot in self.slots.tensors}

    @cached_property
    def _memory(self) -> dict[int, str]:
        """Whose memory is there already, by storage."""
        return {storage_id(part): slot.name for slot in self.slots.tensors for part in _parts(slot.tensor)}

    @cached_property
    def _prefixes(self) -> dict[int, str]:
        return {id(module): f"{path}." if path else "" for path, module in self.root.named_modules()}

    @cached_property
    def _ids(self) -> set[int]:
        return {id(module) for module in self.modules}

    def has(self, module: nn.Module) -> bool:
        """Whether a module is the root, or below it."""
        return id(module) in self._ids

    # Phase one: every new tensor is made and checked.

    def record(self, recurse: bool = True) -> None:
        """Makes every new tensor."""
        with _active(self), torch.inference_mode(False), torch.no_grad():
            if recurse and not overriding(self.modules):
                self._recorded = [(slot, None) for slot in self.slots.tensors]
            elif recurse:
                self.visit(self.root, None)
            else:
                self._base(self.root, None, False)
            self._make()
        self.check(self.changes)

    def fn(self, tensor: torch.Tensor) -> torch.Tensor:
        """What modules with an `_apply` of their own are given to apply to what they hold besides their slots."""
        slot = self._slot_of.get(id(tensor))
        return self.target.make(slot.name if slot else "", tensor)

    def visit(self, module: nn.Module, fn: Apply | None) -> None:
        """Converts a module, by its own `_apply` where it has one."""
        if overriding([module]):
            own_apply: Any = module._apply
            with self.journal.model_code():
                own_apply(fn or self.fn)
        else:
            self._base(module, fn, True)

    def base(self, module: nn.Module, fn: Apply, recurse: bool) -> None:
        """torch's part, when a module's own `_apply` calls it: it sees its tensors converted afterwards."""
        with self.journal.our_code(), torch.inference_mode(False), torch.no_grad():
            first, waiting = len(self.changes), self._recorded
            self._recorded = []
            self._base(module, None if fn == self.fn else fn, recurse)
            self._make()
            self._recorded = waiting
            made = self.changes[first:]
            if made and shards_in_use(module):
                raise _sharded(module, made)
            self.check(made)
            self._run(made)

    def _base(self, module: nn.Module, fn: Apply | None, recurse: bool) -> None:
        if recurse:
            for child in module.children():
                self.visit(child, fn)
        for kind, group in ((PARAMETER, module._parameters), (BUFFER, module._buffers)):
            for name, tensor in group.items():
                if tensor is not None and id(tensor) not in self._seen:
                    self._seen.add(id(tensor))
                    slot = self._slot_of.get(id(tensor))
                    if slot is None:  # the module's own code has put it there
                        slot = Slot((self._prefixes.get(id(module), "") + name,), kind, tensor)
                        self._slot_of[id(tensor)] = slot
                    self._recorded.append((slot, fn))

    def _make(self) -> None:
        """Makes the new tensors of everything that has been recorded."""
        plain: list[Slot] = []
        others: list[tuple[Slot, Apply | None]] = []
        for slot, fn in self._recorded:
            if fn is None and is_plain(slot.tensor) and not slot.tensor.is_nested:
                plain.append(slot)
            else:
                others.append((slot, fn))
        if self.target.keeps_sharing:
            for group in sharing(plain):
                self._make_together(group)
                together = {id(slot.tensor) for slot in group}
                plain = [slot for slot in plain if id(slot.tensor) not in together]
        else:
            self._parted += sharing(plain)
        later: dict[torch.dtype, torch.Tensor | None] = {}
        for slot in plain:
            tensor = slot.tensor
            grad = tensor.grad if tensor.is_leaf else None
            dtype = tensor.dtype
            if not tensor.is_cpu or tensor.is_inference() or (grad is not None and not _can_wait(grad, dtype)):
                self._make_one(slot, None, True)
                continue
            stand_in = later[dtype] if dtype in later else later.setdefault(dtype, self.target.later(dtype))
            if stand_in is None:
                self._make_one(slot, None, True)
            elif stand_in.dtype != dtype:
                self._put_off(slot, grad, stand_in)
        for slot, fn in others:
            self._make_one(slot, fn, False)

    def _make_one(self, slot: Slot, fn: Apply | None, plain: bool) -> None:
        tensor, target = slot.tensor, self.target
        value = target.make(slot.names[0], tensor) if fn is None else fn(tensor)
        if value is tensor:
            return
        old_grad = grad = tensor.grad if tensor.is_leaf else None
        if target.by_user:
            _check_shape(slot.name, tensor, value)
            self._check_alone(slot, value)
            value = value.detach() if not value.is_leaf else value
        if grad is not None:
            grad = target.grad(grad, value) if fn is None else fn(grad)
            if grad is None:
                self.notes.append(f"{slot.name}: its gradient is dropped, for it does not fit any more")
        simple = plain and not target.by_user and can_set_data(tensor, value) and not tensor.is_inference()
        way = _DATA if simple else _way(tensor, value)
        if way is _SUBCLASS and not target.by_user and (value.dtype, value.device) == (tensor.dtype, tensor.device):
            self.notes.append(f"{slot.name} stays {short(tensor.dtype)}: {type(tensor).__name__} decides that")
        self._add(Change(slot, value, way, old_grad is not None, grad))

    def _put_off(self, slot: Slot, grad: torch.Tensor | None, stand_in: torch.Tensor) -> None:
        """Leaves a cast that is certain to succeed to the end, where the old memory can go at once."""
        tensor, new_dtype = slot.tensor, stand_in.dtype
        nbytes = tensor.nbytes
        row: Row = slot.names, slot.kind, _DATA, tensor.shape, tensor.dtype, new_dtype, stand_in.device, nbytes
        change = Change(slot, stand_in, _DATA, grad is not None, None, True, row)
        self.changes.append(change)
        self.journal.add(change)
        old = nbytes if grad is None else nbytes + grad.nbytes
        new = old // tensor.itemsize * new_dtype.itemsize
        self._reserve += new
        self.peak_bytes = max(self.peak_bytes, self._now + new)
        self._now += new - old

    def _check_alone(self, slot: Slot, value: torch.Tensor) -> None:
        """Two tensors that are not tied must not be made to share memory."""
        own = set(map(storage_id, _parts(slot.tensor)))
        for key in [id(value), *(storage_id(part) for part in _parts(value) if not part.is_meta and part.numel())]:
            if not key:
                continue
            other = self._sources.setdefault(key, slot.name)
            if key not in own:
                other = self._memory.get(key, other)
            if other != slot.name:
                raise TransformError(
                    "the function returned the same tensor, or the same memory, for two names",
                    where=f"{other} and {slot.name}",
                    expected="a tensor of its own for each",
                    remedy="return a clone, or tie the two in the module",
                )

    def _add(self, change: Change) -> None:
        self.changes.append(change)
        self.journal.add(change)
        self.spend(nbytes_of(change.value) + (nbytes_of(change.grad) if change.grad is not None else 0))

    def spend(self, nbytes: int) -> None:
        """Counts memory for something that is there beside the old all the time. Raises `MemoryBudgetError`."""
        self._now += nbytes
        self.peak_bytes += nbytes
        if self._max_memory_bytes is not None and self.peak_bytes > self._max_memory_bytes:
            raise MemoryBudgetError(
                "the conversion needs more memory than it was given, for new tensors beside the old ones; "
                "nothing has been changed",
                expected=f"at most {self._max_memory_bytes} bytes",
                found=f"{self.peak_bytes} bytes, or more",
                remedy="convert the parts of the module one after the other",
            )

    def _make_together(self, group: Sequence[Slot]) -> None:
        """Tensors that show common memory go on doing so."""
        tensors = [slot.tensor for slot in group]
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            if all(self.target.make(slot.name, slot.tensor) is slot.tensor for slot in group):
                return
            raise PlacementError(
                "tensors that show the same memory as different dtypes cannot be converted together",
                where=" and ".join(slot.name for slot in group),
                found=", ".join(short(tensor.dtype) for tensor in tensors),
                remedy="give each memory of its own first",
            )
        start = min(tensor.storage_offset() for tensor in tensors)
        end = max(tensor.storage_offset() + _span(tensor) for tensor in tensors)
        flat = tensors[0].detach().as_strided((end - start,), (1,), start)
        new = self.target.make(group[0].name, flat)
        if new is flat:
            return
        for slot in group:
            tensor = slot.tensor
            value = new.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - start).detach()
            old_grad = tensor.grad if tensor.is_leaf else None
            grad = self.target.grad(old_grad, value) if old_grad is not None else None
            way = _way(tensor, value)
            self._add(Change(slot, value, way, old_grad is not None, grad))

    # Between the phases.

    def check(self, changes: Sequence[Change]) -> None:
        """Raises `SwapError` for tensors that somebody would go on with as they were, and `MemoryBudgetError`."""
        self.spend(0)
        error = self._refusal(changes)
        if error is not None:
            raise error

    def _refusal(self, changes: Sequence[Change]) -> SwapError | None:
        """The error, returned so that no frame in its traceback keeps the holders alive."""
        holders = holders_of(change.target for change in changes if not change.done)
        found: list[tuple[Change, list[str]]] = []
        for change in changes if holders else ():
            held = holders.get(id(change.target))
            if held is None:
                continue
            texts = held.of_the_graph() if change.way is _DATA else held.all()
            if texts:
                found.append((change, texts))
            elif held.views:
                self.notes.append(f"{change.name}: views of it that were taken before keep the old memory")
        if not found:
            return None
        names = ", ".join(change.name for change, _ in found[:4]) + (", ..." if len(found) > 4 else "")
        many = f"{len(found)} tensors are" if len(found) > 1 else "the tensor is"
        return SwapError(
            f"{many} held by somebody who would go on with what was there before; nothing has been changed",
            where=names,
            expected="tensors that only Python refers to",
            found="; ".join(dict.fromkeys(text for _, texts in found[:4] for text in texts)),
            remedy=holders[id(found[0][0].target)].remedy,
        )

    # Phase two.

    def commit(self, *last: Callable[[], None]) -> None:
        """Puts everything in its place: first what may fail and can be undone, then the rest, uninterrupted."""
        self._run([change for change in self.changes if not change.waits])
        self._try_memory()
        with torch.inference_mode(False), torch.no_grad():
            self.journal.commit(*last)

    def _try_memory(self) -> None:
        """Takes as much memory as all that has been put off needs, and gives it back untouched: it is there."""
        if self._reserve:
            try:
                torch.empty(self._reserve, dtype=torch.uint8, device="cpu")
            except RuntimeError as error:
                raise MemoryBudgetError(
                    "the system has no memory for the new tensors; nothing has been changed",
                    expected=f"{self._reserve} bytes",
                    found=error,
                    remedy="convert the parts of the module one after the other",
                ) from error

    def _run(self, changes: Iterable[Change]) -> None:
        """Carries changes out, able to undo them; an interrupt waits until it is known how."""
        with uninterrupted():
            for change in changes:
                if not change.done:
                    _run(change, self.journal)

    def references_lost(self) -> tuple[str, ...]:
        """What is no longer the object that it was, by its names."""
        now = _registered(modules_of(self.root) if self.journal.armed else self.modules)
        same = len(now) == len(self._objects) and all(map(is_, now, self._objects))
        changed = {id(change.target) for change in self.changes} if self._parted else set()
        parted = tuple(
            f"{' and '.join(slot.name for slot in group)} no longer share memory"
            for group in self._parted
            if any(id(slot.tensor) in changed for slot in group)
        )
        return parted + (() if same else lost_references(self.slots, self.root))

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


def _sharded(module: nn.Module, made: Sequence[Change]) -> SwapError:
    return SwapError(
        "FSDP has taken note of what the parameters are, and would go on with that; nothing has been changed",
        where=", ".join(change.name for change in made[:4]),
        found=type(module).__name__,
        remedy="convert before fully_shard, or before the first forward pass; for a dtype to compute in, use its "
        "MixedPrecisionPolicy",
    )


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the values of one."""
    if torch.nn.parameter.is_lazy(tensor):
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor.detach()._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return [tensor.detach().values()]
    return payload_of(tensor)


def _can_wait(grad: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the cast of a gradient is as certain to succeed as that of its plain tensor."""
    plain = is_plain(grad) and not grad.is_nested and grad.is_cpu and not grad.is_inference()
    return plain and grad.dtype == dtype


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


def sharing(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Groups of slots with plain tensors that show common elements of one storage."""
    starts = [slot.tensor.data_ptr() for slot in slots]
    groups: list[list[Slot]] = []
    run: list[Slot] = []
    end = 0
    for index in sorted(range(len(slots)), key=starts.__getitem__):
        start, slot = starts[index], slots[index]
        nbytes = _span_bytes(slot.tensor) if start else 0
        if not nbytes:  # empty, or on meta
            continue
        if start < end and any(overlap(slot.tensor, one.tensor) for one in run):
            run.append(slot)
        else:
            run = [slot]
            groups.append(run)
        end = max(end, start + nbytes)
    return [group for group in groups if len(group) > 1]


def _span_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.is_contiguous() else _span(tensor) * tensor.itemsize


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to behind the last."""
    if tensor.is_contiguous():
        return tensor.numel()
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0


def _registered(modules: Iterable[nn.Module]) -> list[torch.Tensor | None]:
    return [one for module in modules for one in (*module._parameters.values(), *module._buffers.values())]


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, or of its parts' where it is made of several."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return 0 if tensor.is_meta else tensor.nbytes
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return 0
    return sum(part.numel() * part.itemsize for part in payload_of(tensor))


# torch's own part, replaced while a conversion runs.

_running = threading.local()


def overriding(modules: Iterable[nn.Module]) -> bool:
    """Whether any of the modules converts itself in a way of its own."""
    torchs = nn.Module._apply, stock_apply
    classes: set[Any] = set(map(type, modules))
    return any(cls._apply not in torchs for cls in classes) or any("_apply" in module.__dict__ for module in modules)


def running(module: nn.Module) -> "Conversion | None":
    """The conversion in this thread that a module belongs to."""
    stack: list[Conversion] = getattr(_running, "stack", [])
    return stack[-1] if stack and stack[-1].has(module) else None


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
