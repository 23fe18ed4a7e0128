"""`check_coverage`: accounts for every name of the checkpoint and every slot of the model when the values are planned.

Each must have a counterpart. The result is either a list of problems and an unchanged model, or writes that wait for
their bytes. Everything that could keep the writes from being executed has then been checked.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import keep_interrupt
from modelstate.formats.sharded import other_shards
from modelstate.formats.tree import leaves
from modelstate.planning.mapped_state import MappedState
from modelstate.planning.matching import Patterns, adapter_names, one_prefix, prefixes
from modelstate.planning.planner import Planner
from modelstate.planning.recorder import IncompatibleKeys, outermost
from modelstate.planning.transfer import Execution, RowFacts, Transfers, Way, with_way
from modelstate.problems import Problem, ProblemKind
from modelstate.rules.expression import Derived, Source, lacks_values
from modelstate.rules.rule import Entry, Value
from modelstate.spec import StoredComposite, StoredTensor
from modelstate.text_format import listed
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.modules import changes_state, overrides_loading, state_dict_of
from modelstate.torch_compat.plain import is_plain, is_quantized, same_values
from modelstate.torch_compat.private import storage_id
from modelstate.transaction.slots import HIDDEN, PARAMETER, Slot, clash, overlapping, place_of, sharing, slots_of

_FITS_IN_PART = (
    "transformers' conversion mapping makes the names fit only in part, and the model's own loading code takes the "
    "rest: rules=ms.rules.from_transformers(model), if that is meant"
)

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The attributes that each module has: the tensors in them are slots."""
_MAY_HOLD_TENSORS = (torch.Tensor, dict, list, tuple)


def check_coverage(planner: Planner, outcome: IncompatibleKeys, is_complete: bool) -> None:
    """Adds the problems and notes of special values, of names without a counterpart, and of slots without a value.

    Args:
        planner: The planner, which has all values.
        outcome: What the loading protocol has found.
        is_complete: Whether all names and slots have a counterpart, and no code or option has a say.
    """
    if planner.singles:
        _check_quantized(planner)
    if planner.transaction.armed:
        planner.slots = slots_of(planner.model)
    if on_meta := [slot for slot in planner.slots.tensors if slot.tensor.is_meta]:
        _check_meta(planner, on_meta)
    if planner.problems or not is_complete:
        _Coverage(planner, outcome).settle()
    if planner.singles:
        _check_overlaps(planner)


def _check_meta(planner: Planner, on_meta: Sequence[Slot]) -> None:
    """Adds what a load cannot fill: slots of TorchScript, whose C++ objects would keep the old tensors; attributes."""
    modules, known = planner.slots.modules, {id(slot.tensor) for slot in on_meta}
    scripted = {prefix for prefix, module in modules.items() if isinstance(module, torch.jit.ScriptModule)}
    stay = (slot.name for slot in on_meta if scripted and slot.name[: slot.name.rfind(".") + 1] in scripted)
    planner.problems += [Problem(ProblemKind.SCRIPTED_ON_META, name) for name in stay]
    names = list[str]()
    for prefix, module in modules.items():
        own = vars(module)
        for name in own.keys() - _OF_EVERY_MODULE:
            if isinstance(value := own[name], _MAY_HOLD_TENSORS):
                held = value.values() if isinstance(value, dict) else [value] if torch.is_tensor(value) else value
                unknown = [each for each in held if torch.is_tensor(each) and each.is_meta and id(each) not in known]
                names += [prefix + name] * len(unknown)
    what = "attributes are tensors on meta, which no load fills: assign them, or register them as buffers"
    _note(planner, names, what)


def _note(planner: Planner, names: Collection[str], what: str) -> None:
    if names:
        planner.notes.append(f"{len(names)} {what}: {listed(sorted(names), 4)}")


def _check_quantized(planner: Planner) -> None:
    """Adds problems for quantized values that cannot become the plain tensors of the model.

    Only the code of the quantized class can tell. It is called once for each class, with the first value and a copy
    of the model's tensor.
    """
    converts: dict[type, bool] = {}
    for item in (single.transfers for single in planner.singles):
        param, value = item.param, item.facts.value
        is_target = is_plain(param) and not (param.is_meta or item.facts.is_transformed)
        if not (is_target and is_quantized(value)) or lacks_values(value):
            continue
        cls = type(value.data)
        if cls not in converts:
            converts[cls] = _becomes_plain(planner.checkpoint, item)
        if not converts[cls]:
            expected, found = short(param.dtype), f"{cls.__name__} of {short(value.dtype)}"
            planner.problems.append(Problem(ProblemKind.QUANTIZED_INTO_PLAIN, item.name, expected, found))


