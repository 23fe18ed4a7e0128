"""How a plan comes about: the model's loading protocol, run against tensors that are mapped and not read.

What is left at the end is either a list of problems and a model that is as it was, or writes that wait for their
bytes, with everything known that could keep them from being carried out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import CodecError, ExtraStateError, ModelStateError, StalePlanError
from modelstate.io.engine import ReadStrategy
from modelstate.io.memory import MemoryTracker
from modelstate.planning.assignment import Assignment
from modelstate.planning.coverage import CoverageCheck
from modelstate.planning.initialise import Initialisers
from modelstate.planning.mapped_state import DecodeFailure, match
from modelstate.planning.memory import peak_bytes
from modelstate.planning.placement import CALL
from modelstate.planning.plan import Binding, LoadPlan, Options, Step
from modelstate.planning.recorder import IncompatibleKeys, runs_code, walk
from modelstate.planning.slot_assignments import SlotAssignments
from modelstate.problems import (
    BadExtraState,
    Complaint,
    NotATensor,
    NotYetInitialised,
    NumPyArray,
    QuantizedIntoPlain,
    model_errors,
    one_line,
    plan_error,
    wrong_shape,
)
from modelstate.process import cached_attribute
from modelstate.rules.expression import lacks_values
from modelstate.spec import StoredComposite
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.plain import is_plain, is_quantized
from modelstate.torch_compat.private import module_load, own_parameters
from modelstate.transaction.slots import BUFFER, EXTRA, HIDDEN, PARAMETER, Addresses, signatures, slots_of
from modelstate.transaction.transaction import Transaction, Write

_CPU = torch.device("cpu")
CHECK_EXTRA_STATE = "_modelstate_check_extra_state"
"""The method of modules that can say what is wrong with an extra state without taking it."""


_FITS_IN_PART = (
    "transformers' conversion mapping makes the names fit only in part, and the model's own loading code takes the "
    "rest: rules=ms.rules.from_transformers(model), if that is meant"
)


class Preparation(SlotAssignments):
    """A load that has been planned and not yet carried out.

    The constructor runs the model's loading protocol. `make_write` returns the write that carries an assignment out; it
    runs early where code of the model looks at the tensor. Raises `ModelCodeError` where that code raises. The caller,
    which made the transaction, has to roll it back in that case, and where there are problems.
    """

    def __init__(
        self,
        transaction: Transaction,
        checkpoint: Checkpoint,
        options: Options,
        make_write: Callable[["Preparation", Assignment], Write],
        call_extra_state: bool,
        plan: LoadPlan | None = None,
        stale_remedy: str = "make the plan again",
    ) -> None:
        """Plans a load, or binds a `plan` that was made for the same checkpoint and options to the model.

        `stale_remedy` is what to do where the model is not the one that the plan was made for.
        """
        slots, initialisers = slots_of(transaction.root), Initialisers(transaction.root)
        binding = None if plan is None else plan.binding
        matched = (
            match(checkpoint, options, slots, transaction.root, initialisers) if binding is None else binding.matched
        )
        super().__init__(transaction, matched, slots, initialisers, make_write)
        self._opened, self._asked = checkpoint, options
        self._plan, self._stale_remedy = plan, stale_remedy
        self.means = ReadStrategy.fastest()
        """How the bytes are read."""
        self.max_memory_bytes: int | None = None
        """The most memory that the load may need beyond the final tensors."""
        self.held = MemoryTracker()
        self._call_extra_state = call_extra_state
        self._cause: Exception | None = None
        self._not_mapped = 0
        # Code of the model may change a lazy parameter before `plan` is called.
        self._signatures = signatures(slots) if not call_extra_state else {}
        if plan is None or binding is None:
            self._record()
        else:
            self._check_slots(binding)
            if binding.runs_code or runs_code(self.model):
                self._record()
                if not self.problems:
                    self._check_steps(plan)
            else:
                self._bind(plan, binding)
        self.incoming.settle()
        self.notes = [*dict.fromkeys((*self.notes, *self.incoming.maps.notes))]

    def _record(self) -> None:
        """Runs the model's loading protocol, and finds every problem."""
        self.notes += self.matched.notes
        self.problems += self.matched.applied.problems
        outcome = IncompatibleKeys()
        self._walk(outcome)
        self._check_quantized()
        if self.transaction.armed:
            self.slots = slots_of(self.model)
        CoverageCheck(self, outcome).settle()
        if self.matched.fits_in_part and not self.problems:
            self.problems.append(Complaint("", _FITS_IN_PART))

    def _bind(self, plan: LoadPlan, binding: Binding) -> None:
        """Assigns what the steps of a plan say. No code of the model runs, so that nothing can have become another."""
        self.problems += plan.problems
        self.notes += plan.notes
        for step in plan.steps:
            slot = self.slots.by_name[step.name]
            value = next((self.incoming.state[name] for name in slot.names if name in self.incoming.state), None)
            if value is None:
                self.initialise(slot)
            else:
                self._not_mapped += self.rebind(step, slot, value)
        coverage = CoverageCheck(self, IncompatibleKeys())
        for name in binding.compared:
            coverage.hidden_buffer(self.slots.by_name[name], name)
        for name in binding.moved:
            self.move(self.slots.by_name[name], self.device_after(self.slots.by_name[name].tensor))
        for slot in self.slots.tensors:
            if is_lazy(slot.tensor) and not self.is_filled(slot.tensor):
                self.uninitialised.update(dict.fromkeys(slot.names, slot.tensor))

    def notes_on_mapping(self) -> list[str]:
        """What is done in another way than planned, because another process has opened the file for writing since."""
        count = self._not_mapped
        return [f"{count} tensors are read into memory; when the plan was made, the file could be mapped"] * bool(count)

    def _check_slots(self, planned: Binding) -> None:
        """Raises `StalePlanError` where the slots of the model are not those of a plan."""
        was, now = planned.slots, signatures(self.slots)
        if was != now:
            changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
            raise self._stale(changed, was.get(changed[0]), now.get(changed[0]))

    def _check_steps(self, plan: LoadPlan) -> None:
        """Raises `StalePlanError` where code of the model loads otherwise than it did for the plan.

        Whether a file may be mapped depends on the processes that have it open, too: that makes no plan stale.
        """
        was, now = ({step.name: step for step in steps} for steps in (plan.steps, self.steps()))
        changed = [name for name in {**was, **now} if not _same_but_for_mapping(was.get(name), now.get(name))]
        self._not_mapped = sum(step.mapped and not now[name].mapped for name, step in was.items() if name in now)
        if changed:
            raise self._stale(changed, was.get(changed[0]), now.get(changed[0]))

    def _stale(self, changed: Sequence[str], was: object, now: object) -> StalePlanError:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return StalePlanError(
            "the model is no longer what was planned for; nothing has been changed",
            where=f"{self.names[0]}: {changed[0]}{more}",
            expected=was or "no such slot",
            found=now or "no such slot",
            remedy=self._stale_remedy,
        )

    def _walk(self, outcome: IncompatibleKeys) -> None:
        with model_errors("the model's own loading code", self.model):
            walk(
                self.model,
                self.incoming.state,
                self.matched.versions,
                assign=False,
                transaction=self.transaction,
                take=self,
                outcome=outcome,
            )

    # What the recorder hands over.

    def extra_state(self, module: nn.Module, key: str, value: Any) -> None:
        self.extra_states.append(key)
        # Who declares extra state can say what is wrong with a value without setting it. A load need not ask before
        # it sets: a value that cannot be set sets nothing, and all is undone where there are problems.
        take = module.set_extra_state if self._call_extra_state else getattr(module, CHECK_EXTRA_STATE, None)
        try:
            if isinstance(value, DecodeFailure):
                raise value.error
            if take is not None:
                take(value)
        except (ExtraStateError, CodecError) as error:
            self._cause = self._cause or error
            self.problems.append(BadExtraState(key, one_line(error), type(error).__name__))

    def tensor(
        self, module: nn.Module, name: str, key: str, param: torch.Tensor, value: Any, assign: bool, errors: list[str]
    ) -> None:
        given = key
        if self.transaction.armed:
            slot = self.slots.by_name.get(key)
            if slot is None or slot.tensor is not param:  # a module that loads a child by itself uses a shorter name
                key = self._names.get(id(param), key)
        if not isinstance(value, torch.Tensor):
            is_array = f"{type(value).__module__}.{type(value).__name__}" == "numpy.ndarray"
            self.problems.append((NumPyArray if is_array else NotATensor)(key, type(value).__name__))
        elif is_lazy(value):
            self.used.add(given)
            if is_lazy(param):
                self.uninitialised[key] = param
            else:
                self.problems.append(NotYetInitialised(key))
        elif param.shape != value.shape and self.transforms.of(key).first is None:
            seen_by_rules = self.matched.name_for_rules(given)
            self.problems.append(wrong_shape(key, tuple(param.size()), tuple(value.size()), seen_by_rules))
        else:
            self.assign(key, PARAMETER if name in own_parameters(module) else BUFFER, param, value)

    def _check_quantized(self) -> None:
        """Finds quantized tensors that do not become the plain tensors of the model.

        Only the code of their class knows whether they do. It is called on the first tensor of each class, with a copy
        of the model's tensor.
        """
        converts: dict[type, bool] = {}
        for made in self.assignments:
            if is_plain(made.value) or made.param.is_meta or made.transform is not None or made.remake is not None:
                continue
            if not (is_plain(made.param) and is_quantized(made.value)) or lacks_values(made.value):
                continue
            cls = type(made.value.data)
            if cls not in converts:
                converts[cls] = self._becomes_plain(made)
            if not converts[cls]:
                expected, found = short(made.param.dtype), short(made.value.dtype)
                self.problems.append(QuantizedIntoPlain(made.name, expected, found, cls.__name__))

    def _becomes_plain(self, made: Assignment) -> bool:
        """Whether `module_load` takes the value, as it will when the assignment is carried out."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                stored = made.stored
                value = self.checkpoint.read(stored) if isinstance(stored, StoredComposite) else made.value.detach()
                param = torch.empty_like(made.param)
                module_load(nn.Parameter(param, False) if made.kind == PARAMETER else param, value, assign=False)
        except ModelStateError:
            raise
        except Exception:
            return False
        return True

    @cached_attribute
    def _names(self) -> dict[int, str]:
        return {id(slot.tensor): slot.name for slot in self.slots.tensors}

    @cached_attribute
    def own_memory(self) -> Addresses:
        """Where the tensors of the model lie."""
        return Addresses(slot.tensor for slot in self.slots.tensors)

    # What comes of it.

    @property
    def nbytes(self) -> int:
        """Bytes to read, or to show."""
        return sum(made.nbytes for made in self.assignments)

    @property
    def extra_bytes(self) -> int:
        """Memory that is needed beyond the final tensors."""
        return peak_bytes(self.assignments, self.means)

    @property
    def names(self) -> tuple[str, str]:
        """What is loaded into, and what from."""
        key = f" [{self.checkpoint.key}]" if self.checkpoint.key else ""
        return type(self.model).__name__, self.checkpoint.source + key

    def check(self) -> None:
        """Raises `PlanError` with all problems, where there are any."""
        if self.problems:
            raise plan_error(*self.names, self.problems) from self._cause

    def plan(self) -> LoadPlan:
        """The frozen plan of it."""
        target, source = self.names
        return LoadPlan(
            target=target,
            source=source,
            steps=self.steps(),
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            slots=self.slot_count,
            extra_bytes=self.extra_bytes,
            options=self._asked,
            checkpoint=self._opened,  # of which `key` in the options selects a part
            binding=Binding(
                self.matched,
                self._signatures,
                self.transaction.armed,
                tuple(made.name for made in self.moves),
                tuple(self.compared),
            ),
        )

    @property
    def slot_count(self) -> int:
        """Slots that want a value."""
        tensors = sum(1 for slot in self.slots.tensors if slot.kind != HIDDEN or self.is_filled(slot.tensor))
        return tensors + len(self.slots.extra) - len({id(param) for param in self.uninitialised.values()})

    def steps(self, *, with_sources: bool = True) -> tuple[Step, ...]:
        """A step for each assignment, with the time that it has taken, and one for each extra state.

        Steps without their sources hold no tensor.
        """
        ties, way_of = self._ties, self.incoming.way_of
        steps = []
        for made in self.assignments:
            source, rules = way_of(made.given)
            step = Step(
                made.name,
                made.kind,
                source,
                made.placement,
                made.param.shape,
                made.dtype,
                made.value.dtype,
                made.device,
                made.nbytes,
                ties.get(made.name, ()),
                rules,
                made.way,
                made.stored if with_sources else None,
                made.seconds,
            )
            steps.append(step)
        return (*steps, *(Step(name, EXTRA, way_of(name)[0], CALL) for name in self.extra_states))

    @cached_attribute
    def _ties(self) -> dict[str, tuple[str, ...]]:
        tied = [slot.names for slot in self.slots.tensors if len(slot.names) > 1]
        return {name: tuple(other for other in names if other != name) for names in tied for name in names}


def _same_but_for_mapping(one: Step | None, other: Step | None) -> bool:
    """Whether two steps are equal, but that the slot may show the file in one of them and have its own memory else."""
    if one is None or other is None or one == other:
        return one == other
    same_way = replace(one.how, why="", mapped=False) == replace(other.how, why="", mapped=False)
    return same_way and one.mapped != other.mapped and one._replace(how=other.how, way=other.way) == other
