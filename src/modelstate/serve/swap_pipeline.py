"""The steps of a swap: checks a source, then stages it as a new program, or reads it into the serving program.

A `SwapSource` reads no tensor bytes when it is made. `stage` fills a new program, which no request calls yet.
`overwrite` fills the serving program, which no request calls at that time; `Undo` restores it after a failure.
"""

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch import nn
from torch.fx import GraphModule

from modelstate.checkpoint.open import open_source
from modelstate.errors import (
    LiveTargetError,
    MemoryBudgetError,
    PlacementError,
    PlanError,
    QuarantinedError,
    ReadFailedError,
    Remedy,
    WeightsError,
)
from modelstate.loading.load import Source, load_then, prepare
from modelstate.loading.staging import SMALL_BYTES
from modelstate.planning.assignment import Assignment
from modelstate.planning.differences import wrapper_rule
from modelstate.planning.matching import select_part
from modelstate.planning.options import checked_options
from modelstate.planning.plain_table import PlainTable, Planned
from modelstate.planning.preparation import Preparation
from modelstate.problems import Problem, ProblemKind, Remedies, allowing, casting, extended, ignoring, plan_error
from modelstate.rules.expression import is_dequantized
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Schema, renaming, way_back
from modelstate.serve.meta_clone import items_of_container, runtime_state
from modelstate.serve.targets import Program, Target, buffer_restorer, settle
from modelstate.spec import StoredComposite, StoredTensor
from modelstate.text_format import listed, size
from modelstate.torch_compat.dtypes import has_finite_sum, nonfinite, short
from modelstate.torch_compat.modules import (
    modules_of,
    tensors_of,
    without_state_dict_hooks,
)
from modelstate.torch_compat.plain import is_plain, remedies_for
from modelstate.torch_compat.private import payload_of, storage_id, storage_of, storage_owners
from modelstate.transaction.swap_tensors import become
from modelstate.transaction.transaction import Transaction

Buffers = Literal["carry", "reset"]
State = Callable[[], Mapping[str, torch.Tensor]]
Mode = Literal["available", "in_place"]
Kind = tuple[torch.layout, type] | None
"""The layout and class of a tensor; None for plain strided tensors."""


class SwapOptions(msgspec.Struct, frozen=True):
    """Options of `Live.swap` that concern the weights."""

    key: str | None = None
    rules: Rule | Iterable[Rule] | Schema = ()
    allow_missing: Iterable[str] = ()
    allow_unexpected: Iterable[str] = ()
    exact: bool = True
    check_finite: bool = True
    verify: bool = False


