"""Assigns values of a checkpoint to slots of a model, and finds every problem that keeps a value from its slot."""

from collections.abc import Callable
from typing import Any

import torch

from modelstate.planning.assignment import Assignment
from modelstate.planning.initialise import Initialisers
from modelstate.planning.mapped_state import MappedState
from modelstate.planning.placement import Placement, choose
from modelstate.planning.plan import MatchedCheckpoint, Step
from modelstate.planning.transforms import ModuleTransform, Transforms, asked_bytes, asked_rows, bound
from modelstate.problems import (
    FakeTensors,
    FreedMemory,
    NoValues,
    Problem,
    QuantizedCast,
    ShardedTensors,
    TieConflict,
    WrongDtype,
)
from modelstate.rules.expression import Derived, Source, lacks_values
from modelstate.spec import ByteRange, StoredTensor, overlapping
from modelstate.torch_compat.dtypes import Overflows, cast_between, short
from modelstate.torch_compat.plain import has_its_memory, is_fake, is_plain, is_quantized, is_sharded, same_place
from modelstate.torch_compat.private import storage_id
from modelstate.transaction.slots import Slot, Slots, clash, overlap
from modelstate.transaction.transaction import Transaction, Write

_CPU = torch.device("cpu")


class SlotAssignments:
    """The values that go to the slots of a model, with the problems and notes of a load.

    `assign` is called once for each value, while the model's loading protocol runs. It adds an `Assignment`, and a
    write to the transaction. The write waits until the load is committed, unless code of the model looks at the tensor.
    """

    def __init__(
        self,
        transaction: Transaction,
        matched: MatchedCheckpoint,
        slots: Slots,
        initialisers: Initialisers,
        make_write: Callable[[Any, Assignment], Write],
    ) -> None:
        self.transaction, self.model = transaction, transaction.root
        self.matched = matched
        self.checkpoint, self.options = matched.part, matched.options
        self.slots = self.slots_before = slots
        """The slots of the model. `slots` is updated after the walk: the model's code may have replaced tensors."""
        self.transforms = Transforms(self.options.transform, transaction.root, slots)
        self.initialisers = initialisers
        self.incoming = incoming = MappedState(matched, transaction)
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.overflows = Overflows()
        self.assignments: list[Assignment] = []
        self.moves: list[Assignment] = []
        """Tensors that get no value, and only move to another device."""
        self.used: set[str] = set()
        """Names, after the rules, whose values have been assigned to a slot."""
        self.uninitialised: dict[str, torch.Tensor] = {}
        """Lazy tensors that stay as they are: neither this module nor the saved one has initialised them."""
        self.initialised: set[str] = set()
        """Names of tensors that the checkpoint lacks, and that the model's own code initialises."""
        self.extra_states: list[str] = []
        self.compared: list[str] = []
        """Names of non-persistent buffers that hold what the checkpoint has."""
        self._make_write = make_write
        self._by_param: dict[int, Assignment] = {}
        self._by_storage: dict[int, list[Assignment]] = {}
        self._shown: dict[ByteRange, list[ByteRange]] = {}
        quantized = (slots.by_name.get(name) for name in incoming.quantized)
        self._keeps_stored_dtypes = self.options.dtype is None and any(
            slot is not None and slot.tensor.is_meta for slot in quantized
        )
        """Whether floats on meta get the dtypes of the checkpoint, because it has quantized tensors: a layer computes
        in the dtype that its weight was quantized from, and no cast changes that."""

    def device_after(self, param: torch.Tensor) -> torch.device:
        return self.options.device or (_CPU if param.is_meta else param.device)

    def assign(self, name: str, kind: str, param: torch.Tensor, value: torch.Tensor) -> None:
        """Assigns `value` to `param`, or adds the problem that keeps it from going there."""
        given, stored = self.incoming.origin_of(value)
        self.used.add(given)
        first = self._by_param.get(id(param))
        if first is not None:
            if first.value is not value and not self.incoming.equal(first.value, value):
                self.problems.append(TieConflict(name, (first.name,)))
            return
        made = self._assignment(name, kind, param, value, given, stored)
        self._by_param[id(param)] = made
        self.assignments.append(made)
        if not (is_plain(param) and is_plain(value)) and self._has_other_class(made):
            return  # it is never written, even where the model's own code looks at the tensor
        if value.is_meta or (isinstance(stored, torch.Tensor) and lacks_values(stored)):
            self.problems.append(NoValues(name))
        elif value.dtype != made.dtype:
            self._check_dtype(made)
        if not param.is_meta:
            self._check_memory(made)
        self.transaction.add(self._make_write(self, made))

    def _has_other_class(self, made: Assignment) -> bool:
        """Whether the classes of the two tensors rule a copy out; adds the problem.

        A FakeTensor has no values, and torch copies nothing between a DTensor and a whole tensor.
        """
        problem: Problem | None = None
        if is_fake(made.param) or is_fake(made.value):
            problem = FakeTensors(made.name, "model" if is_fake(made.param) else "checkpoint")
        elif is_sharded(made.param) and not is_sharded(made.value):
            problem = ShardedTensors(made.name, "model", on_meta=made.param.is_meta)
        elif is_sharded(made.value) and not is_sharded(made.param):
            problem = ShardedTensors(made.name, "checkpoint")
        self.problems += [problem] if problem is not None else []
        return problem is not None

    def move(self, slot: Slot, device: torch.device) -> None:
        """Moves a tensor that gets no value to a device when the load is committed."""
        value = slot.tensor.detach()
        placement = Placement("data", f"moves to {device}")
        made = Assignment(
            slot.name, slot.kind, slot.tensor, value, "", value, placement, value.dtype, device, self.overflows
        )
        self.moves.append(made)
        self.transaction.add(self._make_write(self, made))

    def initialise(self, slot: Slot) -> str:
        """Assigns a first value to a slot, made by the model's own methods; returns them, or nothing where none do."""
        for name in slot.names:
            if (initialiser := self.initialisers.find(name)) is not None:
                value = self.incoming.initialised(name, slot.tensor, initialiser)
                self.assign(slot.name, slot.kind, slot.tensor, value)
                self.initialised.update(slot.names)
                return initialiser.how
        return ""

    def rebind(self, step: Step, slot: Slot, value: torch.Tensor) -> bool:
        """Assigns a value as a step says. Returns whether the file that the slot was to show is read instead."""
        given, stored = self.incoming.origin_of(value)
        assert step.dtype is not None
        assert step.device is not None
        how, choice = step.how, self.transforms.of(step.name)
        is_read = (
            how.mapped
            and isinstance(stored, StoredTensor)
            and not self.incoming.maps.may_show(stored.storage.path, self.options.map)
        )
        if is_read:  # another process has opened the file for writing since
            how = choose(slot.tensor, value, step.dtype, step.device, map=False, in_place=False, transformed=False)
        made = Assignment(
            *(step.name, step.kind, slot.tensor, value, given, stored, how, step.dtype, step.device, self.overflows),
            transform=choice.first,
        )
        if choice.last is not None:
            made.remake = bound(choice)
            self._measure_remaking(made, choice.last)
        self.used.add(given)
        self._by_param[id(slot.tensor)] = made
        self.assignments.append(made)
        self.transaction.add(self._make_write(self, made))
        return is_read

    def _check_memory(self, made: Assignment) -> None:
        """Slots that show the same memory are tied as much as those that are the same tensor; some have none left."""
        param = made.param
        if not is_plain(param):
            return
        if made.placement.name == "copy" and not has_its_memory(param):
            self.problems.append(FreedMemory(made.name, param.nbytes, param.untyped_storage().nbytes()))
            return
        others = self._by_storage.setdefault(storage_id(param), [])
        for other in others:
            if other.value.shape == other.param.shape and overlap(other.param, made.param):
                if made.placement.name != "copy":
                    self.notes.append(f"{other.name} and {made.name} share memory, and will no longer")
                elif self._clash(other, made):
                    self.problems.append(TieConflict(made.name, (other.name,)))
        others.append(made)

    def _clash(self, one: Assignment, other: Assignment) -> bool:
        if same_place(one.param, other.param):
            return not self.incoming.equal(one.value, other.value)
        return clash(one.param, self.incoming.seen(one.value), other.param, self.incoming.seen(other.value))

    def _assignment(
        self, name: str, kind: str, param: torch.Tensor, value: torch.Tensor, given: str, stored: Source | None
    ) -> Assignment:
        options, dtype = self.options, param.dtype
        if (
            (options.dtype is not None or self._keeps_stored_dtypes)
            and param.is_floating_point()
            and value.is_floating_point()
        ):
            dtype = options.dtype or (value.dtype if param.is_meta else dtype)
        device = self.device_after(param)
        choice = self.transforms.of(name)
        placement = choose(
            param,
            value,
            dtype,
            device,
            # What a transform looks at is read: a map must not be shortened while somebody looks at it.
            map=options.map is not False and choice.first is None and param.is_meta and self._may_show(stored),
            in_place=options.in_place and self._can_be_read_straight(stored),
            transformed=choice.first is not None,
        )
        if choice.last is not None:
            placement = Placement("swap", f"made by {choice.last}")
        elif placement.mapped and isinstance(stored, StoredTensor):
            if not self.incoming.maps.may_show(stored.storage.path, options.map):
                placement = choose(param, value, dtype, device, map=False, in_place=False, transformed=False)
            self._shown.setdefault(stored.storage, []).append(stored.extent)
        made = Assignment(
            name, kind, param, value, given, stored, placement, dtype, device, self.overflows, choice.first
        )
        if choice.last is not None:
            made.remake = bound(choice)
            self._measure_remaking(made, choice.last)
        return made

    @staticmethod
    def _measure_remaking(made: Assignment, last: ModuleTransform) -> None:
        """How a module's transform gets the value, and what memory it takes for it."""
        shape = tuple(made.param.shape)
        if shape and made.layout[1] is None and made.is_run_of_bytes:
            made.remake_rows = min(asked_rows(last, made.name, shape, made.dtype) or 0, shape[0])
        part = (made.remake_rows, *shape[1:]) if made.remake_rows else shape
        made.remake_bytes = asked_bytes(last, made.name, part, made.dtype)

    @staticmethod
    def _can_be_read_straight(stored: Source | None) -> bool:
        """Whether a value can get into memory that is there with none for all of them on the way."""
        if isinstance(stored, Derived):
            return stored.is_certain and stored.of_files
        return isinstance(stored, torch.Tensor) or (isinstance(stored, StoredTensor) and stored.is_contiguous)

    def _may_show(self, stored: Source | None) -> bool:
        """Whether a slot may show these bytes of the file: no two slots that are not tied may show the same."""
        if not isinstance(stored, StoredTensor) or not stored.is_contiguous:
            return False
        shown = self._shown.get(stored.storage)
        return not shown or not any(overlapping(stored.extent, other) for other in shown)

    def _check_dtype(self, made: Assignment) -> None:
        if made.transform is not None:
            return  # what it returns is asked for
        if not is_plain(made.value):
            keeps = made.param.is_meta or is_quantized(made.param)  # else its class says how it becomes plain
            if self.options.dtype is not None and keeps and is_quantized(made.value):
                cls = type(made.value.data).__name__
                self.problems.append(QuantizedCast(made.name, short(made.dtype), short(made.value.dtype), cls))
            return
        how = cast_between(made.value.dtype, made.dtype)
        asked = self.options.dtype is not None and made.dtype == self.options.dtype
        if how == "kind" or (how == "lossy" and not asked):
            self.problems.append(WrongDtype(made.name, short(made.dtype), short(made.value.dtype), how))

    def is_filled(self, param: torch.Tensor) -> bool:
        """Whether a value goes to this tensor, under whatever name."""
        return id(param) in self._by_param

    def value_of(self, name: str) -> Any:
        """What the checkpoint has under a name of the model's; None for nothing."""
        return self.incoming.state.get(name)
