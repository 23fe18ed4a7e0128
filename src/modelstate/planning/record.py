"""`record` and `bind`: fill a `Preparation` from the model's loading protocol, or from the steps of a plan.

The protocol runs with tensors that are mapped and not read. Then every name of the checkpoint and every slot of the
model must have a counterpart. The result is either a list of problems and an unchanged model, or writes that wait for
their bytes. Everything that could keep the writes from being executed has then been checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import ModelCodeError, ModelStateError, PlanError, code_errors, keep_interrupt
from modelstate.formats.sharded import other_shards
from modelstate.formats.tree import leaves
from modelstate.planning.differences import adapter_names, one_prefix, prefixes
from modelstate.planning.matching import Patterns, StoredEntries
from modelstate.planning.plan import LoadPlan
from modelstate.planning.preparation import Preparation
from modelstate.planning.recorder import IncompatibleKeys, outermost, walk
from modelstate.planning.transfer import Transfer
from modelstate.problems import Problem, ProblemKind, wrong_shape
from modelstate.rules.expression import lacks_values
from modelstate.rules.rule import Value
from modelstate.spec import StoredComposite
from modelstate.text_format import listed
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.modules import (
    changes_state,
    needs_protocol,
    overrides_loading,
    state_dict_of,
)
from modelstate.torch_compat.plain import is_plain, is_quantized
from modelstate.torch_compat.private import storage_id
from modelstate.transaction.slots import HIDDEN, PARAMETER, Slot, Slots, compare_names, slots_of

_FITS_IN_PART = (
    "transformers' conversion mapping makes the names fit only in part, and the model's own loading code takes the "
    "rest: rules=ms.rules.from_transformers(model), if that is meant"
)


def record(preparation: Preparation) -> None:
    """Runs the model's loading protocol, and finds every problem. Raises `ModelCodeError` where the protocol raises."""
    matched, slots, transaction = preparation.matched, preparation.slots, preparation.transaction
    preparation.notes += matched.notes
    preparation.problems += matched.applied.problems
    outcome, target = IncompatibleKeys(), type(preparation.model).__name__
    names = matched.applied.entries.keys()
    if needs_protocol(slots.modules, names, matched.versions):
        with code_errors(ModelCodeError, "the model's own loading code raised; nothing has been changed", where=target):
            walk(
                preparation.model,
                slots,
                preparation.incoming,
                matched.versions,
                assign=False,
                transaction=transaction,
                sink=preparation,
                outcome=outcome,
                nested=preparation.incoming.nested_values(),
                calls_own=True,
            )
    else:
        common, outcome.missing, outcome.unexpected = compare_names(slots, names, preparation.add_plain())
        what = "code of a tensor subclass or a transform raised; nothing has been changed"
        with code_errors(ModelCodeError, what, where=target):
            for name in common:
                value = preparation.incoming[name]
                preparation.tensor(name, slots.by_name[name].tensor, value, None, outcome.errors)
    preparation.notes += [f"{type(module).__name__}: its own load_state_dict was called" for module in outcome.called]
    if any(slot.tensor.is_meta for slot in slots.tensors):
        preparation.notes += _notes_of_attributes(slots)
    preparation.problems += _scripted_on_meta(slots)
    if transaction.armed or preparation.quantized:
        _check_quantized(preparation)
    if transaction.armed:
        preparation.slots = slots_of(preparation.model)
    if not _is_exact(preparation, outcome):
        _Coverage(preparation, outcome).settle()
    if matched.fits_in_part and not preparation.problems:
        preparation.problems.append(Problem(ProblemKind.COMPLAINT, "", why=_FITS_IN_PART))
    preparation.settle()


def _notes_of_attributes(slots: Slots) -> list[str]:
    """Notes tensors on meta that a load cannot fill, since they are attributes and neither parameters nor buffers."""
    known = {id(slot.tensor) for slot in slots.tensors}
    names = [
        prefix + name
        for prefix, module in slots.modules.items()
        for name, value in vars(module).items()
        for tensor in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        )
        if isinstance(tensor, torch.Tensor) and tensor.is_meta and id(tensor) not in known
    ]
    if not names:
        return []
    what = "attributes are tensors on meta, which no load fills: assign them, or register them as buffers"
    return [f"{len(names)} {what}: {listed(names, 4)}"]


