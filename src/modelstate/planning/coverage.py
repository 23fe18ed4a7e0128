"""`check_coverage`: accounts for every name of the checkpoint and every slot of the model when the values are planned.

Each must have a counterpart. The result is either a list of problems and an unchanged model, or writes that wait for
their bytes. Everything that could keep the writes from being executed has then been checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import ModelStateError, keep_interrupt
from modelstate.formats.sharded import other_shards
from modelstate.formats.tree import leaves
from modelstate.planning.matching import Patterns, StoredEntries, adapter_names, one_prefix, prefixes
from modelstate.planning.planner import Planner
from modelstate.planning.recorder import IncompatibleKeys, outermost
from modelstate.planning.transfer import Transfers
from modelstate.problems import Problem, ProblemKind, wrong_shape
from modelstate.rules.expression import Source, lacks_values
from modelstate.rules.rule import Value
from modelstate.spec import StoredComposite
from modelstate.text_format import listed
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.modules import changes_state, overrides_loading, state_dict_of
from modelstate.torch_compat.plain import is_plain, is_quantized
from modelstate.torch_compat.private import storage_id
from modelstate.transaction.slots import HIDDEN, PARAMETER, Slot, slots_of

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


def _check_meta(planner: Planner, on_meta: Sequence[Slot]) -> None:
    """Adds what a load cannot fill: slots of TorchScript, whose C++ objects would keep the old tensors; attributes."""
    modules, known = planner.slots.modules, {id(slot.tensor) for slot in on_meta}
    scripted = {prefix for prefix, module in modules.items() if isinstance(module, torch.jit.ScriptModule)}
    names = [slot.name for slot in on_meta if scripted and slot.name[: slot.name.rfind(".") + 1] in scripted]
    planner.problems += [Problem(ProblemKind.SCRIPTED_ON_META, name) for name in names]
    attributes = list[str]()
    for prefix, module in modules.items():
        own = vars(module)
        for name in own.keys() - _OF_EVERY_MODULE:
            value = own[name]
            if isinstance(value, _MAY_HOLD_TENSORS):
                held = value.values() if isinstance(value, dict) else [value] if torch.is_tensor(value) else value
                tensors = (each for each in held if isinstance(each, torch.Tensor))
                attributes += [prefix + name for tensor in tensors if tensor.is_meta and id(tensor) not in known]
    if attributes:
        what = "attributes are tensors on meta, which no load fills: assign them, or register them as buffers"
        planner.notes.append(f"{len(attributes)} {what}: {listed(sorted(attributes), 4)}")


def _check_quantized(planner: Planner) -> None:
    """Adds problems for quantized values that cannot become the plain tensors of the model.

    Only the code of the quantized class can tell. It is called once for each class, with the first value and a copy
    of the model's tensor.
    """
    converts: dict[type, bool] = {}
    for item in (single.transfers for single in planner.singles):
        param, value = item.param, item.facts.value
        if is_plain(value) or not is_plain(param) or param.is_meta or item.facts.is_transformed:
            continue
        if not is_quantized(value) or lacks_values(value):
            continue
        cls = type(value.data)
        if cls not in converts:
            converts[cls] = _becomes_plain(planner.checkpoint, item)
        if not converts[cls]:
            expected, found = short(param.dtype), f"{cls.__name__} of {short(value.dtype)}"
            planner.problems.append(Problem(ProblemKind.QUANTIZED_INTO_PLAIN, item.name, expected, found))


def _becomes_plain(checkpoint: Checkpoint, item: Transfers) -> bool:
    """Whether `module_load` accepts the value, as it will when the item is executed."""
    stored = item.facts.stored
    try:
        with torch.inference_mode(False), torch.no_grad():
            value = checkpoint.read(stored) if isinstance(stored, StoredComposite) else item.facts.value.detach()
            param = torch.empty_like(item.param)
            target = nn.Parameter(param, False) if item.kind == PARAMETER else param
            target.module_load(value, assign=False)  # type: ignore[no-untyped-call]
    except ModelStateError:
        raise
    except Exception as error:
        keep_interrupt(error)
        return False
    return True


class _Coverage:
    """Finds names without a counterpart, and slots without a value."""

    def __init__(self, planner: Planner, outcome: IncompatibleKeys) -> None:
        self.planner, self.outcome, self.problems = planner, outcome, planner.problems
        self.slots, self.options, self.filled = planner.slots, planner.options, planner.filled
        self.entries = planner.matched.applied.entries
        self.may_miss = Patterns("allow_missing", self.options.allow_missing)
        self.may_exceed = Patterns("allow_unexpected", self.options.allow_unexpected)
        singles = [single.transfers for single in planner.singles]
        self.computed = [item.name for item in singles if not item.facts.given and item.kind != HIDDEN]
        """Names that the checkpoint lacks and whose values the model's code computed."""

    def settle(self) -> None:
        """Adds the problems and notes of the load."""
        planner, problems = self.planner, self.problems
        self._check_unread()
        if self.may_miss.patterns:  # a pattern of a name that the checkpoint lacks is not idle, even if a tie fills it
            lacking = self.slots.by_name.keys() - self.slots.left_out - self.entries.keys()
            _ = [*map(self.may_miss.allow, lacking)]
        # Names with a value that does not fit have a problem already.
        missing = [name for name in dict.fromkeys(self.outcome.missing) if not self._is_filled(name)]
        missing = self._without_problems(missing)
        left_out = self._left_out(missing)
        # A name may be missing where it is allowed, or another name of the same tensor is.
        names_of = {name: self.slots.by_name[name].names if name in self.slots.by_name else (name,) for name in missing}
        allowed = left_out.union(name for name in missing if any(map(self.may_miss.allow, names_of[name])))
        of_quantized = self._quantized([name for name in missing if name not in allowed])
        missing = self._without_problems(missing)
        unexpected = [name for name in self._unexpected() if name not in of_quantized]
        has_matches = bool(self.filled or planner.uninitialised or self.outcome.called)
        initialised = self._initialised(missing, allowed) if self.options.init_missing else {}
        problems += self._differences([name for name in missing if name not in allowed], unexpected)
        problems += [Problem(ProblemKind.COMPLAINT, "", why=message) for message in self.outcome.errors]
        unfilled = [slot for slot in self.slots.tensors if id(slot.tensor) not in self.filled]
        problems += self._uninitialised(unfilled, (set(missing) - allowed).union(problem.name for problem in problems))
        problems += self.may_miss.idle() + self.may_exceed.idle()
        problems += [Problem(ProblemKind.IDLE_PATTERN, rule, found="rules") for rule in planner.matched.applied.idle]
        if planner.transforms is not None:
            problems += [*planner.transforms.problems, *planner.transforms.idle()]
        if self.options.device is not None:
            self._move(unfilled, self.options.device)
        if any(slot.kind != HIDDEN for slot in self.slots.tensors) and not has_matches and not problems:
            problems.append(Problem(ProblemKind.NOTHING_FITS, type(planner.model).__name__))
        if planner.transaction.armed:
            self._note_lost_versions()
        has_own_code = self._note_own_code(missing, unexpected, unfilled)
        if has_own_code and planner.matched.is_mapped_by_transformers and not problems:
            problems.append(Problem(ProblemKind.COMPLAINT, "", why=_FITS_IN_PART))
        self._note_dtypes()
        self._note(self.computed, "made by the model's own loading code")
        self._note(planner.uninitialised, "stay uninitialised, as they were when the checkpoint was saved")
        for how in dict.fromkeys(initialised.values()):
            self._note([name for name in initialised if initialised[name] == how], f"initialised by {how}")
        self._note(allowed - initialised.keys() - left_out, "left as they are, as allowed by allow_missing")
        self._note(left_out, "left as they are: the model's own state_dict leaves them out")

    # Names and slots.

    def _is_filled(self, name: str) -> bool:
        slot = self.slots.by_name.get(name)
        return slot is not None and id(slot.tensor) in self.filled

    def _without_problems(self, names: Iterable[str]) -> list[str]:
        misfits = {problem.name for problem in self.problems}
        return [name for name in names if name not in misfits]

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
        planner, problems, entries = self.planner, self.problems, self.entries
        unexpected = {*self.outcome.unexpected}
        if not (unexpected or planner.matched.rules):
            return set()
        from modelstate.planning.quantized import QuantizedCandidate, quantized_weights
        from modelstate.rules.joining import SCALABLE

        misfits, candidates = {problem.name for problem in problems}, list[QuantizedCandidate]()
        for slot in self.slots.tensors:
            name = next((name for name in slot.names if name in entries), "")
            tensor, param = entries[name].tensor if name else None, slot.tensor
            if tensor is None or tensor.dtype == param.dtype or is_quantized(param):
                continue
            filled = self.filled.get(id(param))
            is_meant = filled is not None and filled.transfers.facts.transform is not None
            has_numbers = param.is_floating_point() and param.dtype not in SCALABLE and tensor.dtype in SCALABLE
            if not is_meant and (has_numbers or not misfits.isdisjoint(slot.names)):
                candidates += [QuantizedCandidate(slot.name, source, has_numbers) for source in entries[name].sources]
        stored_names: set[str] = set()
        quantized, names = quantized_weights([QuantizedCandidate(name, name) for name in missing], {}, unexpected)
        if candidates:
            part = planner.checkpoint
            used = {source for name in entries if name not in unexpected for source in entries[name].sources}
            left = {name for name in part if name not in used} | {name for name in unexpected if name not in part}
            given = planner.matched.given.get("rules")
            stored, stored_names = quantized_weights(candidates, part, left, (given,) if given else ())
            quantized += stored
        replaced = {problem.name for problem in quantized}
        problems[:] = [problem for problem in problems if problem.name not in replaced]
        problems += quantized
        return names | {name for name in unexpected if stored_names and stored_names.issuperset(entries[name].sources)}

    def _unexpected(self) -> list[str]:
        """Unexpected names that are not allowed, and fill no non-persistent buffer."""
        left, passed, equal = [], [], []
        for name in dict.fromkeys(self.outcome.unexpected):
            slot = self.slots.by_name.get(name)
            if self.may_exceed.allow(name) or self.may_exceed.allow(self.planner.incoming.source_of(name)):
                passed.append(name)
            elif slot is None or slot.kind != HIDDEN:
                left.append(name)
            elif self.planner.hidden_buffer(slot, name):
                equal.append(name)
        self._note(passed, "passed over, as allowed by allow_unexpected")
        self._note(equal, "passed over: non-persistent buffers that hold the same already")
        return left

    def _initialised(self, missing: Sequence[str], allowed: set[str]) -> dict[str, str]:
        """Initialises missing tensors with the model's own methods. Returns the methods by the names of the tensors.

        A tensor that has values and may be missing keeps its values.
        """
        lacking = [self.slots.by_name[name] for name in missing if name in self.slots.by_name]
        wanted = [slot for slot in lacking if slot.tensor.is_meta or not allowed.issuperset(slot.names)]
        wanted += [slot for slot in self.slots.tensors if slot.tensor.is_meta]
        misfits = {problem.name for problem in self.problems}  # names with a value that does not fit
        initialised: dict[str, str] = {}
        for slot in wanted:
            if id(slot.tensor) in self.filled or is_lazy(slot.tensor) or not misfits.isdisjoint(slot.names):
                continue
            if (initialiser := self.planner.view.initialiser_of(slot)) is not None:
                value = self.planner.incoming.initialised(slot.name, slot.tensor, initialiser)
                self.planner.assign(slot.name, slot.kind, slot.tensor, value)
                self.planner.initialised.update(slot.names)
                initialised[slot.name] = initialiser.how
        return initialised

    def _taken_by_code(self, named: Collection[str]) -> list[str]:
        """The names that the model's own loading code has removed from the state dict, except for these."""
        planner = self.planner
        known = {*named, *self.outcome.unexpected, *planner.extra_states, *planner.uninitialised}
        return sorted(self.entries.keys() - planner.used - known)

    # Problems.

    def _check_unread(self) -> None:
        """Adds problems for values that are not read, and that the model's own loading code has taken."""
        if isinstance(self.entries, StoredEntries):
            return
        contents = {name: entry.content for name, entry in self.entries.items()}
        unread = {name: value.error for name, value in contents.items() if isinstance(value, Value) and value.error}
        for name in self._taken_by_code({problem.name for problem in self.problems}) if unread else ():
            if error := unread.get(name):
                self.planner.unread(name, error)

    def _differences(self, missing: list[str], unexpected: list[str]) -> Iterable[Problem]:
        if missing and (shard := other_shards(self.planner.checkpoint.files)):
            file, index, others = shard
            yield Problem(ProblemKind.ONE_SHARD, file, found=index or None, others=others)
        slots = self.slots.by_name
        lacking = {name: _shape(slots[name].tensor if name in slots else None) for name in (*missing, *self.computed)}
        entries = {name: self.entries.get(name) for name in unexpected}
        over = {name: None if entry is None else _shape(entry.tensor) for name, entry in entries.items()}
        adapter = [] if adapter_names(slots) else adapter_names(unexpected)
        yield from (Problem(ProblemKind.UNMERGED_ADAPTER, name) for name in adapter)
        unexpected = [name for name in unexpected if name not in adapter] if adapter else unexpected
        # A user's rule sees the names before wrappers are removed. The names that are compared here are others.
        if not (adapter or self.planner.matched.before_wrappers):
            fitting = self.entries.keys() & slots.keys()
            other_names, pairs = one_prefix(lacking, over, fitting=fitting, optional=self.computed)
            if other_names is not None:
                yield other_names
                for name, source in pairs.items():
                    expected, found = lacking[name], over[source]
                    if expected is not None and found is not None and expected != found:
                        yield wrong_shape(name, expected, found)
                return
        for name in missing:
            if not self._is_filled(name):  # the model's initialisation has filled some
                slot = slots.get(name)
                has_values = slot is None or is_lazy(slot.tensor) or not slot.tensor.is_meta
                how = self._methods_for(slot)
                yield Problem(ProblemKind.MISSING, name, lacking[name], has_values=has_values, initialiser=how)
        for name in unexpected:
            why = "registered as None in the model" if name in self.slots.empty else ""
            seen = self.planner.other_name(name)
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
        for name in self._taken_by_code(reported) if without_values else ():
            for prefix in ("", *prefixes(name)):
                taken_below.setdefault(prefix, []).append(name)
        for slot in without_values:
            of_owner = taken_below.get(slot.name[: slot.name.rfind(".") + 1], [])
            initialiser, why = self._methods_for(slot), listed(of_owner, 3)
            yield Problem(ProblemKind.UNINITIALISED, slot.name, found=slot.kind, why=why, initialiser=initialiser)

    def _move(self, unfilled: Sequence[Slot], device: torch.device) -> None:
        """Moves the tensors that get no value to the device too."""
        for slot in unfilled:
            # A lazy tensor has no values; its module moves it.
            if not (is_lazy(slot.tensor) or slot.tensor.is_meta or slot.tensor.device == device):
                self.planner.move(slot, device)
        self._note([item.transfers.name for item in self.planner.moves], f"only moved to {device}")

    # Notes.

    def _note(self, names: Collection[str], what: str) -> None:
        if names:
            self.planner.notes.append(f"{len(names)} {what}: {listed(sorted(names), 4)}")

    def _note_own_code(self, missing: list[str], unexpected: list[str], unfilled: Sequence[Slot]) -> bool:
        """Notes names that the model's own loading code handled: they are neither assigned nor missing.

        Returns whether it handled any.
        """
        planner = self.planner
        named = {*missing, *unexpected, *self.outcome.unexpected, *planner.extra_states, *planner.uninitialised}
        named.update(problem.name for problem in self.problems)
        taken = self._taken_by_code(named)
        self._note(taken, "went into the model's own loading code")
        absent = [name for name in self.slots.extra if name not in named and name not in self.outcome.missing]
        self._note(absent, "extra states that the checkpoint lacks, as their classes allow")
        still = [slot.name for slot in unfilled if slot.kind != HIDDEN and slot.name not in named]
        self._note(still, "left to the model's own loading code")
        emptied = self.slots.empty & planner.slots_before.by_name.keys()
        self._note(emptied, "become None, as the model's own loading code says")
        return bool(taken or still or self.computed)

    def _note_lost_versions(self) -> None:
        """Notes modules whose loading code depends on a version that the checkpoint lacks."""
        versions = self.planner.matched.versions or {}
        deciding = {
            type(module).__name__
            for path, module in self.planner.model.named_modules()
            if path not in versions and overrides_loading(module) and getattr(module, "_version", None) not in (None, 1)
        }
        if deciding:
            lacks = "the checkpoint has no version metadata (torch's _metadata) for"
            self.planner.notes.append(f"{lacks} {', '.join(sorted(deciding))}: they load it as the oldest version")

    def _note_dtypes(self) -> None:
        """Notes tensors that get another dtype than the model's."""
        singles = [single.transfers for single in self.planner.singles]
        changed = [item for item in singles if item.param.dtype != item.dtype]
        live = [item.name for item in changed if not item.param.is_meta]
        self._note(live, "change their dtype: pass optimizers= that have state for them")
        if self.options.dtype is None and (on_meta := [item for item in changed if item.param.is_meta]):
            stored = ", ".join(sorted({short(item.dtype) for item in on_meta}))
            own = ", ".join(sorted({short(item.param.dtype) for item in on_meta}))
            what = f"get the checkpoint's {stored} instead of the model's {own}, as it has quantized tensors"
            self._note([item.name for item in on_meta], what)


def _shape(tensor: Source | None) -> tuple[int, ...] | None:
    """The shape of a tensor; None for one that has none yet."""
    if tensor is None or (isinstance(tensor, torch.Tensor) and is_lazy(tensor)):
        return None
    return tuple(tensor.shape)
