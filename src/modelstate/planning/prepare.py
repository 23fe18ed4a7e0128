"""How a plan comes about: the model's loading protocol, run against tensors that are mapped and not read.

What is left at the end is either a list of problems and a model that is as it was, or writes that wait for their
bytes, with everything known that could keep them from being carried out.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import CodecError, ExtraStateError, ModelStateError
from modelstate.planning.assignment import Assignment
from modelstate.planning.coverage import CoverageCheck, fits
from modelstate.planning.initialise import Initialisers
from modelstate.planning.mapped_state import DecodeFailure, MappedState, entries_of
from modelstate.planning.matching import matching_part, wrapper_rule
from modelstate.planning.memory import MemoryTracker, peak_bytes, usual_means
from modelstate.planning.placement import CALL
from modelstate.planning.plan import LoadPlan, Options, Step
from modelstate.planning.recorder import IncompatibleKeys, walk
from modelstate.planning.slot_assignments import SlotAssignments
from modelstate.planning.transforms import Transforms
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
from modelstate.rules.rule import describe
from modelstate.rules.schema import Applied, apply_rules, renamed_by
from modelstate.rules.transformers_mapping import from_transformers, is_transformers_model, notes_of
from modelstate.spec import StoredComposite
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.plain import is_plain, is_quantized
from modelstate.torch_compat.private import module_load
from modelstate.transaction.slots import BUFFER, EXTRA, HIDDEN, PARAMETER, Addresses, Slots, slots_of
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
    which entered the transaction, must not commit it in that case, nor where there are problems.
    """

    def __init__(
        self,
        transaction: Transaction,
        checkpoint: Checkpoint,
        options: Options,
        make_write: Callable[["Preparation", Assignment], Write],
        call_extra_state: bool,
    ) -> None:
        self._opened, self._asked = checkpoint, options
        root = transaction.root
        slots = slots_of(root)
        transforms, initialisers = Transforms(options.transform, root, slots), Initialisers(root)
        part, options = _selected(checkpoint, options, slots)
        applied, options, note, fits_in_part = _applied_mapping(part, options, slots, root)
        incoming = MappedState(part, options.rules, slots, initialisers, transaction, applied)
        super().__init__(transaction, part, options, slots, transforms, initialisers, incoming, make_write)
        self.means = usual_means()
        """How the bytes are read."""
        self.max_memory_bytes: int | None = None
        """The most memory that the load may need beyond the final tensors."""
        self.held = MemoryTracker()
        self._call_extra_state = call_extra_state
        self._cause: Exception | None = None
        if self._asked.key is None and (rest := len(checkpoint) - len(part)):
            self.notes.append(f"{rest} tensors of other parts of the checkpoint are not loaded")
        self.notes += [note] if note else []
        self.notes += notes_of(options.rules, incoming.applied)
        self.notes += [incoming.wrapper_note] if incoming.wrapper_note else []
        self.problems += incoming.applied.problems
        outcome = IncompatibleKeys()
        self._walk(outcome)
        self._check_quantized()
        if transaction.armed:
            self.slots = slots_of(self.model)
        CoverageCheck(self, outcome).settle()
        if fits_in_part and not self.problems:
            self.problems.append(Complaint("", _FITS_IN_PART))
        incoming.settle()
        self.notes += incoming.maps.notes

    def _walk(self, outcome: IncompatibleKeys) -> None:
        with model_errors("the model's own loading code", self.model):
            walk(
                self.model,
                self.incoming.state,
                self.incoming.versions,
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
            seen_by_rules = self.incoming.name_for_rules(given)
            self.problems.append(wrong_shape(key, tuple(param.size()), tuple(value.size()), seen_by_rules))
        else:
            self.assign(key, PARAMETER if name in module._parameters else BUFFER, param, value)

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


def _selected(checkpoint: Checkpoint, options: Options, slots: Slots) -> tuple[Checkpoint, Options]:
    """The part of the checkpoint that is loaded, and the options with the rules of a schema for that part."""
    if options.key is not None:
        part = checkpoint.select(options.key)
    else:
        schema = options.schema
        renamings = [partial(renamed_by, options.rules)] if schema is None else schema.renamings(checkpoint)
        part = matching_part(checkpoint, [*slots.by_name, *slots.extra, *slots.lazy], renamings)
    if options.schema is None:
        return part, options
    # The version is that of the part, whatever else is in the file.
    return part, replace(options, rules=options.schema.rules_for(part), schema=None)


def _applied_mapping(
    part: Checkpoint, options: Options, slots: Slots, model: nn.Module
) -> tuple[Applied | None, Options, str, bool]:
    """Applies transformers' conversion mapping to a checkpoint whose own names fit a model of transformers worse.

    Returns the entries, the options with the rules that led to them, a note, and whether the names fit only in part.
    The entries are None where the model is not of transformers, or rules are given.
    """
    if options.rules or not is_transformers_model(model):
        return None, options, "", False
    own = Applied(entries_of(part))
    if fits(slots, own.entries, options):
        return own, options, "", False
    try:
        rules = from_transformers(model)
        mapped = apply_rules(rules, own.entries, part.read)
    except Exception as error:  # a version of transformers whose mapping works in another way
        return own, options, f"transformers' conversion mapping cannot be used: {describe(error)}", False
    names = slots.by_name.keys()
    if mapped.problems or len(mapped.entries.keys() & names) <= len(own.entries.keys() & names):
        return own, options, "", False
    fits_in_part = not fits(slots, mapped.entries, options)
    if fits_in_part and wrapper_rule(list(own.entries), slots.by_name, model) is not None:
        return own, options, "", False
    return mapped, replace(options, rules=rules), "", fits_in_part