def _scripted_on_meta(slots: Slots) -> list[Problem]:
    """A problem for each slot on meta in a TorchScript module: its C++ object would keep the tensor without memory."""
    scripted = {prefix for prefix, module in slots.modules.items() if isinstance(module, torch.jit.ScriptModule)}
    if not scripted:
        return []
    on_meta = [slot.name for slot in slots.tensors if slot.tensor.is_meta]
    return [Problem(ProblemKind.SCRIPTED_ON_META, name) for name in on_meta if name[: name.rfind(".") + 1] in scripted]


def _is_exact(preparation: Preparation, outcome: IncompatibleKeys) -> bool:
    """Whether each name of the checkpoint fills a slot, and no option, rule or code of the model has a say."""
    options, is_filled = preparation.options, len(preparation.filled) == len(preparation.slots.tensors)
    is_silent = not (preparation.problems or preparation.transaction.armed or preparation.changes_dtypes)
    has_options = options.allow_missing or options.allow_unexpected or options.transform or preparation.matched.rules
    return is_filled and is_silent and not (has_options or outcome.missing or outcome.unexpected)


def bind(preparation: Preparation, plan: LoadPlan, stale_remedy: str) -> None:
    """Records with the matched checkpoint of a plan, for a model with the same slots.

    The steps are those of the plan where no code of the model runs. Where it runs, they are compared. Raises
    `PlanError`, with this remedy, where the model is no longer the one of the plan.
    """
    was, now = plan.binding.slots, preparation.signatures
    if was != now:
        _check_same(preparation, was.by_name(), now.by_name(), stale_remedy)
    if not plan.binding.mapped:
        preparation.options = replace(preparation.options, map=False)
    record(preparation)
    preparation.notes[:] = dict.fromkeys([*plan.notes, *preparation.notes])  # those on maps may be of the plan alone
    if preparation.problems:
        return
    # Whether a file may be mapped depends on other processes too: it does not make a plan stale.
    preparation.not_mapped = max(plan.binding.mapped - preparation.mapped, 0)
    if plan.binding.runs_code or preparation.transaction.armed:
        planned, steps = ({step.name: step.decision for step in steps} for steps in (plan.steps, preparation.steps()))
        _check_same(preparation, planned, steps, stale_remedy)


def _check_same(preparation: Preparation, was: Mapping[str, object], now: Mapping[str, object], remedy: str) -> None:
    """Raises `PlanError` where a slot or a step is no longer what it was for the plan."""
    if was == now:
        return
    changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    raise PlanError(
        "the model is no longer what was planned for; nothing has been changed",
        where=f"{preparation.names[0]}: {changed[0]}{more}",
        expected=was.get(changed[0]) or "no such slot",
        found=now.get(changed[0]) or "no such slot",
        remedy=remedy,
        page="model-code",
    )


def _check_quantized(preparation: Preparation) -> None:
    """Adds problems for quantized values that cannot become the plain tensors of the model.

    Only the code of the quantized class can tell. It is called once for each class, with the first value and a copy
    of the model's tensor.
    """
    converts: dict[type, bool] = {}
    for item in preparation.singles:
        if item.param.is_meta or item.is_transformed or is_plain(item.value):
            continue
        if not (is_plain(item.param) and is_quantized(item.value)) or lacks_values(item.value):
            continue
        cls = type(item.value.data)
        if cls not in converts:
            converts[cls] = _becomes_plain(preparation.checkpoint, item)
        if not converts[cls]:
            expected, found = short(item.param.dtype), f"{cls.__name__} of {short(item.value.dtype)}"
            problem = Problem(ProblemKind.QUANTIZED_INTO_PLAIN, item.name, expected, found)
            preparation.problems.append(problem)


