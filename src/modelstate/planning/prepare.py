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
from modelstate.planning.assignment import Assignment, Row, step_of
from modelstate.planning.coverage import CoverageCheck, fits
from modelstate.planning.initialise import Initialisers
from modelstate.planning.mapped_state import DecodeFailure, MappedState, entries_of
from modelstate.planning.matching import matching_part, wrapper_rule
from modelstate.planning.memory import MemoryTracker, peak_bytes, usual_means
from modelstate.planning.placement import Placement, choose
from modelstate.planning.plan import LoadPlan, Options, Step
from modelstate.planning.recorder import IncompatibleKeys, walk
from modelstate.planning.transforms import ModuleTransform, Transforms, asked_bytes, asked_rows, bound
from modelstate.problems import (
    BadExtraState,
    Complaint,
    FakeTensors,
    FreedMemory,
    NotATensor,
    NotYetInitialised,
    NoValues,
    NumPyArray,
    Problem,
    QuantizedCast,
    QuantizedIntoPlain,
    ShardedTensors,
    TieConflict,
    WrongDtype,
    model_errors,
    one_line,
    plan_error,
    wrong_shape,
)
from modelstate.process import cached_attribute
from modelstate.rules.expression import Derived, Source, lacks_values
from modelstate.rules.rule import describe
from modelstate.rules.schema import Applied, apply_rules, renamed_by
from modelstate.rules.transformers_mapping import from_transformers, is_transformers_model, notes_of
from modelstate.spec import ByteRange, StoredComposite, StoredTensor, overlapping
from modelstate.torch_compat.dtypes import Overflows, cast_between, short
from modelstate.torch_compat.plain import has_its_memory, is_fake, is_plain, is_quantized, is_sharded, same_place
from modelstate.torch_compat.private import module_load, storage_id
from modelstate.transaction.journal import Journal, Write
from modelstate.transaction.slots import BUFFER, EXTRA, HIDDEN, PARAMETER, Addresses, Slot, clash, overlap, slots_of

_CPU = torch.device("cpu")
CHECK_EXTRA_STATE = "_modelstate_check_extra_state"
"""The method of modules that can say what is wrong with an extra state without taking it."""
_FITS_IN_PART = (
    "transformers' conversion mapping makes the names fit only in part, and the model's own loading code takes the "
    "rest: rules=ms.rules.from_transformers(model), if that is meant"
)