@torch.inference_mode(False)
@torch.no_grad()
def _becomes_plain(checkpoint: Checkpoint, item: Transfers) -> bool:
    """Whether `module_load` accepts the value, as it will when the item is executed."""
    stored = item.facts.stored
    value = checkpoint.read(stored) if isinstance(stored, StoredComposite) else item.facts.value.detach()
    try:
        param = torch.empty_like(item.param)
        target = nn.Parameter(param, False) if item.kinds == [PARAMETER] else param
        target.module_load(value, assign=False)  # type: ignore[no-untyped-call]
    except Exception as error:
        keep_interrupt(error)
        return False
    return True


def _check_overlaps(planner: Planner) -> None:
    """Adds problems of slots whose memory overlaps, where one would overwrite the values of the other."""
    items = [item for single in planner.singles if is_plain((item := single.transfers).param, item.facts.value)]
    in_memory = [item for item in items if not item.param.is_meta and storage_id(item.param)]
    for group in sharing(in_memory, [item.param for item in in_memory]):
        # Where many slots are the same view of the same memory, each is compared with the first of them only.
        first_at: dict[Hashable, Transfers] = {}
        pairs = [(first_at.setdefault(place_of(second.param), second), second) for second in group]
        distinct = list(first_at.values())
        pairs += overlapping(distinct, [item.param for item in distinct])
        for first, second in pairs:
            if first is second or any(item.facts.value.shape != item.param.shape for item in (first, second)):
                continue
            if second.way not in (Way.INTO, Way.STAGED):
                planner.notes.append(f"{first.name} and {second.name} share memory now, and not after the load")
            elif _clash(planner.incoming, first, second):
                planner.problems.append(planner.tie_conflict(second.name, first.name))


def _clash(incoming: MappedState, first: Transfers, second: Transfers) -> bool:
    """Whether a write of the second value changes elements of the first one."""
    is_whole = first.facts.sharded is None and second.facts.sharded is None
    if is_whole and place_of(first.param) == place_of(second.param):
        return not incoming.are_equal(first.facts.value, second.facts.value)
    # The values of a part of a DTensor are mapped. The local part of a deferred value is never computed.
    values = [
        incoming.maps.tensor(facts.stored)
        if facts.sharded is not None and isinstance(facts.stored, StoredTensor)
        else incoming.with_values(facts.value)
        for facts in (first.facts, second.facts)
    ]
    return clash(first.param, values[0], second.param, values[1])


