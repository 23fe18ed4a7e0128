"""The conversion of a module in two phases: make and check every new tensor, then put all of them in place at once.

The result is that of `torch.nn.Module._apply`. If a module overrides `_apply` (recurrent and sharded modules, metrics),
the override is called, and torch's part of `_apply` is replaced in this thread: when that part returns, the tensors of
the module are converted, as in torch. A conversion that fails undoes the changes of the override.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec
import torch
from torch import nn

from modelstate.conversion.tensors import (
    DATA,
    GRADIENT,
    SUBCLASS,
    Change,
    Target,
    nbytes_of,
    parts_of,
    placement_of,
    step,
    step_of,
    swappable,
)
from modelstate.errors import MemoryBudgetError, ModelStateError, PlacementError, TransformError
from modelstate.planning.plan import Step
from modelstate.process import ThreadValue, cached_attribute, deferred_signals
from modelstate.spec import span
from modelstate.text_format import listed
from modelstate.torch_compat.dtypes import Overflows, can_overflow, has_finite_sum, nonfinite, short
from modelstate.torch_compat.modules import (
    call_apply,
    computed_attributes,
    has_custom_apply,
    modules_of,
    own_buffers,
    own_parameters,
)
from modelstate.torch_compat.plain import has_its_memory, is_dense, is_fake, is_plain
from modelstate.torch_compat.private import (
    can_set_data,
    copy_each,
    flattened,
    shards_in_use,
    storage_id,
    storage_of,
    storage_owners,
    use_count,
)
from modelstate.transaction.references import Holder, Holders, described, holders_of, lost_references
from modelstate.transaction.slots import BUFFER, PARAMETER, Slot, sharing, slots_of
from modelstate.transaction.swap_tensors import point_to
from modelstate.transaction.transaction import Transaction

Apply = Callable[[torch.Tensor], torch.Tensor]

_BATCH_BYTES = 32 << 10
"""The bytes of the new tensors of a batch. They stay in a cache of the processor until they have been checked, and are
too few elements for torch to share them out to several threads, which would take longer than the cast."""


class Conversion:
    """The conversion of a module and everything below it.

    `record` makes and checks the new tensors, `commit` puts them in place.
    """

    def __init__(self, transaction: Transaction, target: Target, max_memory_bytes: int | None = None) -> None:
        root = transaction.root
        self.root, self.target = root, target
        self.transaction = transaction
        self.changes: list[Change] = []
        self._steps: list[Step] = []
        """A step for each of the changes."""
        self.notes: list[str] = []
        self.overflows = Overflows() if target.cause else None
        """Counts values that become infinite or NaN."""
        self.casts = _Casts(target, self.overflows)
        """What the commit casts, beside the changes."""
        self.modules = modules_of(root)
        self.slots = slots_of(root)
        self.runs_own_apply = any(map(has_custom_apply, self.modules))
        """Whether a module has an `_apply` of its own."""
        self._may_replace = self.runs_own_apply or target.is_user_function
        """Whether code that is not of this library runs, which may replace tensors of the module."""
        self.peak_bytes = 0
        """The most memory that the conversion takes at any time, on top of the module's own."""
        self._max_memory_bytes = max_memory_bytes
        self._seen: set[int] = set()
        self._sources: dict[int, str] = {}
        self._returned: list[torch.Tensor] = []
        """Keeps what functions returned alive, so that no other tensor gets the id or the memory of a dropped one."""
        self._grads: dict[int, torch.Tensor] = {}
        self._swapped: set[int] = set()
        """The ids of the returned tensors that are swapped with tensors of the module."""
        self._unshared: list[list[Slot]] = []
        """Groups of slots that shared memory, and may not share it afterwards."""

    @cached_attribute
    def _slot_of(self) -> dict[int, Slot]:
        return {id(slot.tensor): slot for slot in self.slots.tensors}

    @cached_attribute
    def _memory(self) -> dict[int, str]:
        """The names of the tensors that the module has, by storage."""
        return {storage_id(part): slot.name for slot in self.slots.tensors for part in parts_of(slot.tensor)}

    # Phase one: make and check every new tensor.

    def record(self, recurse: bool = True) -> None:
        """Makes and checks every new tensor; with `recurse` off, only those of the root itself."""
        try:
            with _running.replaced(self), torch.inference_mode(False), torch.no_grad():
                if not recurse:
                    slots = self._collected(self.root, None, False)
                elif self.runs_own_apply:
                    slots = self._visited(self.root, None)
                else:
                    slots = [(slot, None) for slot in self.slots.tensors]
                self._make_all(slots, self.casts)
            self._check(self.changes, self.casts.slots)
        finally:
            self._returned.clear()  # a traceback must not keep objects alive that are to be dropped

    def _visited(self, module: nn.Module, fn: Apply | None) -> list[tuple[Slot, Apply | None]]:
        """Returns the slots of a module. An `_apply` of its own is called, and converts its slots itself."""
        if not has_custom_apply(module):
            return self._collected(module, fn, True)
        with self.transaction.model_code():
            call_apply(module, fn or self._apply_target)
        return []

    def _apply_target(self, tensor: torch.Tensor) -> torch.Tensor:
        """The function that a module with an `_apply` of its own applies to tensors outside of its slots."""
        slot = self._slot_of.get(id(tensor))
        return self.target.make(slot.name if slot else "", tensor)

    def apply_stock_part(self, module: nn.Module, fn: Apply, recurse: bool) -> None:
        """Replaces torch's `_apply` when a module's own `_apply` calls it."""
        with self.transaction.library_code(), torch.inference_mode(False), torch.no_grad():
            slots = self._collected(module, None if fn == self._apply_target else fn, recurse)
            first = len(self.changes)
            self._make_all(slots)
            changes = self.changes[first:]
            if changes and shards_in_use(module):
                raise PlacementError(
                    "FSDP has recorded the parameters, and would keep using the old ones; nothing has been changed",
                    where=listed((change.name for change in changes), 4),
                    found=type(module).__name__,
                    remedy="convert before fully_shard, or before the first forward pass; for a dtype to compute in, "
                    "use its MixedPrecisionPolicy",
                )
            self._check(changes)
            self._run(changes)

    def _collected(self, module: nn.Module, fn: Apply | None, recurse: bool) -> list[tuple[Slot, Apply | None]]:
        """Returns the slots of a module, after those of its submodules, each with its function."""
        children = module.children() if recurse else ()
        slots = [slot for child in children for slot in self._visited(child, fn)]
        for kind, tensors in ((PARAMETER, own_parameters(module)), (BUFFER, own_buffers(module))):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in self._seen:
                    self._seen.add(id(tensor))
                    slot = self._slot_of.get(id(tensor))
                    if slot is None:  # the module's own code has registered it since
                        slot = self._slot_of[id(tensor)] = Slot((name,), kind, tensor)
                    slots.append((slot, fn))
        return slots

    def _make_all(self, slots: Sequence[tuple[Slot, Apply | None]], casts: _Casts | None = None) -> None:
        """Makes the new tensors of slots, except those that `casts` makes at the commit."""
        is_simple = [fn is None and is_plain(slot.tensor) and not slot.tensor.is_nested for slot, fn in slots]
        plain = [slot for (slot, _), simple in zip(slots, is_simple, strict=True) if simple]
        others = [row for row, simple in zip(slots, is_simple, strict=True) if not simple]
        if not self.target.is_user_function:
            groups = sharing(plain, [slot.tensor for slot in plain])
            for group in groups:
                self._make_together(group)
            together = {id(slot.tensor) for group in groups for slot in group}
            plain = [slot for slot in plain if id(slot.tensor) not in together]
        else:
            self._unshared += sharing(plain, [slot.tensor for slot in plain])
        if casts is not None:
            plain = casts.add(plain)
            self.spend(max(casts.peak_bytes, 0))
        for slot in plain:
            self._make_one(slot, None, True)
        for slot, fn in others:
            self._make_one(slot, fn, False)

    def _make_one(self, slot: Slot, fn: Apply | None, plain: bool) -> None:
        tensor, target = slot.tensor, self.target
        value = target.make(slot.name, tensor) if fn is None else fn(tensor)
        if value is tensor:
            if not target.is_user_function:
                self._add(slot, tensor, GRADIENT, fn)
            return
        of_one_variable = object()
        shared = sys.getrefcount(value) > sys.getrefcount(of_one_variable)
        if target.is_user_function:
            value = self._checked_result(slot, value)
        is_simple = plain and not target.is_user_function and is_plain(value) and not tensor.is_inference()
        placement = DATA if is_simple and can_set_data(tensor, value) else placement_of(tensor, value)
        value = self._swappable(slot, value, placement, shared)
        is_same = (value.dtype, value.device) == (tensor.dtype, tensor.device)
        if placement is SUBCLASS and is_same and not target.is_user_function:
            self.notes.append(f"{slot.name} stays {short(tensor.dtype)}: {type(tensor).__name__} decides that")
        self._add(slot, value, placement, fn)

    def _checked_result(self, slot: Slot, value: torch.Tensor) -> torch.Tensor:
        """Returns what a user's function returned for a slot, detached, in memory that no other tensor uses.

        Raises `TransformError` for another shape, and if two names that are not tied would share memory.
        """
        tensor = slot.tensor
        is_shapeless = torch.nn.parameter.is_lazy(tensor) or tensor.is_nested or value.is_nested
        if not is_shapeless and tensor.shape != value.shape:
            raise TransformError(
                "the function returned a tensor of another shape; nothing has been changed",
                where=slot.name,
                expected=str(tuple(tensor.shape)),
                found=str(tuple(value.shape)),
                remedy="build the module with the new shape, and load the values into it with transform=",
            )
        self._returned.append(value)
        own = set(map(storage_id, parts_of(tensor)))
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
        value = value if value.is_leaf else value.detach()
        if not is_plain(value) or value.is_nested or value.is_meta or (is_dense(value) and storage_owners(value) == 1):
            return value
        return value.clone(memory_format=torch.preserve_format if is_dense(value) else torch.contiguous_format)

    def _swappable(self, slot: Slot, value: torch.Tensor, placement: str, shared: bool) -> torch.Tensor:
        """Returns the value as an object that can be swapped with the tensor, if the placement needs that."""
        if is_fake(value) and not is_fake(slot.tensor):
            raise PlacementError(
                "the function returned a FakeTensor, which has no values; nothing has been changed",
                where=slot.name,
                expected="a tensor with memory, or one on the meta device",
                remedy="convert the module outside of FakeTensorMode",
            )
        if placement is DATA or (is_plain(slot.tensor) and is_plain(value)):
            return value
        self._returned.append(value)  # a later tensor must not get its id
        if id(value) in self._swapped or id(value) in self._slot_of:
            shared = True
        self._swapped.add(id(value))
        return swappable(slot.name, slot.tensor, value, shared)

    def _add(self, slot: Slot, value: torch.Tensor, placement: str, fn: Apply | None) -> None:
        """Adds the change of a slot, with that of its gradient. `GRADIENT` as placement changes only the gradient."""
        old_grad = grad = slot.tensor.grad if slot.tensor.is_leaf else None
        if old_grad is not None and id(old_grad) not in self._grads:
            # A shared gradient changes with the first of its tensors.
            self._grads[id(old_grad)] = old_grad
            grad = self.target.grad(old_grad, value) if fn is None else fn(old_grad)
            if grad is None:
                self.notes.append(f"{slot.name}: its gradient is dropped, because the new tensor cannot have it")
        if placement is GRADIENT and grad is old_grad:
            return
        change = Change(slot, value, placement, old_grad, grad)
        self.changes.append(change)
        self.transaction.add(change)
        if placement is not GRADIENT:
            self._steps.append(step_of(change))
            self._check_overflow(change)
            self.spend(nbytes_of(value))
        self.spend(0 if grad is None else nbytes_of(grad))

    def _check_overflow(self, change: Change) -> None:
        tensor, value = change.target, change.value
        if self.overflows is None or not (is_plain(tensor) and is_plain(value)):
            return
        if tensor.is_nested or value.is_nested or value.is_meta or tensor.shape != value.shape:
            return
        if not self.target.is_user_function:
            self.overflows.check(change.name, tensor, value)
        elif not tensor.is_meta and has_its_memory(tensor) and has_its_memory(value):
            self.overflows.check_function(change.name, self.target.cause, value, partial(nonfinite, tensor))

    def spend(self, nbytes: int) -> None:
        """Counts memory that is needed beside the old tensors until the end. Raises `MemoryBudgetError`."""
        self.peak_bytes += nbytes
        if self._max_memory_bytes is not None and self.peak_bytes > self._max_memory_bytes:
            raise MemoryBudgetError(
                "the conversion needs more memory than it was given, for new tensors beside the old ones; "
                "nothing has been changed",
                expected=f"at most {self._max_memory_bytes} bytes",
                found=f"{self.peak_bytes} bytes, or more",
                remedy="convert the parts of the module one after the other",
            )

    def _make_together(self, group: list[Slot]) -> None:
        """Converts tensors that share memory so that they still share it."""
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
        # By addresses, since tensors with storages of their own share memory where they wrap one NumPy array.
        itemsize, start = tensors[0].itemsize, min(tensor.data_ptr() for tensor in tensors)
        end = max(tensor.data_ptr() + span(tensor.size(), tensor.stride()) * itemsize for tensor in tensors)
        covering = next((tensor for tensor in tensors if _covers(tensor, start, end)), None)
        if covering is None or any((tensor.data_ptr() - start) % itemsize for tensor in tensors):
            self._make_apart(group)
            return
        first = (start - storage_of(covering).data_ptr()) // itemsize
        flat = covering.detach().as_strided(((end - start) // itemsize,), (1,), first)
        new = self.target.make(group[0].name, flat)
        if new is flat:
            for slot in group:
                self._add(slot, slot.tensor, GRADIENT, None)
            return
        if not is_plain(new) or new.shape != flat.shape or not new.is_contiguous():
            self._make_apart(group)
            return
        for slot in group:
            tensor = slot.tensor
            offset = (tensor.data_ptr() - start) // itemsize + int(new.storage_offset())
            value = new.as_strided(tensor.size(), tensor.stride(), offset).detach()
            self._add(slot, value, placement_of(tensor, value), None)

    def _make_apart(self, group: list[Slot]) -> None:
        """Converts tensors that share memory one by one, so that they share none afterwards."""
        self._unshared.append(group)
        for slot in group:
            self._make_one(slot, None, True)

    # Between the phases.

    def _check(self, changes: Sequence[Change], cast: Sequence[Slot] = ()) -> None:
        """Raises `PlacementError` if something would keep the old value of a tensor that changes or is cast."""
        error = self._refusal(changes, cast)
        if error is not None:
            raise error

    def _refusal(self, changes: Sequence[Change], cast: Sequence[Slot]) -> PlacementError | None:
        """Returns the error instead of raising it, so that no frame of its traceback keeps the holders alive."""
        waiting = [(change.slot, change) for change in changes if not change.done and change.placement is not GRADIENT]
        rows: list[tuple[Slot, Change | None]] = [*waiting, *((slot, None) for slot in cast)]
        holders: Mapping[int, Holders] = {}
        if held_tensors := [slot.tensor for slot, _ in rows if use_count(slot.tensor) > 1]:
            # The search looks at every object of the process.
            computed = {id(vars(module).get(name)) for module in self.modules for name in computed_attributes(module)}
            holders = holders_of(held_tensors, replaced=computed)
        refused: list[tuple[Slot, list[Holder]]] = []
        for slot, change in rows if holders else ():
            held = holders.get(id(slot.tensor))
            if held is None:
                continue
            is_data = change is None or change.placement is DATA
            in_the_way = held.of_the_graph() if is_data else held.all()
            if in_the_way and not (is_data and change is not None and change.keeps_values):
                refused.append((slot, in_the_way))
            elif held.views:
                self.notes.append(f"{slot.name}: views of it that were taken before keep the old memory")
        if not refused:
            return None
        tensors = f"{len(refused)} tensors are" if len(refused) > 1 else "the tensor is"
        return PlacementError(
            f"{tensors} held by something that would keep the old values; nothing has been changed",
            where=listed((slot.name for slot, _ in refused), 4),
            expected="tensors that only Python refers to",
            found=described(holder for _, of_slot in refused[:4] for holder in of_slot),
            remedy=holders[id(refused[0][0].tensor)].remedy,
        )

    # Phase two: put the new tensors in place.

    def commit(self, *last: Callable[[], None]) -> None:
        """Puts everything in place: first what may fail and can be undone, then the rest, uninterrupted.

        `last` is called at the end, when nothing can fail any more.
        """
        self._run(self.changes)
        if self.casts.new_bytes:
            # Allocates the memory that the casts need, and frees it untouched, to learn that it is there.
            try:
                torch.empty(self.casts.new_bytes, dtype=torch.uint8, device="cpu")
            except RuntimeError as error:
                raise MemoryBudgetError(
                    "the system has no memory for the new tensors; nothing has been changed",
                    expected=f"{self.casts.new_bytes} bytes",
                    found=error,
                    remedy="convert the parts of the module one after the other",
                ) from error
        for function in (self.casts.run, *last):
            self.transaction.at_commit(function)
        self.transaction.commit()

    def _run(self, changes: Iterable[Change]) -> None:
        """Runs changes in the transaction. Signals are deferred, so that no undo is lost.

        Raises `PlacementError` if torch cannot put a new tensor in place.
        """
        with deferred_signals():
            for change in changes:
                try:
                    self.transaction.run(change)
                except ModelStateError:
                    raise
                except (RuntimeError, TypeError) as error:
                    raise PlacementError(
                        "torch cannot put the new tensor in the place of the old one; nothing has been changed",
                        where=change.name,
                        expected=f"something that a {type(change.target).__name__} can become",
                        found=f"{type(change.value).__name__}, {short(change.value.dtype)}: {error}",
                        remedy="replace the parameter by hand, and build the optimizer afterwards",
                    ) from error

    def finals(self) -> dict[torch.Tensor, torch.Tensor]:
        """Returns a tensor of the new dtype and device for each tensor that changes."""
        return {change.target: change.value for change in self.changes} | self.casts.finals()

    def steps(self) -> Callable[[], tuple[Step, ...]]:
        """Returns a function that makes the steps. The function holds no tensor."""
        steps, steps_of_casts = self._steps, self.casts.steps()
        return lambda: (*steps, *steps_of_casts())

    def references_lost(self) -> tuple[str, ...]:
        """Returns the names of what is no longer the same object, and of what no longer shares memory."""
        changed = {id(tensor) for tensor in self.finals()} if self._unshared else set()
        unshared = tuple(
            f"{' and '.join(slot.name for slot in group)} no longer share memory"
            for group in self._unshared
            if any(id(slot.tensor) in changed for slot in group)
        )
        return unshared + (lost_references(self.slots, self.root) if self._may_replace else ())


def _covers(tensor: torch.Tensor, start: int, end: int) -> bool:
    """Whether the storage of a tensor has all elements between two addresses, at multiples of their size."""
    storage = storage_of(tensor)
    begin = storage.data_ptr()
    return begin <= start and end <= begin + storage.nbytes() and not (start - begin) % tensor.itemsize


# The casts of plain CPU tensors, which are made at the commit.
#
# Such a cast can fail only for lack of memory, and before the commit the memory is known to be there. So each old
# tensor is freed as soon as its new one exists, where two phases would need the memory of all new tensors at once. A
# module may have tens of thousands of small tensors: they are cast in batches, each with a few calls of torch.


class _Batch(msgspec.Struct):
    """Tensors of one dtype that are cast together; a large one is alone, and so is one with a gradient."""

    dtype: torch.dtype
    new: torch.Tensor
    """An empty tensor like the new ones."""
    slots: list[Slot]
    numel: int = 0
    """The elements of the tensors, and of the gradient."""
    grad: torch.Tensor | None = None
    """The gradient of the only tensor."""


class _Casts:
    """The casts of one conversion. Nothing is cast before `run`."""

    def __init__(self, target: Target, overflows: Overflows | None) -> None:
        self._target, self._overflows = target, overflows
        self._batches: list[_Batch] = []
        self.new_bytes = 0
        """The memory of all new tensors."""
        self.peak_bytes = 0
        """The most memory that is in use at any time, less that of the old tensors."""

    def add(self, plain: Iterable[Slot]) -> list[Slot]:
        """Adds the plain tensors that can be cast at the commit.

        Returns the tensors that cannot; those that have the dtype already are in neither.
        """
        others: list[Slot] = []
        new_of: dict[torch.dtype, torch.Tensor | None] = {}
        open_batches: dict[torch.dtype, _Batch] = {}
        for slot in plain:
            tensor = slot.tensor
            dtype, grad = tensor.dtype, tensor.grad if tensor.is_leaf else None
            if dtype not in new_of:
                new_of[dtype] = self._target.deferred_cast(dtype)
            new = new_of[dtype]
            # The cast of the gradient must be as certain to succeed as that of its tensor.
            if new is None or not _is_certain(tensor, dtype) or (grad is not None and not _is_certain(grad, dtype)):
                others.append(slot)
            elif new.dtype != dtype:
                numel = tensor.numel()
                batch = open_batches.get(dtype)
                if grad is not None:
                    self._batches.append(_Batch(dtype, new, [slot], 2 * numel, grad))
                    continue
                if batch is None or (batch.numel + numel) * new.itemsize > _BATCH_BYTES:
                    batch = open_batches[dtype] = _Batch(dtype, new, [])
                    self._batches.append(batch)
                batch.slots.append(slot)
                batch.numel += numel
        grown = 0
        for batch in self._batches:
            new_bytes = batch.numel * batch.new.itemsize
            is_checked = self._overflows is not None and can_overflow(batch.dtype, batch.new.dtype)
            flat_bytes = new_bytes if is_checked and len(batch.slots) > 1 else 0
            self.new_bytes += new_bytes
            self.peak_bytes = max(self.peak_bytes, grown + new_bytes + flat_bytes)
            grown += new_bytes - batch.numel * batch.dtype.itemsize
        return others

    @property
    def slots(self) -> list[Slot]:
        """The slots of the tensors that are cast."""
        return [slot for batch in self._batches for slot in batch.slots]

    def finals(self) -> dict[torch.Tensor, torch.Tensor]:
        """Returns an empty tensor like the new one for each tensor."""
        return {slot.tensor: batch.new for batch in self._batches for slot in batch.slots}

    def run(self) -> None:
        """Casts all tensors. It fails only for lack of memory."""
        with torch.inference_mode(False), torch.no_grad():
            for batch in self._batches:
                tensors = [slot.tensor for slot in batch.slots]
                values = [torch.empty_like(tensor, dtype=batch.new.dtype) for tensor in tensors]
                copy_each(values, tensors)
                overflows = self._overflows if can_overflow(batch.dtype, batch.new.dtype) else None
                if overflows is not None and not has_finite_sum(flattened(values) if len(values) > 1 else values[0]):
                    for slot, value in zip(batch.slots, values, strict=True):
                        overflows.check(slot.name, slot.tensor, value)
                if batch.grad is not None:
                    grad = batch.grad.to(batch.new.dtype)
                    point_to(tensors[0], values[0], grad, held_grad=batch.grad)
                    continue
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.data = value

    def steps(self) -> Callable[[], list[Step]]:
        """Returns a function that makes the step of each tensor. The function holds no tensor."""
        # The tensors have been cast already: their bytes are those of another dtype.
        facts = [
            (names, kind, tuple(tensor.shape), batch.new.dtype, batch.dtype, tensor.numel() * batch.dtype.itemsize)
            for batch in self._batches
            for names, kind, tensor in batch.slots
        ]
        cpu = torch.device("cpu")
        return lambda: [
            step(names, kind, DATA, shape, new, old, cpu, nbytes) for names, kind, shape, new, old, nbytes in facts
        ]


def _is_certain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast of the tensor can fail only for lack of memory."""
    is_own = tensor.dtype == dtype and tensor.is_cpu and not tensor.is_inference()
    return is_own and is_plain(tensor) and not tensor.is_nested and has_its_memory(tensor)


# The replacement of torch's `_apply` while a conversion runs.

_running = ThreadValue[Conversion | None](None)
"""The conversion that records in this thread."""


def running_conversion(module: nn.Module) -> Conversion | None:
    """Returns the conversion of this thread that a module belongs to."""
    conversion = _running.value
    return conversion if conversion is not None and any(module is each for each in conversion.modules) else None