class Preparation:
    """A load that has been planned and not yet carried out.

    The constructor runs the model's loading protocol. `make_write` gives the write that carries an assignment out,
    which happens early where code of the model looks at the tensor. Raises `ModelCodeError` where that code raises.
    Whoever made the journal has to undo what that code has done, then and where there are problems.
    """

    def __init__(
        self,
        journal: Journal,
        checkpoint: Checkpoint,
        options: Options,
        make_write: Callable[["Preparation", Assignment], Write],
        call_extra_state: bool,
    ) -> None:
        self.journal, self.model = journal, journal.root
        self._opened, self._asked = checkpoint, options
        self.slots = self.slots_before = slots_of(self.model)
        """What is there, from the end of the walk on: code of the model may have put in other tensors, or None."""
        wanted = [*self.slots.by_name, *self.slots.extra, *self.slots.lazy]
        self.transforms = Transforms(options.transform, self.model, self.slots)
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        schema = options.schema
        if options.key is not None:
            self.checkpoint = checkpoint.select(options.key)
        else:
            renamings = [partial(renamed_by, options.rules)] if schema is None else schema.renamings(checkpoint)
            self.checkpoint = matching_part(checkpoint, wanted, renamings)
            if rest := len(checkpoint) - len(self.checkpoint):
                self.notes.append(f"{rest} tensors of other parts of the checkpoint are not loaded")
        if schema is not None:  # the version is that of the part, whatever else is in the file
            options = replace(options, rules=schema.rules_for(self.checkpoint), schema=None)
        self.options = options
        self.overflows = Overflows()
        self.assignments: list[Assignment] = []
        self.moves: list[Assignment] = []
        """Tensors that no value goes to, and that only go to another device."""
        self.used: set[str] = set()
        """Names, after the rules, whose values have come to a slot."""
        self.uninitialised: dict[str, torch.Tensor] = {}
        """What stays as it is, since neither a lazy module here nor the one that was saved has made it."""
        self.initialised: set[str] = set()
        """Names of tensors that the checkpoint lacks, and that get their first values from the model's own code."""
        self.extra_states: list[str] = []
        self.means = usual_means()
        """What the bytes are read with."""
        self.max_memory_bytes: int | None = None
        """The most that the load may need beyond the final tensors."""
        self.held = MemoryTracker()
        """The memory that it takes."""
        self._make_write, self._call_extra_state = make_write, call_extra_state
        self._by_param: dict[int, Assignment] = {}
        self._by_storage: dict[int, list[Assignment]] = {}
        self._cause: Exception | None = None
        self._shown: dict[ByteRange, list[ByteRange]] = {}
        self.initialisers = Initialisers(self.model)
        applied, self._fits_in_part = None, False
        if not options.rules and is_transformers_model(self.model):
            applied = self._applied_mapping()
        self.incoming = MappedState(
            self.checkpoint, self.options.rules, self.slots, self.initialisers, journal, applied
        )
        self.notes += notes_of(self.options.rules, self.incoming.applied)
        self.problems += self.incoming.applied.problems
        self.notes += [self.incoming.wrapper_note] if self.incoming.wrapper_note else []
        self._keeps_stored_dtypes = options.dtype is None and any(map(self._is_for_meta, self.incoming.quantized))
        """Whether floats on meta get the dtypes of the checkpoint, which has quantized tensors: a layer computes in the
        dtype that its weight was quantized from, which no cast changes."""
        outcome = IncompatibleKeys()
        self._walk(outcome)
        self._check_quantized()
        if journal.armed:
            self.slots = slots_of(self.model)
        CoverageCheck(self, outcome).settle()
        if self._fits_in_part and not self.problems:
            self.problems.append(Complaint("", _FITS_IN_PART))
        self.incoming.settle()
        self.notes += self.incoming.maps.notes

    def _is_for_meta(self, name: str) -> bool:
        slot = self.slots.by_name.get(name)
        return slot is not None and slot.tensor.is_meta

    def _applied_mapping(self) -> Applied:
        """The checkpoint by its own names; by those that transformers' rules give it where more of them fit then.

        Where all of them fit that is loaded; otherwise it only makes the problems those that are left.
        """
        own = Applied(entries_of(self.checkpoint))
        if fits(self.slots, own.entries, self.options):
            return own
        try:
            rules = from_transformers(self.model)
            mapped = apply_rules(rules, own.entries, self.checkpoint.read)
        except Exception as error:  # a version of transformers whose mapping works in another way
            self.notes.append(f"transformers' conversion mapping cannot be used: {describe(error)}")
            return own
        if mapped.problems or self._fitting_names(mapped) <= self._fitting_names(own):
            return own
        self._fits_in_part = not fits(self.slots, mapped.entries, self.options)
        if self._fits_in_part and wrapper_rule(list(own.entries), self.slots.by_name, self.model) is not None:
            self._fits_in_part = False
            return own
        self.options = replace(self.options, rules=rules)
        return mapped

    def _fitting_names(self, applied: Applied) -> int:
        return len(applied.entries.keys() & self.slots.by_name.keys())

    def _walk(self, outcome: IncompatibleKeys) -> None:
        with model_errors("the model's own loading code", self.model):
            walk(
                self.model,
                self.incoming.state,
                self.incoming.versions,
                assign=False,
                journal=self.journal,
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

    def device_after(self, param: torch.Tensor) -> torch.device:
        return self.options.device or (_CPU if param.is_meta else param.device)

    def tensor(
        self, module: nn.Module, name: str, key: str, param: torch.Tensor, value: Any, assign: bool, errors: list[str]
    ) -> None:
        given = key
        if self.journal.armed:
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

    def assign(self, name: str, kind: str, param: torch.Tensor, value: torch.Tensor) -> None:
        """Takes down that `value` goes to `param`, or what keeps it from going there."""
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
        self.journal.add(self._make_write(self, made))

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

    def move(self, slot: Slot, device: torch.device) -> None:
        """Takes down that a tensor that gets no value goes to a device."""
        value = slot.tensor.detach()
        placement = Placement("data", f"moves to {device}")
        made = Assignment(
            slot.name, slot.kind, slot.tensor, value, "", value, placement, value.dtype, device, self.overflows
        )
        self.moves.append(made)
        self.journal.add(self._make_write(self, made))

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

    @cached_attribute
    def _names(self) -> dict[int, str]:
        return {id(slot.tensor): slot.name for slot in self.slots.tensors}

    @cached_attribute
    def own_memory(self) -> Addresses:
        """Where the tensors of the model lie."""
        return Addresses(slot.tensor for slot in self.slots.tensors)

    # What comes of it.

    def is_filled(self, param: torch.Tensor) -> bool:
        """Whether a value goes to this tensor, under whatever name."""
        return id(param) in self._by_param

    def value_of(self, name: str) -> Any:
        """What the checkpoint has under a name of the model's; None for nothing."""
        return self.incoming.state.get(name)

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
            steps=(*map(step_of, self.rows()), *self.calls()),
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

    def calls(self) -> list[Step]:
        """The steps of extra states."""
        source_of = self.incoming.source_of
        return [Step(name, EXTRA, source_of(name), "call", "set_extra_state takes it") for name in self.extra_states]

    def rows(self) -> "list[Row]":
        """What has to be known of each assignment to describe it. It holds no tensor."""
        ties, way_of = self._ties, self.incoming.way_of
        return [
            (
                made.name,
                made.kind,
                made.placement,
                made.param.shape,
                made.dtype,
                made.value.dtype,
                made.device,
                made.nbytes,
                ties.get(made.name, ()),
                way_of(made.given),
                made.way,
                made.seconds,
            )
            for made in self.assignments
        ]

    @cached_attribute
    def _ties(self) -> dict[str, tuple[str, ...]]:
        tied = [slot.names for slot in self.slots.tensors if len(slot.names) > 1]
        return {name: tuple(other for other in names if other != name) for names in tied for name in names}