class _Coverage:
    """Finds names without a counterpart, and slots without a value."""

    def __init__(self, planner: Planner, outcome: IncompatibleKeys) -> None:
        self.planner, self.outcome, self.problems = planner, outcome, planner.problems
        self.slots, self.options, self.filled = planner.slots, planner.options, planner.filled
        self.entries = planner.matched.applied.entries
        self.may_miss = Patterns("allow_missing", self.options.allow_missing)
        self.may_exceed = Patterns("allow_unexpected", self.options.allow_unexpected)
        values = [single.transfers for single in planner.singles]
        self.computed = [item.name for item in values if not item.facts.given and item.kinds != [HIDDEN]]
        """Names that the checkpoint lacks and whose values the model's code computed."""
        known = planner.used.union(outcome.unexpected, planner.extra_states, planner.uninitialised)
        self.taken = sorted(self.entries.keys() - known)
        """Names that the model's own loading code has removed from the state dict."""

    def settle(self) -> None:
        """Adds the problems and notes of the load."""
        planner, problems, outcome, by_name = self.planner, self.problems, self.outcome, self.slots.by_name
        for name in self._without_problems(self.taken):
            content = self.entries[name].content
            if isinstance(content, Value) and content.error:
                planner.unread(name, content.error)
        # A pattern of a name that the checkpoint lacks is not idle, even if a tie fills it.
        for name in by_name.keys() - self.slots.left_out - self.entries.keys():
            self.may_miss.allow(name)
        # Names with a value that does not fit have a problem already.
        filled = {name for slot in self.slots.tensors if id(slot.tensor) in self.filled for name in slot.names}
        missing = self._without_problems(name for name in dict.fromkeys(outcome.missing) if name not in filled)
        left_out = self._left_out(missing)
        # A name may be missing where it is allowed, or another name of the same tensor is.
        names_of = {name: by_name[name].names if name in by_name else (name,) for name in missing}
        allowed = left_out.union(name for name in missing if any(map(self.may_miss.allow, names_of[name])))
        of_quantized = self._quantized([name for name in missing if name not in allowed])
        missing = self._without_problems(missing)
        unexpected = [name for name in self._unexpected() if name not in of_quantized]
        has_matches = bool(self.filled or planner.uninitialised or outcome.called)
        if self.options.init_missing:
            self._initialise({*missing}, allowed)
        problems += self._differences([name for name in missing if name not in allowed], unexpected)
        problems += [Problem(ProblemKind.COMPLAINT, "", why=message) for message in outcome.errors]
        unfilled = [slot for slot in self.slots.tensors if id(slot.tensor) not in self.filled]
        problems += self._uninitialised(unfilled, {*missing} - allowed | self._reported())
        problems += self.may_miss.idle() + self.may_exceed.idle()
        problems += [Problem(ProblemKind.IDLE_PATTERN, rule, found="rules") for rule in planner.matched.applied.idle]
        if planner.transforms is not None:
            problems += [*planner.transforms.problems, *planner.transforms.idle()]
        if (device := self.options.device) is not None:
            for slot in unfilled:  # a lazy tensor has no values; its module moves it
                if not (is_lazy(slot.tensor) or slot.tensor.is_meta or slot.tensor.device == device):
                    columns, value = ([slot.name], [slot.kind], [slot.tensor]), slot.tensor.detach()
                    facts = RowFacts(value=value, given="", stored=value)
                    item = Transfers(*columns, [value.dtype], device, why=f"moves to {device}", own=facts)
                    planner.moves.append(move := Execution(with_way(item)))
                    planner.transaction.add(planner.make_write(move))
            _note(planner, [item.transfers.name for item in planner.moves], f"only moved to {device}")
        if any(slot.kind != HIDDEN for slot in self.slots.tensors) and not has_matches and not problems:
            problems.append(Problem(ProblemKind.NOTHING_FITS, type(planner.model).__name__))
        if planner.transaction.armed:
            self._note_lost_versions()
        if self._note_own_code(unfilled) and planner.matched.is_mapped_by_transformers and not problems:
            problems.append(Problem(ProblemKind.COMPLAINT, "", why=_FITS_IN_PART))
        self._note_dtypes()
        _note(planner, self.computed, "made by the model's own loading code")
        _note(planner, planner.uninitialised, "stay uninitialised, as they were when the checkpoint was saved")
        initialised = [slot.name for slot in self.slots.tensors if slot.name in planner.initialised]
        for (how,) in dict.fromkeys(planner.initialised[name].rules for name in initialised):
            names = [name for name in initialised if planner.initialised[name].rules == (how,)]
            _note(planner, names, f"initialised by {how}")
        _note(planner, allowed - planner.initialised.keys() - left_out, "left as they are, as allowed by allow_missing")
        _note(planner, left_out, "left as they are: the model's own state_dict leaves them out")

    # Names and slots.

    def _reported(self) -> set[str]:
        return {problem.name for problem in self.problems}

    def _without_problems(self, names: Iterable[str]) -> list[str]:
        reported = self._reported()
        return [name for name in names if name not in reported]

    def _left_out(self, missing: Sequence[str]) -> set[str]:
        """Returns the missing tensors of the model that its own code keeps out of its state dict."""
        slots, left_out = self.slots.by_name, set[str]()
        for path, module in outermost(self.planner.model) if missing else ():
            own = [name for name in missing if name in slots and name.startswith(path)]
            if own and changes_state(module):
                state = dict(leaves(state_dict_of(module)))
                saved = {storage_id(value) for value in state.values() if isinstance(value, torch.Tensor)}
                own = [name for name in own if name.removeprefix(path) not in state]
                left_out.update(name for name in own if storage_id(slots[name].tensor) not in saved)
        return left_out

    def _quantized(self, missing: Sequence[str]) -> set[str]:
        """Adds a problem for each plain weight that the checkpoint has quantized, in place of other problems with it.

        Returns the names that belong to these weights. A rule or a transform that changes the dtype of the numbers is
        taken to be meant.
        """
        planner, entries, unexpected = self.planner, self.entries, {*self.outcome.unexpected}
        if not (unexpected or planner.matched.rules):
            return set()
        from modelstate.planning.quantized import QuantizedCandidate, quantized_weights
        from modelstate.rules.joining import SCALABLE

        reported, candidates = self._reported(), [QuantizedCandidate(name, name) for name in missing]
        singles = (each.transfers for each in planner.singles)
        meant = {id(item.slot_tensors[0]) for item in singles if item.facts.transform is not None}
        for slot in self.slots.tensors:
            name = next((name for name in slot.names if name in entries), "")
            tensor, param = entries[name].tensor if name else None, slot.tensor
            if tensor is None or tensor.dtype == param.dtype or is_quantized(param):
                continue
            has_numbers = param.is_floating_point() and param.dtype not in SCALABLE and tensor.dtype in SCALABLE
            if id(param) not in meant and (has_numbers or not reported.isdisjoint(slot.names)):
                candidates += [QuantizedCandidate(slot.name, source, has_numbers) for source in entries[name].sources]
        used = {source for name in entries.keys() - unexpected for source in entries[name].sources}
        left, given = (planner.checkpoint.keys() | unexpected) - used, planner.matched.given.get("rules")
        quantized, names = quantized_weights(candidates, planner.checkpoint, left, (given,) if given else ())
        replaced = {problem.name for problem in quantized}
        self.problems[:] = [*(problem for problem in self.problems if problem.name not in replaced), *quantized]
        sources = {name: entries[name].sources or (name,) for name in unexpected & entries.keys()}
        return names | {name for name in sources if names.issuperset(sources[name])}

    def _unexpected(self) -> list[str]:
        """Unexpected names that are not allowed, and fill no non-persistent buffer."""
        left, passed, equal = [], [], []
        for name in dict.fromkeys(self.outcome.unexpected):
            slot = self.slots.by_name.get(name)
            if self.may_exceed.allow(name) or self.may_exceed.allow(self.planner.source_of(name)):
                passed.append(name)
            elif slot is None or slot.kind != HIDDEN:
                left.append(name)
            elif self._is_filled(slot, name):
                equal.append(name)
        _note(self.planner, passed, "passed over, as allowed by allow_unexpected")
        _note(self.planner, equal, "passed over: non-persistent buffers that hold the same already")
        return left

    def _is_filled(self, slot: Slot, name: str) -> bool:
        """Whether a non-persistent buffer has the value. One on meta gets it; elsewhere another value is a problem."""
        planner, buffer = self.planner, slot.tensor
        value, is_equal = planner.incoming.value(name), False
        if buffer.is_meta or not isinstance(value, torch.Tensor) or is_lazy(value) or value.shape != buffer.shape:
            planner.tensor(name, buffer, value, None, [])
            return False
        value = planner.incoming.with_values(value)
        if is_plain(value, buffer) and not value.is_meta:
            common = torch.promote_types(value.dtype, buffer.dtype)
            is_equal = same_values(value.to(buffer.device, common), buffer.to(common))
        if not is_equal:
            seen = planner.other_name(name)
            self.problems.append(Problem(ProblemKind.BUFFER_CONFLICT, name, name_for_rules=seen))
        return is_equal

    def _initialise(self, missing: set[str], allowed: set[str]) -> None:
        """Initialises missing tensors with the model's own methods.

        A tensor that has values and may be missing keeps its values.
        """
        planner, reported = self.planner, self._reported()
        for slot in self.slots.tensors:
            tensor = slot.tensor
            is_required = not (missing.isdisjoint(slot.names) or allowed.issuperset(slot.names))
            is_settled = id(tensor) in self.filled or is_lazy(tensor) or not reported.isdisjoint(slot.names)
            if is_settled or not (is_required or tensor.is_meta):
                continue
            if (initialiser := planner.view.initialiser_of(slot)) is not None:
                stored = Derived(tensor.dtype, tuple(tensor.shape), (), initialiser.make, is_certain=False)
                planner.initialised.update(dict.fromkeys(slot.names, Entry(stored, (), (initialiser.how,))))
                planner.tensor(slot.name, tensor, planner.incoming.value(slot.name), None, [])

    # Problems.

    def _differences(self, missing: list[str], unexpected: list[str]) -> Iterable[Problem]:
        if missing and (shard := other_shards(self.planner.checkpoint.files)):
            file, index, others = shard
            yield Problem(ProblemKind.ONE_SHARD, file, found=index or None, others=others)
        slots, entries = self.slots.by_name, self.entries
        lacking = {name: _shape(slots[name].tensor if name in slots else None) for name in (*missing, *self.computed)}
        over = {name: _shape(entries[name].tensor if name in entries else None) for name in unexpected}
        adapter = {} if adapter_names(slots) else dict.fromkeys(adapter_names(unexpected))
        yield from (Problem(ProblemKind.UNMERGED_ADAPTER, name) for name in adapter)
        # A user's rule sees the names before wrappers are removed. The names that are compared here are others.
        if not (adapter or self.planner.matched.before_wrappers):
            fitting = entries.keys() & slots.keys()
            if other_names := one_prefix(lacking, over, fitting=fitting, optional=self.computed):
                yield from other_names
                return
        for name in missing:
            slot = slots.get(name)
            if slot is None or id(slot.tensor) not in self.filled:  # the model's initialisation has filled some
                how = self._methods_for(slot)
                has_values = how is None or (slot is not None and not slot.tensor.is_meta)
                yield Problem(ProblemKind.MISSING, name, lacking[name], has_values=has_values, initialiser=how)
        for name in unexpected:
            if name not in adapter:
                why, seen = "registered as None in the model", self.planner.other_name(name)
                why = why if name in self.slots.empty else ""
                yield Problem(ProblemKind.UNEXPECTED, name, found=over[name], why=why, name_for_rules=seen)

    def _methods_for(self, slot: Slot | None) -> str | None:
        """The methods of the model that initialise a tensor, empty without such methods; None where none is needed."""
        if slot is None or is_lazy(slot.tensor) or not (slot.tensor.is_meta or self.options.init_missing):
            return None
        initialiser = self.planner.view.initialiser_of(slot)
        return "" if initialiser is None else initialiser.how

    def _uninitialised(self, unfilled: Sequence[Slot], reported: set[str]) -> Iterable[Problem]:
        without_values = [slot for slot in unfilled if slot.tensor.is_meta and reported.isdisjoint(slot.names)]
        taken_below: dict[str, list[str]] = {}
        for name in self.taken if without_values else ():
            for prefix in ("", *prefixes(name)) if name not in reported else ():
                taken_below.setdefault(prefix, []).append(name)
        for slot in without_values:
            of_owner = taken_below.get(slot.name[: slot.name.rfind(".") + 1], [])
            how, why = self._methods_for(slot), listed(of_owner, 3)
            yield Problem(ProblemKind.UNINITIALISED, slot.name, found=slot.kind, why=why, initialiser=how)

    # Notes.

    def _note_own_code(self, unfilled: Sequence[Slot]) -> bool:
        """Notes names that the model's own loading code handled: they are neither assigned nor missing.

        Returns whether it handled any.
        """
        planner, named = self.planner, self._reported().union(self.outcome.missing, self.outcome.unexpected)
        named.update(planner.extra_states, planner.uninitialised)
        taken = [name for name in self.taken if name not in named]
        _note(planner, taken, "went into the model's own loading code")
        absent = [name for name in self.slots.extra if name not in named]
        _note(planner, absent, "extra states that the checkpoint lacks, as their classes allow")
        still = [slot.name for slot in unfilled if slot.kind != HIDDEN and slot.name not in named]
        _note(planner, still, "left to the model's own loading code")
        emptied = self.slots.empty & planner.slots_before.by_name.keys()
        _note(planner, emptied, "become None, as the model's own loading code says")
        return bool(taken or still or self.computed)

    def _note_lost_versions(self) -> None:
        """Notes modules whose loading code depends on a version that the checkpoint lacks."""
        versions = self.planner.matched.versions or {}
        named = self.planner.model.named_modules()
        own = [module for path, module in named if path not in versions and overrides_loading(module)]
        deciding = {type(module).__name__ for module in own if getattr(module, "_version", None) not in (None, 1)}
        if deciding:
            lacks = "the checkpoint has no version metadata (torch's _metadata) for"
            self.planner.notes.append(f"{lacks} {', '.join(sorted(deciding))}: they load it as the oldest version")

    def _note_dtypes(self) -> None:
        """Notes tensors that get another dtype than the model's."""
        changed = [item for item in (each.transfers for each in self.planner.singles) if item.param.dtype != item.dtype]
        live = [item.name for item in changed if not item.param.is_meta]
        _note(self.planner, live, "change their dtype: pass optimizers= that have state for them")
        if self.options.dtype is None and (on_meta := [item for item in changed if item.param.is_meta]):
            stored = ", ".join(sorted({short(item.dtype) for item in on_meta}))
            own = ", ".join(sorted({short(item.param.dtype) for item in on_meta}))
            what = f"get the checkpoint's {stored} instead of the model's {own}, as it has quantized tensors"
            _note(self.planner, [item.name for item in on_meta], what)


def _shape(tensor: Source | None) -> tuple[int, ...] | None:
    """The shape of a tensor; None for one that has none yet."""
    if tensor is None or (isinstance(tensor, torch.Tensor) and is_lazy(tensor)):
        return None
    return tuple(tensor.shape)
