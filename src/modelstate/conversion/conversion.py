"""One conversion of a module: what becomes of each tensor, made and checked first, then put in place at once.

This is `torch.nn.Module._apply` in two phases. Modules with an `_apply` of their own (recurrent ones, sharded ones,
metrics) have it called, with torch's part replaced for this thread; they find their tensors converted when torch's
part returns, as they would in torch, and what they did is undone if the conversion fails.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from modelstate.conversion.tensors import (
    DATA,
    GRADIENT,
    SUBCLASS,
    Change,
    Row,
    Target,
    Way,
    carry_out,
    is_referred_to,
    nbytes_of,
    object_of_its_own,
    of_its_own,
    parts_of,
    way_of,
)
from modelstate.errors import MemoryBudgetError, PlacementError, SwapError, TransformError
from modelstate.process import cached_attribute, deferred_signals
from modelstate.torch_compat.dtypes import Overflows, nonfinite, short
from modelstate.torch_compat.plain import has_its_memory, is_plain
from modelstate.torch_compat.private import (
    can_set_data,
    is_fake,
    is_faking,
    is_transforming,
    shards_in_use,
    storage_id,
    use_count,
)
from modelstate.transaction.journal import Journal
from modelstate.transaction.references import Holders, holders_of, lost_references
from modelstate.transaction.slots import BUFFER, PARAMETER, Slot, extent, modules_of, sharing, slots_of

Apply = Callable[[torch.Tensor], torch.Tensor]
stock_apply: Any = nn.Module._apply


class Conversion:
    """The conversion of a module and everything below it."""

    def __init__(self, root: nn.Module, target: Target, max_memory_bytes: int | None = None) -> None:
        if is_transforming():
            raise SwapError(
                "within a transform of torch.func a tensor stands for others, and a module cannot be converted",
                where=type(root).__name__,
                remedy="convert it before the transform",
            )
        self.root, self.target = root, target
        self.journal = Journal(root)
        self.changes: list[Change] = []
        self.notes: list[str] = []
        self.overflows = Overflows() if target.cause else None
        """Counts what becomes infinite or NaN."""
        self.modules = modules_of(root)
        self.slots = slots_of(root)
        if is_faking() and not all(is_fake(slot.tensor) for slot in self.slots.tensors):
            raise PlacementError(
                "within FakeTensorMode a conversion makes tensors without values; nothing has been changed",
                where=type(root).__name__,
                expected="tensors with memory, outside of FakeTensorMode; or a module that was made within it",
                found="a module whose tensors have values",
                remedy="convert it outside of the mode",
            )
        self._objects = _registered(self.modules)
        self.peak_bytes = 0
        """The most memory that it takes on top of what the module has, at any time."""
        self._now = self._reserve = 0
        self._max_memory_bytes = max_memory_bytes
        self._recorded: list[tuple[Slot, Apply | None]] = []
        self._seen: set[int] = set()
        self._sources: dict[int, str] = {}
        self._returned: list[torch.Tensor] = []
        """What functions have returned: no other tensor may get the identity or the memory of one that is gone."""
        self._grads: dict[int, torch.Tensor] = {}
        self._exchanged: set[int] = set()
        """By their ids, those of them that are exchanged with tensors as objects."""
        self._parted: list[list[Slot]] = []
        self._holders: dict[int, Holders] = {}
        """Who else holds the module's tensors, by their ids, once that has been looked for."""
        self._owners: dict[int, int] = {}
        """How many owners the tensors had then."""

    @cached_attribute
    def _slot_of(self) -> dict[int, Slot]:
        return {id(slot.tensor): slot for slot in self.slots.tensors}

    @cached_attribute
    def _memory(self) -> dict[int, str]:
        """Whose memory is there already, by storage."""
        return {storage_id(part): slot.name for slot in self.slots.tensors for part in parts_of(slot.tensor)}

    @cached_attribute
    def _prefixes(self) -> dict[int, str]:
        return {id(module): f"{path}." if path else "" for path, module in self.root.named_modules()}

    @cached_attribute
    def _ids(self) -> set[int]:
        return {id(module) for module in self.modules}

    def has(self, module: nn.Module) -> bool:
        """Whether a module is the root, or below it."""
        return id(module) in self._ids

    # Phase one: every new tensor is made and checked.

    def record(self, recurse: bool = True) -> None:
        """Makes every new tensor."""
        try:
            self._record(recurse)
        finally:
            self._returned.clear()
            self._holders, self._owners = {}, {}  # a traceback must not keep those alive that are to be dropped

    def _record(self, recurse: bool) -> None:
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
        if not self.target.by_user:
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
            if stand_in is None or not has_its_memory(tensor):
                self._make_one(slot, None, True)
            elif stand_in.dtype != dtype:
                self._put_off(slot, grad, stand_in)
        for slot, fn in others:
            self._make_one(slot, fn, False)

    def _make_one(self, slot: Slot, fn: Apply | None, plain: bool) -> None:
        tensor, target = slot.tensor, self.target
        value = target.make(slot.names[0], tensor) if fn is None else fn(tensor)
        if value is tensor:
            if not target.by_user:
                self._make_grad(slot, tensor, fn)
            return
        shared = is_referred_to(value)
        if target.by_user:
            _check_shape(slot.name, tensor, value)
            self._check_alone(slot, value)
            value = of_its_own(value)
        simple = plain and not target.by_user and is_plain(value) and can_set_data(tensor, value)
        if simple and not tensor.is_inference():
            way = DATA
        else:
            way = way_of(tensor, value)
            value = self._exchangeable(slot, value, way, shared)
        if way is SUBCLASS and not target.by_user and (value.dtype, value.device) == (tensor.dtype, tensor.device):
            self.notes.append(f"{slot.name} stays {short(tensor.dtype)}: {type(tensor).__name__} decides that")
        old_grad, grad = self._new_grad(slot, value, fn)
        self._add(Change(slot, value, way, old_grad, grad))

    def _exchangeable(self, slot: Slot, value: torch.Tensor, way: Way, shared: bool) -> torch.Tensor:
        """The value, checked, as an object that can be exchanged with the tensor where the way asks for that."""
        if is_fake(value) and not is_fake(slot.tensor):
            raise PlacementError(
                "the function returned a FakeTensor, which has no values; nothing has been changed",
                where=slot.name,
                expected="a tensor with memory, or one on the meta device",
                remedy="convert the module outside of FakeTensorMode",
            )
        if way is DATA or (is_plain(slot.tensor) and is_plain(value)):
            return value
        self._returned.append(value)  # the ids of those that are gone would be those of others
        if id(value) in self._exchanged or id(value) in self._slot_of:
            shared = True
        self._exchanged.add(id(value))
        return object_of_its_own(slot.name, slot.tensor, value, shared)

    def _make_grad(self, slot: Slot, value: torch.Tensor, fn: Apply | None) -> None:
        """Converts the gradient of a tensor that stays what it is, or that the function has changed in place."""
        old_grad, grad = self._new_grad(slot, value, fn)
        if old_grad is not None and grad is not old_grad:
            self._add(Change(slot, slot.tensor, GRADIENT, old_grad, grad))

    def _new_grad(
        self, slot: Slot, value: torch.Tensor, fn: Apply | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradient of a tensor that becomes `value`, and what the gradient becomes."""
        old = slot.tensor.grad if slot.tensor.is_leaf else None
        if old is None or id(old) in self._grads:  # it becomes what it becomes with the tensor that came first
            return old, old
        self._grads[id(old)] = old
        new = self.target.grad(old, value) if fn is None else fn(old)
        if new is None:
            self.notes.append(f"{slot.name}: its gradient is dropped, for it does not fit any more")
        return old, new

    def _put_off(self, slot: Slot, grad: torch.Tensor | None, stand_in: torch.Tensor) -> None:
        """Leaves a cast that is certain to succeed to the end, where the old memory can go at once."""
        tensor, new_dtype = slot.tensor, stand_in.dtype
        nbytes = tensor.nbytes
        row: Row = slot.names, slot.kind, DATA, tensor.shape, tensor.dtype, new_dtype, stand_in.device, nbytes
        change = Change(slot, stand_in, DATA, grad, None, True, row)
        change.overflows = self.overflows
        self.changes.append(change)
        self.journal.add(change)
        old = nbytes if grad is None else nbytes + grad.nbytes
        new = old // tensor.itemsize * new_dtype.itemsize
        self._reserve += new
        self.peak_bytes = max(self.peak_bytes, self._now + new)
        self._now += new - old

    def _check_alone(self, slot: Slot, value: torch.Tensor) -> None:
        """Two tensors that are not tied must not be made to share memory."""
        self._returned.append(value)
        own = set(map(storage_id, parts_of(slot.tensor)))
        for key in [id(value), *(storage_id(part) for part in parts_of(value) if not part.is_meta and part.numel())]:
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
        self._check_overflow(change)
        new = [] if change.way is GRADIENT else [change.value]
        self.spend(sum(map(nbytes_of, new if change.grad is None else [*new, change.grad])))

    def _check_overflow(self, change: Change) -> None:
        tensor, value = change.target, change.value
        if self.overflows is None or change.way is GRADIENT or not (is_plain(tensor) and is_plain(value)):
            return
        if tensor.is_nested or value.is_nested or value.is_meta or tensor.shape != value.shape:
            return
        if not self.target.by_user:
            self.overflows.check(change.name, tensor, value)
        elif not tensor.is_meta and has_its_memory(tensor) and has_its_memory(value):
            self.overflows.check_function(change.name, self.target.cause, value, partial(nonfinite, tensor))

    def spend(self, nbytes: int) -> None:
        """Counts memory for something that is there beside the old all the time. Raises `MemoryBudgetError`."""
        self._now += nbytes
        self.peak_bytes += nbytes
        self._check_budget()

    def _check_budget(self) -> None:
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
        extents = [extent(tensor) for tensor in tensors]
        start, end = min(one[0] for one in extents), max(one[1] for one in extents)
        flat = tensors[0].detach().as_strided((end - start,), (1,), start)
        new = self.target.make(group[0].name, flat)
        if new is flat:
            for slot in group:
                self._make_grad(slot, slot.tensor, None)
            return
        if not is_plain(new) or new.shape != flat.shape or not new.is_contiguous():
            self._parted.append(list(group))
            for slot in group:
                self._make_one(slot, None, True)
            return
        start -= int(new.storage_offset())
        for slot in group:
            tensor = slot.tensor
            value = new.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - start).detach()
            old_grad, grad = self._new_grad(slot, value, None)
            self._add(Change(slot, value, way_of(tensor, value), old_grad, grad))

    # Between the phases.

    def check(self, changes: Sequence[Change]) -> None:
        """Raises `SwapError` for tensors that somebody would go on with as they were, and `MemoryBudgetError`."""
        self._check_budget()
        error = self._refusal(changes)
        if error is not None:
            raise error

    def _refusal(self, changes: Sequence[Change]) -> SwapError | None:
        """The error, returned so that no frame in its traceback keeps the holders alive."""
        holders = self._holders_of([change for change in changes if not change.done and change.way is not GRADIENT])
        found: list[tuple[Change, list[str]]] = []
        for change in changes if holders else ():
            held = holders.get(id(change.target))
            if held is None or change.way is GRADIENT:
                continue
            texts = held.of_the_graph() if change.way is DATA else held.all()
            if texts and not (change.way is DATA and change.keeps_values):
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

    def _holders_of(self, changes: Sequence[Change]) -> dict[int, Holders]:
        """Who else holds the tensors of changes, by the ids of these. One search for all tensors of the module.

        The search looks at every object of the process. Modules with an `_apply` of their own are checked one by one,
        so what it has found for one of them is kept for the next, unless a tensor has got other owners since.
        """
        held = [change.target for change in changes if use_count(change.target) > 1]
        if any(self._owners.get(id(tensor)) != use_count(tensor) for tensor in held):
            tensors = {id(tensor): tensor for tensor in (*held, *(slot.tensor for slot in self.slots.tensors))}
            self._holders = holders_of(tensors.values())
            self._owners = {key: use_count(tensor) for key, tensor in tensors.items()}
        return {id(tensor): self._holders[id(tensor)] for tensor in held if id(tensor) in self._holders}

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
        with deferred_signals():
            for change in changes:
                if not change.done:
                    carry_out(change, self.journal)

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


def _sharded(module: nn.Module, made: Sequence[Change]) -> SwapError:
    return SwapError(
        "FSDP has taken note of what the parameters are, and would go on with that; nothing has been changed",
        where=", ".join(change.name for change in made[:4]),
        found=type(module).__name__,
        remedy="convert before fully_shard, or before the first forward pass; for a dtype to compute in, use its "
        "MixedPrecisionPolicy",
    )


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


def _registered(modules: Iterable[nn.Module]) -> list[torch.Tensor | None]:
    return [one for module in modules for one in (*module._parameters.values(), *module._buffers.values())]


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
