"""Assigns values of a checkpoint to slots of a model, and finds every problem that keeps a value from its slot."""

from collections.abc import Callable
from typing import Any

import torch

from modelstate.planning.assignment import COPYABLE, Assignment, Placement, choose
from modelstate.planning.mapped_state import MappedState, ModelSchemaView
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
from modelstate.torch_compat.plain import (
    has_its_memory,
    is_plain,
    is_quantized,
    is_sharded,
    same_place,
)
from modelstate.torch_compat.private import is_fake, storage_id
from modelstate.transaction.slots import Slot, clash, overlap
from modelstate.transaction.transaction import Transaction, Write

_CPU = torch.device("cpu")


class SlotAssignments:
    """The values that go to the slots of a model, with the problems and notes of a load.

    `assign` is called once for each value, while the model's loading protocol runs. It adds an `Assignment`, and a
    write to the transaction. The write waits until the load is committed, unless code of the model uses the tensor.
    """

    def __init__(
        self,
        transaction: Transaction,
        view: ModelSchemaView,
        matched: MatchedCheckpoint,
        make_write: Callable[[Assignment], Write],
    ) -> None:
        self.transaction, self.model = transaction, transaction.root
        self.matched = matched
        self.checkpoint, self.options = matched.part, matched.options
        self.slots = self.slots_before = view.slots
        """The slots of the model. `slots` is updated after the walk: the model's code may have replaced tensors."""
        self.transforms = Transforms(self.options.transform, transaction.root, self.slots)
        self.view = view
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
        """Names of non-persistent buffers that equal the checkpoint's values."""
        self._make_write = make_write
        self.filled: dict[int, Assignment] = {}
        """By the ids of the tensors that get a value, under whatever name."""
        self._by_storage: dict[int, list[Assignment]] = {}
        self._shown: dict[ByteRange, list[ByteRange]] = {}
        quantized = (self.slots.by_name.get(name) for name in incoming.quantized)
        self._keeps_stored_dtypes = self.options.dtype is None and any(
            slot is not None and slot.tensor.is_meta for slot in quantized
        )
        """Whether floating-point tensors on meta get the dtypes of the checkpoint, because it has quantized tensors. A
        layer computes in the dtype that its weight was quantized from, and a cast cannot change that dtype."""

    def device_after(self, param: torch.Tensor) -> torch.device:
        return self.options.device or (_CPU if param.is_meta else param.device)

    def assign(self, name: str, kind: str, param: torch.Tensor, value: torch.Tensor) -> None:
        """Assigns `value` to `param`, or adds the problem that keeps it from going there."""
        given, stored = self.incoming.origin_of(value)
        self.used.add(given)
        first = self.filled.get(id(param))
        if first is not None:
            if first.value is not value and not self.incoming.are_equal(first.value, value):
                self.problems.append(TieConflict(name, (first.name,)))
            return
        assignment = self._assignment(name, kind, param, value, given, stored)
        self.filled[id(param)] = assignment
        self.assignments.append(assignment)
        if not assignment.plain and self._has_other_class(assignment):
            return  # the value is never written, even where the model's own code uses the tensor
        if value.is_meta or (isinstance(stored, torch.Tensor) and lacks_values(stored)):
            self.problems.append(NoValues(name))
        elif value.dtype != assignment.dtype:
            self._check_dtype(assignment)
        if not param.is_meta:
            self._check_memory(assignment)
        self.transaction.add(self._make_write(assignment))

    def _has_other_class(self, assignment: Assignment) -> bool:
        """Adds a problem where the classes of the two tensors rule out a copy. Returns whether they do.

        A FakeTensor has no values, and torch cannot copy between a DTensor and a whole tensor.
        """
        problem: Problem | None = None
        if is_fake(assignment.param) or is_fake(assignment.value):
            problem = FakeTensors(assignment.name, "model" if is_fake(assignment.param) else "checkpoint")
        elif is_sharded(assignment.param) and not is_sharded(assignment.value):
            problem = ShardedTensors(assignment.name, "model", on_meta=assignment.param.is_meta)
        elif is_sharded(assignment.value) and not is_sharded(assignment.param):
            problem = ShardedTensors(assignment.name, "checkpoint")
        self.problems += [problem] if problem is not None else []
        return problem is not None

    def move(self, slot: Slot, device: torch.device) -> None:
        """Moves a tensor that gets no value to a device when the load is committed."""
        value = slot.tensor.detach()
        placement = Placement("data", f"moves to {device}")
        assignment = Assignment(
            *(slot.name, slot.kind, slot.tensor, value, "", value, placement, is_plain(slot.tensor)),
            *(value.dtype, device, self.overflows),
        )
        self.moves.append(assignment)
        self.transaction.add(self._make_write(assignment))

    def initialise(self, slot: Slot) -> str:
        """Assigns an initial value, computed by the model's own methods. Returns their names; empty without methods."""
        for name in slot.names:
            if (initialiser := self.view.initialisers.find(name)) is not None:
                value = self.incoming.initialised(name, slot.tensor, initialiser)
                self.assign(slot.name, slot.kind, slot.tensor, value)
                self.initialised.update(slot.names)
                return initialiser.how
        return ""

    def rebind(self, step: Step, slot: Slot, value: torch.Tensor) -> bool:
        """Assigns a value according to a step. Returns whether the file is read because it can no longer be mapped."""
        given, stored = self.incoming.origin_of(value)
        assert step.dtype is not None
        assert step.device is not None
        placement, choice = step.how, self.transforms.of(step.name)
        if placement.leased:  # which the layout of this model may not allow
            in_place = self._in_place(slot.tensor, step.device, stored)
            placement = choose(
                slot.tensor, value, step.dtype, step.device, map=False, in_place=in_place, transformed=False
            )
        is_read = (
            placement.mapped
            and isinstance(stored, StoredTensor)
            and not self.incoming.maps.may_show(stored.storage.path, self.options.map)
        )
        if is_read:  # another process has opened the file for writing since
            placement = choose(
                slot.tensor, value, step.dtype, step.device, map=False, in_place=False, transformed=False
            )
        assignment = Assignment(
            *(
                step.name,
                step.kind,
                slot.tensor,
                value,
                given,
                stored,
                placement,
                is_plain(slot.tensor, value),
                step.dtype,
                step.device,
                self.overflows,
            ),
            transform=choice.first,
        )
        if choice.last is not None:
            assignment.remake = bound(choice)
            self._measure_remaking(assignment, choice.last)
        self.used.add(given)
        self.filled[id(slot.tensor)] = assignment
        self.assignments.append(assignment)
        self.transaction.add(self._make_write(assignment))
        return is_read

    def _check_memory(self, assignment: Assignment) -> None:
        """Adds problems of slots whose memory is freed, or shared with a slot that gets other values."""
        param, is_copied = assignment.param, assignment.placement.name == "copy"
        if not (assignment.plain or is_plain(param)):
            return
        if is_copied and not (
            assignment.placement.direct or has_its_memory(param)
        ):  # `choose` has asked for direct ones
            self.problems.append(FreedMemory(assignment.name, param.nbytes, param.untyped_storage().nbytes()))
            return
        if is_copied and assignment.plain and assignment.transform is None:
            is_dense = assignment.own_stride is not None or param.is_contiguous()
            assignment.is_checked_copy = is_dense and assignment.dtype in COPYABLE and not param.is_inference()
        others = self._by_storage.setdefault(storage_id(param), [])
        for other in others:
            if other.value.shape == other.param.shape and overlap(other.param, param):
                if not is_copied:
                    self.notes.append(f"{other.name} and {assignment.name} share memory now, and not after the load")
                elif self._clash(other, assignment):
                    self.problems.append(TieConflict(assignment.name, (other.name,)))
        others.append(assignment)

    def _clash(self, first: Assignment, second: Assignment) -> bool:
        if same_place(first.param, second.param):
            return not self.incoming.are_equal(first.value, second.value)
        return clash(
            first.param, self.incoming.with_values(first.value), second.param, self.incoming.with_values(second.value)
        )

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
            # The argument of a transform is read: a mapped file must not be truncated while the transform uses it.
            map=param.is_meta and options.map is not False and choice.first is None and self._may_show(stored),
            in_place=self._in_place(param, device, stored),
            transformed=choice.first is not None,
        )
        plain = not placement.by_handler
        if choice.last is not None:
            placement = Placement("swap", f"made by {choice.last}")
        elif placement.mapped and isinstance(stored, StoredTensor):
            if not self.incoming.maps.may_show(stored.storage.path, options.map):
                placement = choose(param, value, dtype, device, map=False, in_place=False, transformed=False)
            self._shown.setdefault(stored.storage, []).append(stored.extent)
        assignment = Assignment(
            name, kind, param, value, given, stored, placement, plain, dtype, device, self.overflows, choice.first
        )
        if choice.last is not None:
            assignment.remake = bound(choice)
            self._measure_remaking(assignment, choice.last)
        return assignment

    @staticmethod
    def _measure_remaking(assignment: Assignment, last: ModuleTransform) -> None:
        """Sets the rows and the memory of each call of a module's transform."""
        shape = tuple(assignment.param.shape)
        if shape and assignment.own_stride is None and assignment.is_run_of_bytes:
            assignment.remake_rows = min(asked_rows(last, assignment.name, shape, assignment.dtype) or 0, shape[0])
        part = (assignment.remake_rows, *shape[1:]) if assignment.remake_rows else shape
        assignment.remake_bytes = asked_bytes(last, assignment.name, part, assignment.dtype)
        assignment.choose_route()

    def _in_place(self, param: torch.Tensor, device: torch.device, stored: Source | None) -> bool | None:
        """Whether a value can get into existing memory without temporary memory for all values.

        None stands for bytes of a file that are read, or cast block by block, without a call of other code.
        """
        if self.options.in_place is None:
            is_run = isinstance(stored, StoredTensor) and stored.is_contiguous and stored.nbytes > 0
            return None if is_run and device == _CPU and not param.is_meta and param.is_contiguous() else False
        if not self.options.in_place:
            return False
        if isinstance(stored, Derived):
            return stored.is_certain and stored.of_files
        return isinstance(stored, torch.Tensor) or (isinstance(stored, StoredTensor) and stored.is_contiguous)

    def _may_show(self, stored: Source | None) -> bool:
        """Whether a slot may be a map of these bytes. Two slots that are not tied must not map the same bytes."""
        if not isinstance(stored, StoredTensor) or not stored.is_contiguous:
            return False
        shown = self._shown.get(stored.storage)
        return not shown or not any(overlapping(stored.extent, other) for other in shown)

    def _check_dtype(self, assignment: Assignment) -> None:
        if assignment.transform is not None:
            return  # the result of a transform may have any dtype
        if not is_plain(assignment.value):
            keeps_class = assignment.param.is_meta or is_quantized(
                assignment.param
            )  # else the class converts it to a plain tensor
            if self.options.dtype is not None and keeps_class and is_quantized(assignment.value):
                cls = type(assignment.value.data).__name__
                self.problems.append(
                    QuantizedCast(assignment.name, short(assignment.dtype), short(assignment.value.dtype), cls)
                )
            return
        cast = cast_between(assignment.value.dtype, assignment.dtype)
        is_requested = self.options.dtype is not None and assignment.dtype == self.options.dtype
        if cast == "kind" or (cast == "lossy" and not is_requested):
            self.problems.append(
                WrongDtype(assignment.name, short(assignment.dtype), short(assignment.value.dtype), cast)
            )

    def value_of(self, name: str) -> Any:
        """Returns the checkpoint's value for a name of the model, or None."""
        return self.incoming.state.get(name)