class SwapReport(msgspec.Struct, frozen=True):
    """The result of `Live.swap`. Printing it shows the versions, sizes and times.

    Examples:
        >>> report = live.swap("step-2000.safetensors")
        >>> report.version, report.previous
        (2, 1)
    """

    version: int
    """The id of the version that serves now."""
    previous: int
    """The id of the version before."""
    target: str
    source: str
    mode: Mode
    tensors: int
    """The number of weights that were filled; a tied weight counts once."""
    bytes: int
    """The size of these weights."""
    copies: int
    """The largest number of copies of the weights at one time, with kept versions and an undo copy."""
    staged_seconds: float
    """Time to read and check the weights. In the mode "in_place" requests wait during this time."""
    canary_seconds: float
    flip_seconds: float
    """Time to carry buffers over and to make the version the current one."""
    drain_seconds: float
    """Time spent waiting for requests of the version before: after the flip, or at the start in the mode "in_place"."""
    drained: bool
    """Whether all requests of the version before have ended; otherwise it is freed when the last one ends."""
    seconds: float
    """Time of the whole swap."""
    carried: tuple[str, ...] = ()
    """Buffers that requests had changed, and that were taken over from the version before."""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        served = f"{self.source} into {self.target}: version {self.version} serves, after {self.previous}"
        return f"<{type(self).__name__}: {served}, {self.tensors} tensors, {size(self.bytes)}>"

    def __str__(self) -> str:
        lines = [
            f"{self.source} into {self.target}: version {self.version} serves, after {self.previous}",
            f"  {self.tensors} tensors, {size(self.bytes)}, at most {self.copies} copies of them at once ({self.mode})",
            f"  staged in {self.staged_seconds:.3f} s, canary {self.canary_seconds:.3f} s, "
            f"flip {self.flip_seconds * 1e3:.3f} ms, drain {self.drain_seconds:.3f} s",
        ]
        if not self.drained:
            lines.append(f"  requests of version {self.previous} are still under way")
        if self.carried:
            lines.append(f"  carried over: {listed(self.carried, 8)}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _cast_remedy(problems: Sequence[Problem]) -> list[Remedy]:
    other = casting(problems) or "to cast them: rules=[modelstate.rules.Cast(name, dtype)]"
    return [Remedy(f"give weights with the dtype of the program; or, {other}")]


_REMEDIES: Remedies = {
    ProblemKind.MISSING: lambda members: [
        Remedy("take a checkpoint that has them"),
        allowing("allow_missing", members, "or, to keep those of the version that serves"),
    ],
    ProblemKind.UNEXPECTED: lambda members: [
        allowing("allow_unexpected", members, "if they are not needed"),
        Remedy(
            "if they are missing ones in another spelling: "
            f"rules=[ms.rules.Rename({members[0].seen_by_rules!r}, other)]"
        ),
    ],
    ProblemKind.WRONG_SHAPE: (
        "take a checkpoint with the sizes of the program, or serve a model with those of the checkpoint"
    ),
    ProblemKind.WRONG_DTYPE: _cast_remedy,
    ProblemKind.UNINITIALISED: "take a checkpoint that has them",
    ProblemKind.BUFFER_CONFLICT: lambda members: [
        Remedy(f"if the values of the program are right: {ignoring(members)}")
    ],
}
"""In place of remedies with options that a swap does not have."""


class Loaded(NamedTuple):
    """What a swap has loaded."""

    tensors: int
    """The number of weights; a tied weight counts once."""
    bytes: int
    """The size of these weights."""
    notes: tuple[str, ...]
    """The notes of the load."""


class SwapSource:
    """The source of a swap: the part of a checkpoint that has the weights of a target, and how the target reads it.

    The constructor opens the source and reads no tensor bytes. `stage` loads the weights into a new program. For a swap
    in place, `check` finds all problems first, and `overwrite` then loads into the program that serves.

    Args:
        target: the kind of program.
        source: what `modelstate.open` accepts.
        options: the options of the swap.

    Raises:
        OpenError: the source cannot be opened; `modelstate.open` lists the other errors.
        OptionError: the rules are invalid.
    """

    def __init__(self, target: Target, source: Source, options: SwapOptions) -> None:
        self._target, self._options = target, options
        selection = checked_options(
            key=options.key,
            rules=options.rules,
            allow_missing=options.allow_missing,
            allow_unexpected=options.allow_unexpected,
            verify=options.verify,
            progress=False,
        )
        self.part, selected_rules = select_part(open_source(source), selection, lambda: target.names)
        self.source, self._has_rules, rules = self.part.source, bool(selected_rules), selected_rules
        names = set(map(renaming(rules), self.part) if rules else self.part)
        if not names <= target.names and (wrappers := wrapper_rule(names, target.names)) is not None:
            rules = (*rules, wrappers)
            names = set(map(renaming(rules), self.part))
        self._skeleton, own_rules, without_hooks = target.read_plan(names)
        self._kept_extra: list[str] = []
        """The paths of modules whose extra state the checkpoint may lack."""
        self._selection = replace(selection, key=None, rules=(*rules, *own_rules))
        self._name_for_rules = renaming(way_back((*rules[len(selected_rules) :], *own_rules)))
        self._without_hooks: Callable[[nn.Module], AbstractContextManager[None]] = (
            without_state_dict_hooks if without_hooks else lambda module: nullcontext()
        )

    def stage(self, serving: Program) -> tuple[Program, Loaded]:
        """Loads the weights into a new program.

        Args:
            serving: the program that serves. Where its weights are not finite, the new ones need not be either.

        Returns:
            The new program, which no request calls yet, and what was loaded.

        Raises:
            PlanError: the source does not fit; `modelstate.load` lists the other errors of a load.
            WeightsError: the weights fit, and the program cannot take them.
        """
        with self._swap_errors(serving):
            devices = _devices_as_in(serving.weights_module, self._skeleton)
            loaded = self._load(self._skeleton, lambda: runtime_state(serving.weights_module), devices=devices)
        for path in self._kept_extra:
            state = serving.weights_module.get_submodule(path).get_extra_state()
            self._skeleton.get_submodule(path).set_extra_state(copy.deepcopy(state))
        program = self._target.program(self._skeleton)
        settle(program.tensors)  # requests on any stream find what has been copied
        return program, loaded

    def check(self, serving: Program) -> None:
        """Checks a swap in place before any bytes are read.

        Args:
            serving: the program whose weights will be overwritten.

        Raises:
            PlanError: the source does not fit.
            WeightsError: the weights fit, and the program cannot take them.
            LiveTargetError: only loading code of the module can read the source.
        """
        skeleton = self._skeleton
        # Buffers may differ at this time: requests replace them, and `renew_buffers` restores them before the load.
        modules = (skeleton, serving.weights_module)
        new, old = ({name for name, _ in module.named_parameters(remove_duplicate=False)} for module in modules)
        if new != old or _class_of(skeleton) is not _class_of(serving.weights_module):
            raise LiveTargetError(
                "only the module's own loading code can read these weights, and it cannot read them in place",
                where=self._target.name,
                remedy="swap with mode='available'; or, where hooks only rename, give names=NameMap.of(module)",
            )
        with (
            self._swap_errors(serving),
            self._without_hooks(skeleton),
            Transaction(skeleton) as transaction,
            torch.random.fork_rng(devices=[]),
        ):
            options = replace(self._selection, map=False)
            preparation, _ = prepare(transaction, self.part, options, call_extra_state=False)
            self._check_planned(preparation, runtime_state(serving.weights_module))

    def overwrite(self, serving: Program, before: Mapping[str, torch.Tensor]) -> Loaded:
        """Reads the weights into the memory of a program. After any exception the caller must restore that memory.

        Args:
            serving: the program, which no request calls at this time.
            before: copies of its weights and buffers, by name.

        Returns:
            What was loaded.

        Raises:
            ReadFailedError: a file cannot be read; `modelstate.load` lists the other errors of a load.
            WeightsError: the weights fit, and the program cannot take them.
        """
        try:
            return self._load(serving.weights_module, lambda: before, in_place=True)
        except (ReadFailedError, MemoryBudgetError) as error:
            # The outer error says that values are partly overwritten. The undo makes that untrue.
            raise (error.__cause__ if isinstance(error.__cause__, type(error)) else error) from None

    def _load(
        self,
        module: nn.Module,
        serving: State,
        *,
        in_place: bool | None = None,
        devices: Callable[[torch.Tensor], torch.device] | None = None,
    ) -> Loaded:
        """Loads into a module, and checks the result. `serving` returns the weights that serve.

        No other thread changes the module meanwhile: it is a new skeleton, or the caller holds its lock.
        """
        kinds: dict[str, Kind] = {}
        check = FiniteCheck() if self._options.check_finite else None
        options = replace(self._selection, device_of_meta=devices, map=False, in_place=in_place)
        kept: dict[int, torch.Tensor] = {}

        def check_planned(preparation: Preparation) -> None:
            slots = preparation.slots_before.by_name
            kinds.update((name, kind_of(slot.tensor)) for name, slot in slots.items())
            kept.update(self._check_planned(preparation, {} if in_place else serving()))

        with self._without_hooks(module), Transaction(module) as transaction:
            report = load_then(
                transaction,
                self.part,
                options,
                check=check_planned,
                inspect=check,
            )
        if kept:
            _fill_in(module, kept)
        state = runtime_state(module)
        check_kinds(state, kinds, self.source)
        if check is not None:
            check.check(state, serving, self.source)
        nbytes = {id(tensor): tensor.numel() * tensor.itemsize for tensor in state.values()}
        return Loaded(len(nbytes), sum(nbytes.values()), report.notes)

    def _check_planned(self, preparation: Preparation, serving: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Checks the plan of a load. Returns the serving values of slots that the checkpoint may lack, by slot."""
        assignments = preparation.assignments
        if not self._has_rules:  # rules may turn other kinds of tensors into plain ones
            kinds = {assignment.name: kind_of(assignment.param) for assignment in assignments}
            check_kinds({assignment.name: assignment.stored for assignment in assignments}, kinds, self.source)
        if self._options.exact:
            check_layout(assignments, self.source)
        kept: dict[int, torch.Tensor] = {}
        if self._selection.allow_missing:
            missing = [name for name in preparation.slots.extra if name not in preparation.extra_states]
            self._kept_extra = [name.rpartition(".")[0] for name in missing]
            for slot in preparation.slots.tensors:
                value = serving.get(slot.name)
                if value is not None and not value.is_meta and id(slot.tensor) not in preparation.filled:
                    kept[id(slot.tensor)] = value
            names = {slot.name for slot in preparation.slots.tensors if id(slot.tensor) in kept}
            preparation.problems[:] = [
                problem
                for problem in preparation.problems
                if problem.kind is not ProblemKind.UNINITIALISED or problem.why or problem.name not in names
            ]
            if kept and not preparation.filled and not preparation.problems:
                preparation.problems.append(Problem(ProblemKind.NOTHING_FITS, self._target.name))
        if preparation.problems:
            raise preparation.error()
        if self._options.exact:
            check_casts(preparation.planned, self.source)
        return kept

    @contextmanager
    def _swap_errors(self, serving: Program) -> Iterator[None]:
        """Replaces a plan's error by one with the remedies of a swap, or by the target's own error."""
        try:
            yield
        except PlanError as error:
            problems = [
                replace(problem, name_for_rules=self._name_for_rules(problem.name)) for problem in error.problems
            ]
            options = {"rules": self._has_rules, "allow_missing": self._selection.allow_missing}
            options["allow_unexpected"] = self._selection.allow_unexpected
            given = {name: f"*{name}" for name, value in options.items() if value}
            dtypes = dtype_error(problems, self.source, given) if self._options.exact else None
            if dtypes is not None:
                raise dtypes from error
            unexpected = [problem.name for problem in error.problems if problem.kind is ProblemKind.UNEXPECTED]
            only_unexpected = len(unexpected) == len(error.problems)
            if only_unexpected and self._target.unexpected_error is not None:
                raise self._target.unexpected_error(unexpected) from error
            has_values = not any(tensor.is_meta for tensor in serving.tensors)
            remedies = (
                _REMEDIES if has_values else {**_REMEDIES, ProblemKind.MISSING: "take a checkpoint that has them"}
            )
            raise plan_error(self._target.name, self.source, problems, remedies, given=given) from error.__cause__
        except PlacementError as error:
            error.remedy = "give weights of the class that the program has, as the state dict of such a module"
            raise


def _class_of(module: nn.Module) -> type:
    """The class of a module: `GraphModule` and `ScriptModule` for instances, whose copies have another class."""
    return next((kind for kind in (GraphModule, torch.jit.ScriptModule) if isinstance(module, kind)), type(module))


def _fill_in(module: nn.Module, values: Mapping[int, torch.Tensor]) -> None:
    """Makes copies of other values of the tensors of a skeleton, by `id`. They stay the same objects."""
    for tensor in tensors_of(modules_of(module)):
        value = values.get(id(tensor))
        if value is not None:
            become(tensor, value.detach().clone())


def _devices_as_in(serving: nn.Module, skeleton: nn.Module) -> Callable[[torch.Tensor], torch.device] | None:
    """Returns the devices of a skeleton's tensors: those that serve under the same names. None where all are the CPU.

    A tensor that does not serve, as one on meta or a buffer that requests have removed, gets the device of the first
    one that does.
    """
    with_values = [tensor.device for tensor in tensors_of(modules_of(serving)) if not tensor.is_meta]
    first = next(iter(with_values), torch.device("cpu"))
    if all(device.type == "cpu" for device in with_values):
        return None
    devices = {name: tensor.device for name, tensor in runtime_state(serving).items() if not tensor.is_meta}
    by_id = {id(tensor): devices.get(name, first) for name, tensor in runtime_state(skeleton).items()}
    return lambda tensor: by_id.get(id(tensor), first)


# Checks of the weights.


_EXACT = "give weights with the layout of the program, or swap with exact=False, which converts them without loss"


def check_layout(assignments: Iterable[Assignment], where: str) -> None:
    """Requires contiguous tensors, or the strides of the slot, and a storage for each tensor.

    A compiled library reads weights by pointer, and would read views of a flat buffer and transposed views incorrectly.
    The check is the same for every kind of target, so that a source fits all of them or none. Raises
    `WeightsError`.
    """
    strided: list[tuple[str, str]] = []
    shared: list[tuple[str, str]] = []
    for assignment in assignments:
        stored, name, slot = assignment.stored, assignment.given, assignment.param
        if isinstance(stored, StoredTensor):
            stride, is_contiguous, nbytes = stored.stride, stored.is_contiguous, stored.nbytes
            storage_bytes = stored.storage.nbytes if nbytes else 0
        elif isinstance(stored, torch.Tensor) and stored.layout is torch.strided and len(payload_of(stored)) == 1:
            stride, is_contiguous, nbytes = stored.stride(), stored.is_contiguous(), stored.nbytes
            storage_bytes = storage_of(stored).nbytes() if nbytes else 0
        else:
            continue
        if not is_contiguous and not (slot.layout is torch.strided and tuple(slot.stride()) == tuple(stride)):
            strided.append((name, f"stride {tuple(stride)} of shape {tuple(stored.shape)}"))
        if storage_bytes and storage_bytes != nbytes:
            shared.append((name, f"{nbytes:,} bytes of a storage of {storage_bytes:,}"))
    if strided:
        raise _error("the elements of weights have another memory order", strided, where, "contiguous tensors")
    if shared:
        what = "weights are parts of a larger storage"
        raise _error(what, shared, where, "a storage for each tensor")


def kind_of(tensor: torch.Tensor) -> Kind:
    """Returns the kind of a tensor."""
    return None if is_plain(tensor) else (tensor.layout, torch.Tensor if type(tensor) is nn.Parameter else type(tensor))


def check_kinds(weights: Mapping[str, object], kinds: Mapping[str, Kind], where: str) -> None:
    """Raises `WeightsError` for sparse tensors and subclasses, except where the program has the same kind."""
    wrong = []
    for name, weight in weights.items():
        if name not in kinds:
            continue
        if isinstance(weight, StoredComposite):
            if "sparse" in weight.kind and kinds[name] is None:  # other composites may be made of plain tensors
                wrong.append((name, weight.kind))
        elif isinstance(weight, torch.Tensor) and kind_of(weight) not in (None, kinds[name]):
            wrong.append((name, f"{type(weight).__name__}, {weight.layout}"))
    if wrong:
        what = "weights are another kind of tensor than the program's: sparse, or a tensor subclass"
        tensors = [weights[name] for name, _ in wrong]
        remedy = "; ".join(remedies_for(tensors))
        if not remedy:
            ways = dict.fromkeys(map(_way_to_plain, tensors))
            remedy = f"give plain tensors: {', '.join(ways)}"
        raise _error(what, wrong, where, "the kind that the program has", remedy)


def _way_to_plain(weight: object) -> str:
    """Returns the call that makes a plain tensor of a sparse one, or of one of a subclass."""
    if not isinstance(weight, torch.Tensor) or weight.layout is not torch.strided:
        return "weight.to_dense()"
    return "weight.dequantize()" if len(payload_of(weight)) > 1 else "weight.as_subclass(torch.Tensor)"


def check_casts(planned: Iterable[Planned], where: str) -> None:
    """Raises `WeightsError` where a load casts a weight."""
    cast: list[tuple[str, str]] = []
    for item in planned:
        if isinstance(item, Assignment) and item.value.dtype != item.dtype and not is_dequantized(item.stored):
            cast.append((item.name, f"{short(item.value.dtype)} to {short(item.dtype)}"))
        elif isinstance(item, PlainTable) and item.casts:
            stored = short(item.stored_dtype)
            rows = zip(item.slots, item.dtypes, strict=True)
            cast += [(slot.name, f"{stored} to {short(dtype)}") for slot, dtype in rows]
    if cast:
        what = "weights have another dtype than the program"
        raise _error(what, cast, where, "the dtype of the program")


def dtype_error(problems: Sequence[Problem], where: str, given: Mapping[str, str]) -> WeightsError | None:
    """Returns the error for a plan whose only problems are lossy casts; None for any other plan.

    `given` has the lists that the call has already, as for `plan_error`.
    """
    wrong = [problem for problem in problems if problem.kind is ProblemKind.WRONG_DTYPE]
    if not wrong or len(wrong) < len(problems):
        return None
    found = [(problem.name, f"{problem.found}, which would have to be cast to {problem.expected}") for problem in wrong]
    what = "weights have another dtype than the program"
    return _error(what, found, where, "the dtype of the program", extended(_cast_remedy(wrong)[0].text, given))


class FiniteCheck:
    """Checks that the values of new weights are finite. Threads that read weights call it with what they have read.

    Code of the model runs while a load is planned, so it changes no value that has been read.
    """

    def __init__(self) -> None:
        self._finite: list[tuple[torch.Tensor, int]] = []
        """The weights that pieces belong to, and the bytes of these pieces; all of them are finite."""

    def __call__(self, tensor: torch.Tensor, piece: torch.Tensor) -> None:
        if not nonfinite(piece):
            self._finite.append((tensor, piece.nbytes))

    def check(self, new: Mapping[str, torch.Tensor], serving: State, where: str) -> None:
        """Raises `WeightsError` for elements that are not finite, unless the serving ones are not finite either.

        Args:
            new: the new weights by name.
            serving: returns the weights that serve.
            where: the source, for the error.
        """
        finite_bytes: dict[int, int] = {}
        for tensor, nbytes in self._finite:
            finite_bytes[id(tensor)] = finite_bytes.get(id(tensor), 0) + nbytes
        parts = _plain_parts(new)
        unseen = [part for part in parts.values() if finite_bytes.get(id(part)) != part.numel() * part.itemsize]
        found_ids = set(map(id, _nonfinite_among(unseen)))
        suspects = {name: tensor for name, tensor in parts.items() if id(tensor) in found_ids}
        before = _plain_parts(serving()) if suspects else {}
        found = []
        for name, tensor in suspects.items():
            wrong = ~_is_finite(tensor)
            old = before.get(name)
            if old is not None and not old.is_meta and old.shape == tensor.shape:
                wrong &= _is_finite(old)
            count = int(wrong.sum())
            if count:
                found.append((name, f"{count} of {tensor.numel()} elements"))
        if found:
            expected = "finite values wherever those that serve are finite"
            remedy = "look at the training run; check_finite=False accepts them"
            raise _error("weights are NaN or infinite", found, where, expected, remedy)


def _plain_parts(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns weights by name; in place of a quantized one, the tensors that it consists of."""
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        payload = [tensor] if is_plain(tensor) else payload_of(tensor)
        if len(payload) > 1:
            parts.update({f"{name}, part {number}": part for number, part in enumerate(payload, 1)})
        else:
            parts[name] = payload[0] if payload else tensor
    return parts


def _nonfinite_among(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors with infinite or NaN values. Small ones are looked at together, in one sum of a copy."""
    small: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    found: list[torch.Tensor] = []
    for tensor in tensors:
        is_small = tensor.is_cpu and is_plain(tensor) and not tensor.is_nested and tensor.nbytes < SMALL_BYTES
        if is_small and tensor.is_floating_point():
            small[tensor.dtype].append(tensor)
        elif nonfinite(tensor):
            found.append(tensor)
    for group in small.values():
        for start in range(0, len(group), _TOGETHER):
            some = group[start : start + _TOGETHER]
            with torch.no_grad():
                is_finite = has_finite_sum(torch.cat([tensor.flatten() for tensor in some]))
            if not is_finite:
                found += filter(nonfinite, some)
    return found


_TOGETHER = 256
"""The number of small tensors in one copy, which limits its size to 16 MiB."""


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.isfinite(tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor)


def _error(
    what: str,
    found: list[tuple[str, str]],
    where: str,
    expected: str,
    remedy: str = _EXACT,
) -> WeightsError:
    lines = listed((f"{name}: {difference}" for name, difference in found), 8, "; ")
    names = [name for name, _ in found]
    return WeightsError(what, where=where, expected=expected, found=lines, remedy=remedy, names=names)


# Swaps in place.


class Undo:
    """Copies a program's weights and buffers; a call writes the copies back.

    An interrupted call may be repeated. Raises `QuarantinedError` where the copies cannot be written back.
    """

    def __init__(self, program: Program) -> None:
        self._tensors = {**runtime_state(program.weights_module), **program.buffers}
        self._copies = {id(tensor): tensor.detach().clone() for tensor in self._tensors.values()}
        self._weights = list(program.weights_module.parameters())
        self._restore_buffers = buffer_restorer(program, self._copies)

    @property
    def before(self) -> dict[str, torch.Tensor]:
        """The copies, by name."""
        return {name: self._copies[id(tensor)] for name, tensor in self._tensors.items()}

    def __call__(self) -> None:
        error = sys.exc_info()[1]
        # Text: a reference to the handled error would keep its frames alive.
        after = "" if error is None else f", after {type(error).__name__}: {error}"
        del error
        try:
            settle(self._tensors.values())  # what has overwritten them may be queued on other streams
            with torch.no_grad():
                for parameter in self._weights:
                    parameter.detach().copy_(self._copies[id(parameter)])
            self._restore_buffers()  # a request of the canary may have replaced buffers
            settle(self._tensors.values())
        except Exception as failure:
            raise QuarantinedError(
                "a swap in place failed, and the weights could not be put back: no version can serve",
                found=f"{type(failure).__name__}: {failure}{after}",
            ) from failure


def detach_shared_storage(program: Program) -> None:
    """Moves weights and buffers, with their values, to new storages where other tensors share the old ones.

    An answer can be a weight, or a view of one, or have an autograd graph that saves one. A swap in place must not
    change such an answer. The weights keep their identity; views that modules have as attributes move with them.
    """
    tensors_of_storage: defaultdict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for tensor in _tensors_of(program):
        for part in payload_of(tensor):
            tensors_of_storage[storage_id(part)][id(part)] = part
    tensors_of_storage.pop(0, None)
    for tensors in tensors_of_storage.values():
        first = next(iter(tensors.values()))
        if storage_owners(first) <= len(tensors):
            continue
        storage = storage_of(first).clone()  # type: ignore[no-untyped-call]
        for tensor in tensors.values():
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                moved = tensor.detach()
                moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
                tensor.data = moved


_TABLES = ("_parameters", "_buffers", "_modules")


def _tensors_of(program: Program) -> Iterator[torch.Tensor]:
    """The parameters and buffers of a program, and the tensors in other attributes of its modules."""
    yield from program.weights_module.parameters()
    yield from program.buffers.values()
    for module in program.weights_module.modules():
        for name, value in vars(module).items():
            if name not in _TABLES:
                yield from _tensors_in(value, 4)


def _tensors_in(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | set | dict) and not isinstance(value, nn.Module):
        for item in items_of_container(value):
            yield from _tensors_in(item, depth - 1)