def _becomes_plain(checkpoint: Checkpoint, item: Transfer) -> bool:
    """Whether `module_load` accepts the value, as it will when the item is executed."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            stored = item.stored
            value = checkpoint.read(stored) if isinstance(stored, StoredComposite) else item.value.detach()
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
    """Finds names without a counterpart, and slots without a value, after a walk."""

    def __init__(self, preparation: Preparation, outcome: IncompatibleKeys) -> None:
        self.preparation, self.outcome = preparation, outcome
        options = preparation.options
        self.may_miss = Patterns("allow_missing", options.allow_missing)
        self.may_exceed = Patterns("allow_unexpected", options.allow_unexpected)

    def settle(self) -> None:
        """Adds the problems and notes of the load."""
        problems = self.preparation.problems
        self._check_unread({problem.name for problem in problems})
        misfits = {problem.name for problem in problems}  # names with a value that does not fit
        missing = [
            name for name in dict.fromkeys(self.outcome.missing) if not self._is_filled(name) and name not in misfits
        ]
        left_out = self._left_out(missing)
        allowed = left_out.union(name for name in missing if self.may_miss.allow(name))
        of_quantized = self._quantized([name for name in missing if name not in allowed])
        missing = [name for name in missing if name not in {problem.name for problem in problems}]
        unexpected = [name for name in self._unexpected() if name not in of_quantized]
        has_matches = bool(self.preparation.filled or self.preparation.uninitialised or self.outcome.called)
        initialised = self._initialised(missing, allowed) if self.preparation.options.init_missing else {}
        problems += self._differences([name for name in missing if name not in allowed], unexpected)
        problems += [Problem(ProblemKind.COMPLAINT, "", why=message) for message in self.outcome.errors]
        unfilled = [slot for slot in self.preparation.slots.tensors if id(slot.tensor) not in self.preparation.filled]
        problems += self._uninitialised(unfilled, (set(missing) - allowed).union(problem.name for problem in problems))
        problems += self.may_miss.idle() + self.may_exceed.idle()
        problems += [
            Problem(ProblemKind.IDLE_PATTERN, rule, found="rules") for rule in self.preparation.matched.applied.idle
        ]
        if self.preparation.transforms is not None:
            problems += [*self.preparation.transforms.problems, *self.preparation.transforms.idle()]
        self._move(unfilled)
        if any(slot.kind != HIDDEN for slot in self.preparation.slots.tensors) and not has_matches and not problems:
            problems.append(Problem(ProblemKind.NOTHING_FITS, type(self.preparation.model).__name__))
        self._note_lost_versions()
        self._note_own_code(missing, unexpected, unfilled)
        self._note_options()
        if computed := self._computed():
            self._note(computed, "made by the model's own loading code")
        if self.preparation.uninitialised:
            self._note(self.preparation.uninitialised, "stay uninitialised, as they were when the checkpoint was saved")
        for how in dict.fromkeys(initialised.values()):
            self._note([name for name in initialised if initialised[name] == how], f"initialised by {how}")
        if left := allowed - initialised.keys() - left_out:
            self._note(left, "left as they are, as allowed by allow_missing")
        if left_out:
            self._note(left_out, "left as they are: the model's own state_dict leaves them out")

    def _left_out(self, missing: Sequence[str]) -> set[str]:
        """Returns the missing tensors of the model that its own code keeps out of its state dict."""
        slots, left_out = self.preparation.slots.by_name, set[str]()
        for path, module in outermost(self.preparation.model) if missing else ():
            own = [name for name in missing if name in slots and name.startswith(path)]
            if own and changes_state(module):
                state = dict(leaves(state_dict_of(module)))
                saved = {storage_id(value) for value in state.values() if isinstance(value, torch.Tensor)}
                left_out.update(
                    name
                    for name in own
                    if name.removeprefix(path) not in state and storage_id(slots[name].tensor) not in saved
                )
        return left_out

    def _quantized(self, missing: Sequence[str]) -> set[str]:
        """Adds a problem for each plain weight that the checkpoint has quantized, in place of other problems with it.

        Returns the names that belong to these weights. A rule or a transform that changes the dtype of the numbers is
        taken to be meant.
        """
        preparation, unexpected = self.preparation, {*self.outcome.unexpected}
        if not (unexpected or preparation.matched.rules):
            return set()
        from modelstate.planning.quantized import QuantizedCandidate, quantized_weights
        from modelstate.rules.joining import SCALABLE

        entries, problems = preparation.matched.applied.entries, preparation.problems
        misfits = {problem.name for problem in problems}
        candidates = []
        for slot in preparation.slots.tensors:
            name = next((name for name in slot.names if name in entries), "")
            tensor, param = entries[name].tensor if name else None, slot.tensor
            if tensor is None or tensor.dtype == param.dtype or is_quantized(param):
                continue
            filled = preparation.filled.get(id(param))
            has_numbers = param.is_floating_point() and param.dtype not in SCALABLE and tensor.dtype in SCALABLE
            if (has_numbers or not misfits.isdisjoint(slot.names)) and (filled is None or filled.transform is None):
                candidates += [QuantizedCandidate(slot.name, source, has_numbers) for source in entries[name].sources]
        stored_names: set[str] = set()
        quantized, names = quantized_weights([QuantizedCandidate(name, name) for name in missing], {}, unexpected)
        if candidates:
            part = preparation.checkpoint
            used = {source for name in entries if name not in unexpected for source in entries[name].sources}
            left = {name for name in part if name not in used} | {name for name in unexpected if name not in part}
            given = preparation.matched.given.get("rules")
            stored, stored_names = quantized_weights(candidates, part, left, (given,) if given else ())
            quantized += stored
        replaced = {problem.name for problem in quantized}
        problems[:] = [problem for problem in problems if problem.name not in replaced]
        problems += quantized
        return names | {name for name in unexpected if stored_names.issuperset(entries[name].sources)}

    def _initialised(self, missing: Sequence[str], allowed: set[str]) -> dict[str, str]:
        """Initialises missing tensors with the model's own methods. Returns the methods by the names of the tensors.

        A tensor that has values and may be missing keeps its values.
        """
        lacking = [self.preparation.slots.by_name[name] for name in missing if name in self.preparation.slots.by_name]
        wanted = [slot for slot in lacking if slot.tensor.is_meta or not allowed.issuperset(slot.names)]
        wanted += [slot for slot in self.preparation.slots.tensors if slot.tensor.is_meta]
        misfits = {problem.name for problem in self.preparation.problems}  # names with a value that does not fit
        initialised: dict[str, str] = {}
        for slot in wanted:
            if id(slot.tensor) in self.preparation.filled or is_lazy(slot.tensor) or not misfits.isdisjoint(slot.names):
                continue
            if how := self.preparation.initialise(slot):
                initialised[slot.name] = how
        return initialised

    def _methods_for(self, slot: Slot) -> str:
        """The methods of the model that initialise a tensor; empty without such methods."""
        return next(
            (initialiser.how for name in slot.names if (initialiser := self.preparation.view.initialisers.find(name))),
            "",
        )

    def _is_filled(self, name: str) -> bool:
        slot = self.preparation.slots.by_name.get(name)
        return slot is not None and id(slot.tensor) in self.preparation.filled

    def _fitting(self) -> set[str]:
        """Names that are the same on both sides."""
        return self.preparation.incoming.entries.keys() & self.preparation.slots.by_name.keys()

    def _computed(self) -> list[str]:
        """Names that the checkpoint lacks and whose values the model's code computed."""
        return [item.name for item in self.preparation.singles if not item.given and item.kind != HIDDEN]

    def _unexpected(self) -> list[str]:
        """Unexpected names that are not allowed, and fill no non-persistent buffer."""
        left, passed, equal = [], [], []
        for name in dict.fromkeys(self.outcome.unexpected):
            slot = self.preparation.slots.by_name.get(name)
            if self.may_exceed.allow(self.preparation.incoming.source_of(name)) or self.may_exceed.allow(name):
                passed.append(name)
            elif slot is not None and slot.kind == HIDDEN:
                equal += [name] if self.preparation.hidden_buffer(slot, name) else []
            else:
                left.append(name)
        if passed:
            self._note(passed, "passed over, as allowed by allow_unexpected")
        if equal:
            self._note(equal, "passed over: non-persistent buffers that hold the same already")
        return left

    def _differences(self, missing: list[str], unexpected: list[str]) -> Iterable[Problem]:
        if missing and (shard := other_shards(self.preparation.checkpoint.files)):
            file, index, others = shard
            yield Problem(ProblemKind.ONE_SHARD, file, found=index or None, others=others)
        computed = self._computed()
        slots, incoming = self.preparation.slots.by_name, self.preparation.incoming
        lacking = {name: _shape(slots[name].tensor if name in slots else None) for name in (*missing, *computed)}
        over = {name: _shape(incoming.get(name)) for name in unexpected}
        adapter = [] if adapter_names(slots) else adapter_names(unexpected)
        yield from (Problem(ProblemKind.UNMERGED_ADAPTER, name) for name in adapter)
        unexpected = [name for name in unexpected if name not in adapter] if adapter else unexpected
        # A user's rule sees the names before wrappers are removed. The names that are compared here are others.
        is_simple = not (adapter or self.preparation.matched.before_wrappers)
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
                has_values, initialiser = self._first_value(name)
                yield Problem(ProblemKind.MISSING, name, lacking[name], has_values=has_values, initialiser=initialiser)
        for name in unexpected:
            why = "registered as None in the model" if name in self.preparation.slots.empty else ""
            seen = self.preparation.other_name(name)
            yield Problem(ProblemKind.UNEXPECTED, name, found=over[name], why=why, name_for_rules=seen)

    def _first_value(self, name: str) -> tuple[bool, str | None]:
        """Whether a tensor has values, and the methods that would initialise it (None where they do not matter)."""
        slot = self.preparation.slots.by_name.get(name)
        if slot is None or is_lazy(slot.tensor):
            return True, None
        has_values = not slot.tensor.is_meta
        return has_values, None if has_values and not self.preparation.options.init_missing else self._methods_for(slot)

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

    def _taken_by_code(self, named: Collection[str]) -> list[str]:
        """The names that the model's own loading code has removed from the state dict, except for these."""
        preparation = self.preparation
        known = {*named, *self.outcome.unexpected, *preparation.extra_states, *preparation.uninitialised}
        return sorted(preparation.incoming.entries.keys() - preparation.used - known)

    def _check_unread(self, reported: Collection[str]) -> None:
        """Adds problems for values that are not read, and that the model's own loading code has taken."""
        entries = self.preparation.matched.applied.entries
        if isinstance(entries, StoredEntries):
            return
        unread = {name: entry.content.error for name, entry in entries.items() if isinstance(entry.content, Value)}
        for name in self._taken_by_code(reported) if any(unread.values()) else ():
            if error := unread.get(name):
                self.preparation.unread(name, error)

    def _note_own_code(self, missing: list[str], unexpected: list[str], unfilled: Sequence[Slot]) -> None:
        """Notes names that the model's own loading code handled: they are neither assigned nor missing."""
        preparation = self.preparation
        named = {*missing, *unexpected, *self.outcome.unexpected, *preparation.extra_states, *preparation.uninitialised}
        named.update(problem.name for problem in preparation.problems)
        if gone := self._taken_by_code(named):
            self._note(gone, "went into the model's own loading code")
        known = {*named, *self.outcome.missing}
        if absent := [name for name in preparation.slots.extra if name not in known]:
            self._note(absent, "extra states that the checkpoint lacks, as their classes allow")
        still = [slot.name for slot in unfilled if slot.kind != HIDDEN]
        if left := [name for name in still if name not in named]:
            self._note(left, "left to the model's own loading code")
        if emptied := preparation.slots.empty & preparation.slots_before.by_name.keys():
            self._note(emptied, "become None, as the model's own loading code says")

    def _note_options(self) -> None:
        """Notes effects of the arguments that a plan cannot check."""
        changed = [
            item.name for item in self.preparation.singles if not item.param.is_meta and item.param.dtype != item.dtype
        ]
        if changed:
            self._note(changed, "change their dtype: pass optimizers= that have state for them")
        self._note_stored_dtypes()

    def _note_stored_dtypes(self) -> None:
        """Notes tensors that get another dtype than the model's, because the checkpoint has quantized tensors."""
        if self.preparation.options.dtype is not None:
            return
        others = [item for item in self.preparation.singles if item.param.is_meta and item.param.dtype != item.dtype]
        if others:
            stored = ", ".join(sorted({short(item.dtype) for item in others}))
            own = ", ".join(sorted({short(item.param.dtype) for item in others}))
            what = f"get the checkpoint's {stored} instead of the model's {own}, as it has quantized tensors"
            self._note([item.name for item in others], what)

    def _note_lost_versions(self) -> None:
        """Notes modules whose loading code depends on a version that the checkpoint lacks."""
        if not self.preparation.transaction.armed:
            return  # no module has loading code of its own
        versions = self.preparation.matched.versions or {}
        deciding = {
            type(module).__name__
            for path, module in self.preparation.model.named_modules()
            if path not in versions and overrides_loading(module) and getattr(module, "_version", None) not in (None, 1)
        }
        if deciding:
            self.preparation.notes.append(
                f"the checkpoint has no version metadata (torch's _metadata) for {', '.join(sorted(deciding))}: "
                "they load it as the oldest version"
            )

    def _move(self, unfilled: Sequence[Slot]) -> None:
        """With `device=`, moves the tensors that get no value to the device too."""
        device = self.preparation.options.device
        if device is None:
            return
        for slot in unfilled:
            if is_lazy(slot.tensor):
                continue  # has no values; its module moves it
            if not slot.tensor.is_meta and slot.tensor.device != device:
                self.preparation.move(slot, device)
        if self.preparation.moves:
            self._note([item.name for item in self.preparation.moves], f"only moved to {device}")

    def _note(self, names: Collection[str], what: str) -> None:
        self.preparation.notes.append(f"{len(names)} {what}: {listed(sorted(names), 4)}")


def _shape(value: object) -> tuple[int, ...] | None:
    """The shape of a tensor; None for one that has none yet, and for another value."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) and not is_lazy(value) else None
