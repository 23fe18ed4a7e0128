"""`CoverageCheck`: every name of the checkpoint and every slot of the model must have a counterpart."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from modelstate.planning.matching import Patterns, adapter_names, one_prefix
from modelstate.planning.recorder import IncompatibleKeys, loads_by_version
from modelstate.planning.slot_assignments import SlotAssignments
from modelstate.problems import (
    BufferConflict,
    Complaint,
    IdlePattern,
    Missing,
    NothingFits,
    NotYetInitialised,
    Problem,
    Unexpected,
    Uninitialised,
    UnmergedAdapter,
    wrong_shape,
)
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.plain import is_plain
from modelstate.transaction.slots import HIDDEN, Slot, same_values


class CoverageCheck:
    """Finds names without a counterpart, and slots without a value, after a walk."""

    def __init__(self, assignments: SlotAssignments, outcome: IncompatibleKeys) -> None:
        self.of, self.outcome = assignments, outcome
        options = assignments.options
        self.may_miss = Patterns("allow_missing", options.allow_missing, options.of_use)
        self.may_exceed = Patterns("allow_unexpected", options.allow_unexpected, options.of_use)

    def settle(self) -> None:
        """Adds the problems and notes of the load."""
        problems = self.of.problems
        misfits = {problem.name for problem in problems}  # names with a value that does not fit
        missing = [
            name for name in dict.fromkeys(self.outcome.missing) if not self._is_filled(name) and name not in misfits
        ]
        allowed = {name for name in missing if self.may_miss.allow(name)}
        unexpected = self._unexpected()
        has_matches = bool(self.of.assignments or self.of.uninitialised)
        initialised = self._initialised(missing, allowed) if self.of.options.init_missing else {}
        problems += self._differences([name for name in missing if name not in allowed], unexpected)
        problems += [Complaint("", message) for message in self.outcome.errors]
        unfilled = [slot for slot in self.of.slots.tensors if id(slot.tensor) not in self.of.filled]
        problems += self._uninitialised(unfilled, (set(missing) - allowed).union(problem.name for problem in problems))
        problems += self.may_miss.idle() + self.may_exceed.idle()
        problems += [IdlePattern(rule, option="rules") for rule in self.of.matched.applied.idle]
        problems += [*self.of.transforms.problems, *self.of.transforms.idle()]
        self._move(unfilled)
        if any(slot.kind != HIDDEN for slot in self.of.slots.tensors) and not has_matches and not problems:
            problems.append(NothingFits(type(self.of.model).__name__))
        self._note_lost_versions()
        self._note_own_code(missing, unexpected, unfilled)
        self._note_options()
        if computed := self._computed():
            self._note(computed, "made by the model's own loading code")
        if self.of.uninitialised:
            self._note(self.of.uninitialised, "stay uninitialised, as they were when the checkpoint was saved")
        for how in dict.fromkeys(initialised.values()):
            self._note([name for name in initialised if initialised[name] == how], f"initialised by {how}")
        if left := allowed - initialised.keys():
            self._note(left, "left as they are, as allowed by allow_missing")

    def _initialised(self, missing: Sequence[str], allowed: set[str]) -> dict[str, str]:
        """Initialises missing tensors with the model's own methods. Returns the methods by the names of the tensors.

        A tensor that has values and may be missing keeps its values.
        """
        lacking = [self.of.slots.by_name[name] for name in missing if name in self.of.slots.by_name]
        wanted = [slot for slot in lacking if slot.tensor.is_meta or not allowed.issuperset(slot.names)]
        wanted += [slot for slot in self.of.slots.tensors if slot.tensor.is_meta]
        misfits = {problem.name for problem in self.of.problems}  # names with a value that does not fit
        initialised: dict[str, str] = {}
        for slot in wanted:
            if id(slot.tensor) in self.of.filled or is_lazy(slot.tensor) or not misfits.isdisjoint(slot.names):
                continue
            if how := self.of.initialise(slot):
                initialised[slot.name] = how
        return initialised

    def _methods_for(self, slot: Slot) -> str:
        """The methods of the model that initialise a tensor; empty without such methods."""
        return next(
            (initialiser.how for name in slot.names if (initialiser := self.of.view.initialisers.find(name))), ""
        )

    def _is_filled(self, name: str) -> bool:
        slot = self.of.slots.by_name.get(name)
        return slot is not None and id(slot.tensor) in self.of.filled

    def _fitting(self) -> set[str]:
        """Names that are the same on both sides."""
        return self.of.incoming.entries.keys() & self.of.slots.by_name.keys()

    def _computed(self) -> list[str]:
        """Names that the checkpoint lacks and whose values the model's code computed."""
        return [item.name for item in self.of.assignments if not item.given and item.kind != HIDDEN]

    def _unexpected(self) -> list[str]:
        """Unexpected names that are not allowed, and fill no non-persistent buffer."""
        left, passed, equal = [], [], []
        for name in dict.fromkeys(self.outcome.unexpected):
            slot = self.of.slots.by_name.get(name)
            if self.may_exceed.allow(self.of.incoming.source_of(name)) or self.may_exceed.allow(name):
                passed.append(name)
            elif slot is not None and slot.kind == HIDDEN:
                equal += self.hidden_buffer(slot, name)
            else:
                left.append(name)
        if passed:
            self._note(passed, "passed over, as allowed by allow_unexpected")
        if equal:
            self._note(equal, "passed over: non-persistent buffers that hold the same already")
        return left

    def hidden_buffer(self, slot: Slot, name: str) -> list[str]:
        """Fills a non-persistent buffer on meta; elsewhere the value must equal the buffer. Returns equal names."""
        value, buffer = self.of.value_of(name), slot.tensor
        if is_lazy(value):
            self.of.problems.append(NotYetInitialised(name))
        elif not isinstance(value, torch.Tensor) or value.shape != buffer.shape:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            self.of.problems.append(wrong_shape(name, tuple(buffer.shape), found, self.of.matched.name_for_rules(name)))
        elif buffer.is_meta:
            self.of.assign(name, HIDDEN, buffer, value)
        elif self._equal(self.of.incoming.with_values(value), buffer):
            self.of.compared.append(name)
            return [name]
        else:
            self.of.problems.append(BufferConflict(name))
        return []

    @staticmethod
    def _equal(value: torch.Tensor, buffer: torch.Tensor) -> bool:
        if not is_plain(value, buffer) or value.is_meta:
            return False
        if (value.dtype, value.device) == (buffer.dtype, buffer.device):
            return same_values(value, buffer)
        common = torch.promote_types(value.dtype, buffer.dtype)
        return same_values(value.to(buffer.device, common), buffer.to(common))

    def _differences(self, missing: list[str], unexpected: list[str]) -> Iterable[Problem]:
        computed = self._computed()
        lacking = {name: self._slot_shape(name) for name in (*missing, *computed)}
        over = {name: self._value_shape(name) for name in unexpected}
        adapter = [] if adapter_names(self.of.slots.by_name) else adapter_names(unexpected)
        yield from map(UnmergedAdapter, adapter)
        unexpected = [name for name in unexpected if name not in adapter] if adapter else unexpected
        # A user's rule sees the names before wrappers are removed. The names that are compared here are others.
        is_simple = not (adapter or self.of.matched.before_wrappers)
        other_names, pairs = (
            one_prefix(lacking, over, fitting=self._fitting(), optional=computed) if is_simple else (None, {})
        )
        if other_names is not None:
            yield other_names
            for name, source in pairs.items():
                expected, found = lacking[name], over[source]
                if expected is not None and found is not None and expected != found:
                    yield wrong_shape(name, expected, found)
            return
        for name in missing:
            if not self._is_filled(name):  # the model's initialisation has filled some
                yield Missing(name, lacking[name], *self._first_value(name))
        for name in unexpected:
            why = "registered as None in the model" if name in self.of.slots.empty else ""
            yield Unexpected(name, over[name], why)

    def _first_value(self, name: str) -> tuple[bool, str | None]:
        """Whether a tensor has values, and the methods that would initialise it (None where they do not matter)."""
        slot = self.of.slots.by_name.get(name)
        if slot is None or is_lazy(slot.tensor):
            return True, None
        has_values = not slot.tensor.is_meta
        return has_values, None if has_values and not self.of.options.init_missing else self._methods_for(slot)

    def _uninitialised(self, unfilled: Sequence[Slot], reported: set[str]) -> Iterable[Problem]:
        for slot in unfilled:
            if slot.tensor.is_meta and reported.isdisjoint(slot.names):
                yield Uninitialised(slot.name, slot.kind, self._methods_for(slot))

    def _note_own_code(self, missing: list[str], unexpected: list[str], unfilled: Sequence[Slot]) -> None:
        """Notes names that the model's own loading code handled: they are neither assigned nor missing."""
        of = self.of
        named = {*missing, *unexpected, *self.outcome.unexpected, *of.extra_states, *of.uninitialised}
        named.update(problem.name for problem in of.problems)
        if gone := of.incoming.entries.keys() - of.used - named:
            self._note(gone, "went into the model's own loading code")
        known = {*named, *self.outcome.missing}
        if absent := [name for name in of.slots.extra if name not in known]:
            self._note(absent, "extra states that the checkpoint lacks, as their classes allow")
        still = [slot.name for slot in unfilled if slot.kind != HIDDEN]
        if left := [name for name in still if name not in named]:
            self._note(left, "left to the model's own loading code")
        if emptied := of.slots.empty & of.slots_before.by_name.keys():
            self._note(emptied, "become None, as the model's own loading code says")

    def _note_options(self) -> None:
        """Notes effects of the arguments that a plan cannot check."""
        changed = [
            assignment.name
            for assignment in self.of.assignments
            if not assignment.param.is_meta and assignment.param.dtype != assignment.dtype
        ]
        if changed:
            self._note(changed, "change their dtype: pass optimizers= that have state for them")
        self._note_stored_dtypes()
        if later := [assignment.name for assignment in self.of.assignments if assignment.transform is not None]:
            if len(later) == len(self.of.assignments):
                self.of.notes.append("shapes and dtypes are checked when the transform has returned")
            else:
                self._note(later, "have their shapes and dtypes checked when their transform has returned")

    def _note_stored_dtypes(self) -> None:
        """Notes tensors that get another dtype than the model's, because the checkpoint has quantized tensors."""
        if self.of.options.dtype is not None:
            return
        others = [
            assignment
            for assignment in self.of.assignments
            if assignment.param.is_meta and assignment.param.dtype != assignment.dtype
        ]
        if others:
            stored = ", ".join(sorted({short(assignment.dtype) for assignment in others}))
            own = ", ".join(sorted({short(assignment.param.dtype) for assignment in others}))
            what = f"get the checkpoint's {stored} instead of the model's {own}, as it has quantized tensors"
            self._note([assignment.name for assignment in others], what)

    def _note_lost_versions(self) -> None:
        """Notes modules whose loading code depends on a version that the checkpoint lacks."""
        if not self.of.transaction.armed:
            return  # no module has loading code of its own
        versions = self.of.matched.versions or {}
        deciding = {
            type(module).__name__
            for path, module in self.of.model.named_modules()
            if path not in versions and loads_by_version(module)
        }
        if deciding:
            self.of.notes.append(
                f"the checkpoint has no version metadata (torch's _metadata) for {', '.join(sorted(deciding))}: "
                "they load it as the oldest version"
            )

    def _move(self, unfilled: Sequence[Slot]) -> None:
        """With `device=`, moves the tensors that get no value to the device too."""
        device = self.of.options.device
        if device is None:
            return
        for slot in unfilled:
            if is_lazy(slot.tensor):
                continue  # has no values; its module moves it
            if not slot.tensor.is_meta and slot.tensor.device != device:
                self.of.move(slot, device)
        if self.of.moves:
            self._note([assignment.name for assignment in self.of.moves], f"only moved to {device}")

    def _slot_shape(self, name: str) -> tuple[int, ...] | None:
        slot = self.of.slots.by_name.get(name)
        if slot is None or is_lazy(slot.tensor):
            return None
        return tuple(slot.tensor.shape)

    def _value_shape(self, name: str) -> tuple[int, ...] | None:
        value: Any = self.of.value_of(name)
        return tuple(value.shape) if isinstance(value, torch.Tensor) and not is_lazy(value) else None

    def _note(self, names: Collection[str], what: str) -> None:
        listed = sorted(names)
        shown = ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")
        self.of.notes.append(f"{len(listed)} {what}: {shown}")
