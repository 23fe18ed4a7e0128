"""`Preparation`: plans a load by running the model's loading protocol with tensors that are mapped and not read.

The result is either a list of problems and an unchanged model, or writes that wait for their bytes. Everything that
could keep the writes from being executed has then been checked.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.errors import CodecError, ExtraStateError, ModelStateError, StalePlanError
from modelstate.io.engine import ReadStrategy
from modelstate.planning.assignment import CALL, Assignment
from modelstate.planning.coverage import CoverageCheck
from modelstate.planning.mapped_state import DecodeFailure, ModelSchemaView
from modelstate.planning.memory import peak_bytes
from modelstate.planning.plan import Binding, LoadPlan, MatchedCheckpoint, Step
from modelstate.planning.recorder import IncompatibleKeys, Owner, runs_code, walk
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
from modelstate.torch_compat.private import module_load
from modelstate.transaction.slots import BUFFER, EXTRA, HIDDEN, PARAMETER, SlotSignature, signatures, slots_of
from modelstate.transaction.transaction import Transaction, Write

_CPU = torch.device("cpu")
CHECK_EXTRA_STATE = "_modelstate_check_extra_state"
"""The method of modules that can check an extra state without setting it."""


_FITS_IN_PART = (
    "transformers' conversion mapping makes the names fit only in part, and the model's own loading code takes the "
    "rest: rules=ms.rules.from_transformers(model), if that is meant"
)


class Preparation(SlotAssignments):
    """A load that is planned and not yet executed.

    The constructor runs the model's loading protocol. `make_write` returns the write that executes an assignment. The
    write runs early where code of the model uses the tensor. Raises `ModelCodeError` where the model's code raises. The
    owner of the transaction must roll it back after such an error, and where there are problems.
    """

    def __init__(
        self,
        transaction: Transaction,
        view: ModelSchemaView,
        matched: MatchedCheckpoint,
        make_write: Callable[[Assignment], Write],
        call_extra_state: bool,
        plan: LoadPlan | None = None,
        stale_remedy: str = "make the plan again",
    ) -> None:
        """Plans a load, or binds an existing `plan` that has the same `matched` to the model.

        `stale_remedy` is the remedy of the error for a model that does not fit the plan.
        """
        super().__init__(transaction, view, matched, make_write)
        self._stale_remedy = stale_remedy
        self._call_extra_state = call_extra_state
        self._cause: Exception | None = None
        self._not_mapped = 0
        # Code of the model may change a lazy parameter before `plan` is called.
        self._signatures = signatures(self.slots) if not call_extra_state else {}
        if plan is not None:
            self._check_slots(plan.binding.slots)
        if plan is not None and not (plan.binding.runs_code or runs_code(self.slots.modules.values())):
            self._bind(plan)
        else:
            self._record()
            if plan is not None and not self.problems:
                self._check_steps(plan)
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

    def _bind(self, plan: LoadPlan) -> None:
        """Assigns values according to the steps of a plan. No code of the model runs, so no object is replaced."""
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
        for name in plan.binding.compared:
            coverage.hidden_buffer(self.slots.by_name[name], name)
        for name in plan.binding.moved:
            self.move(self.slots.by_name[name], self.device_after(self.slots.by_name[name].tensor))
        for slot in self.slots.tensors:
            if is_lazy(slot.tensor) and id(slot.tensor) not in self.filled:
                self.uninitialised.update(dict.fromkeys(slot.names, slot.tensor))

    def notes_on_mapping(self) -> list[str]:
        """Notes tensors that are read although the plan maps them: another process has opened the file for writing."""
        count = self._not_mapped
        return [f"{count} tensors are read into memory; when the plan was made, the file could be mapped"] * bool(count)

    def _check_slots(self, was: Mapping[str, SlotSignature]) -> None:
        """Raises `StalePlanError` where the slots of the model are not those of a plan."""
        now = signatures(self.slots)
        if was != now:
            changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
            raise self._stale(changed, was.get(changed[0]), now.get(changed[0]))

    def _check_steps(self, plan: LoadPlan) -> None:
        """Raises `StalePlanError` where code of the model loads differently than it did for the plan.

        Whether a file may be mapped also depends on other processes. A difference in maps does not make a plan stale.
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
                self.slots,
                self.incoming.state,
                self.matched.versions,
                assign=False,
                transaction=self.transaction,
                sink=self,
                outcome=outcome,
            )

    # The methods of `LoadSink`.

    def extra_state(self, module: nn.Module, key: str, value: Any) -> None:
        self.extra_states.append(key)
        # A plan calls the method that only checks, of classes that declare extra state. A load sets at once: an invalid
        # value sets nothing, and everything is undone where there are problems.
        take = module.set_extra_state if self._call_extra_state else getattr(module, CHECK_EXTRA_STATE, None)
        try:
            if isinstance(value, DecodeFailure):
                raise value.error
            if take is not None:
                take(value)
        except (ExtraStateError, CodecError) as error:
            self._cause = self._cause or error
            self.problems.append(BadExtraState(key, one_line(error), type(error).__name__))

    def tensor(self, key: str, param: torch.Tensor, value: Any, owner: Owner | None, errors: list[str]) -> None:
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
            self.assign(key, PARAMETER if isinstance(param, nn.Parameter) else BUFFER, param, value)

    def _check_quantized(self) -> None:
        """Adds problems for quantized values that cannot become the plain tensors of the model.

        Only the code of the quantized class can tell. It is called once for each class, with the first value and a copy
        of the model's tensor.
        """
        converts: dict[type, bool] = {}
        for assignment in self.assignments:
            is_transformed = assignment.transform is not None or assignment.remake is not None
            if assignment.plain or assignment.param.is_meta or is_transformed or is_plain(assignment.value):
                continue
            if not (is_plain(assignment.param) and is_quantized(assignment.value)) or lacks_values(assignment.value):
                continue
            cls = type(assignment.value.data)
            if cls not in converts:
                converts[cls] = self._becomes_plain(assignment)
            if not converts[cls]:
                expected, found = short(assignment.param.dtype), short(assignment.value.dtype)
                self.problems.append(QuantizedIntoPlain(assignment.name, expected, found, cls.__name__))

    def _becomes_plain(self, assignment: Assignment) -> bool:
        """Whether `module_load` accepts the value, as it will when the assignment is executed."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                stored = assignment.stored
                value = (
                    self.checkpoint.read(stored) if isinstance(stored, StoredComposite) else assignment.value.detach()
                )
                param = torch.empty_like(assignment.param)
                module_load(nn.Parameter(param, False) if assignment.kind == PARAMETER else param, value, assign=False)
        except ModelStateError:
            raise
        except Exception:
            return False
        return True

    @cached_attribute
    def _names(self) -> dict[int, str]:
        return {id(slot.tensor): slot.name for slot in self.slots.tensors}

    # Results.

    @property
    def names(self) -> tuple[str, str]:
        """The class of the model, and the source with the key of its part."""
        key = f" [{self.checkpoint.key}]" if self.checkpoint.key else ""
        return type(self.model).__name__, self.checkpoint.source + key

    def check(self) -> None:
        """Raises `PlanError` with all problems, if there are problems."""
        if self.problems:
            raise plan_error(*self.names, self.problems) from self._cause

    def plan(self) -> LoadPlan:
        """Returns the frozen plan."""
        target, source = self.names
        return LoadPlan(
            target=target,
            source=source,
            steps=self.steps(),
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            slots=self.slot_count,
            extra_bytes=peak_bytes(self.assignments, ReadStrategy.fastest()),
            binding=Binding(
                self.matched,
                self._signatures,
                self.transaction.armed,
                tuple(assignment.name for assignment in self.moves),
                tuple(self.compared),
            ),
        )

    @property
    def slot_count(self) -> int:
        """The number of slots that need a value."""
        tensors = sum(1 for slot in self.slots.tensors if slot.kind != HIDDEN or id(slot.tensor) in self.filled)
        return tensors + len(self.slots.extra) - len({id(param) for param in self.uninitialised.values()})

    def steps(self, *, with_sources: bool = True) -> tuple[Step, ...]:
        """Returns a step for each assignment, with its time, and one for each extra state.

        Steps without their sources hold no tensor.
        """
        ties, source_and_rules = self._ties, self.incoming.source_and_rules
        steps = []
        for assignment in self.assignments:
            source, rules = source_and_rules(assignment.given)
            step = Step(
                assignment.name,
                assignment.kind,
                source,
                assignment.placement,
                assignment.param.shape,
                assignment.dtype,
                assignment.value.dtype,
                assignment.device,
                assignment.nbytes,
                ties.get(assignment.name, ()),
                rules,
                assignment.route,
                assignment.stored if with_sources else None,
                assignment.seconds,
            )
            steps.append(step)
        return (*steps, *(Step(name, EXTRA, self.incoming.source_of(name), CALL) for name in self.extra_states))

    @cached_attribute
    def _ties(self) -> dict[str, tuple[str, ...]]:
        tied = [slot.names for slot in self.slots.tensors if len(slot.names) > 1]
        return {name: tuple(other for other in names if other != name) for names in tied for name in names}


def _same_but_for_mapping(step: Step | None, planned: Step | None) -> bool:
    """Whether two steps are equal except that one maps the file, or reads it at the commit, and the other does not."""
    if step is None or planned is None or step == planned:
        return step == planned
    is_other_read = step.mapped != planned.mapped or step.how.leased != planned.how.leased
    is_same_placement = _PLACE(step.how) == _PLACE(planned.how)
    return is_other_read and is_same_placement and step._replace(how=planned.how, route=planned.route) == planned


_PLACE = attrgetter("name", "by_handler")
"""What a placement does to a slot, however the bytes are read."""
