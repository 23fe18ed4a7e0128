"""A swap up to its flip: loads a source into a new program, checks the weights, tries it, carries buffers over."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar, cast

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from modelstate.arguments import invalid_option
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import Source, open_source
from modelstate.errors import CanaryError, OptionError, PlacementError, PlanError, Remedy, WeightsError
from modelstate.formats.layers import trust_known_patches
from modelstate.loading.load import load_then
from modelstate.planning.matching import select_part, wrapper_rule
from modelstate.planning.options import LoadOptions
from modelstate.planning.planner import Planner
from modelstate.planning.transfer import Transfers
from modelstate.problems import Problem, ProblemKind, Remedies, allowing, casting, extended, plan_error
from modelstate.rules.expression import is_dequantized
from modelstate.rules.rule import Rule
from modelstate.rules.schema import renaming, way_back
from modelstate.serve.meta_clone import buffers_of, meta_clone, runtime_state
from modelstate.serve.targets import Program, Target
from modelstate.serve.weights import BufferDigests, Weights, buffer_digest, read_weights
from modelstate.text_format import listed, short_repr, size
from modelstate.torch_compat.dtypes import nonfinite, short
from modelstate.torch_compat.modules import (
    module_tables,
    modules_of,
    needs_protocol,
    non_persistent_buffers,
    own_buffers,
    tensors_of,
    without_state_dict_hooks,
)
from modelstate.torch_compat.plain import is_plain, remedies_for
from modelstate.torch_compat.private import default_modes, drop_frozen_code, flatten, payload_of, unflatten
from modelstate.transaction.swap_tensors import become
from modelstate.transaction.transaction import Transaction

Buffers = Literal["carry", "reset"]
_T = TypeVar("_T")
Calls = Callable[..., Any]


class SwapOptions(msgspec.Struct, frozen=True):
    """The options of `Live.swap`."""

    loading: LoadOptions
    exact: bool
    check_finite: bool
    canary: Canary | Callable[[Calls], object] | None
    buffers: Buffers


class SwapReport(msgspec.Struct, frozen=True):
    """The result of `Live.swap`. Printing it shows the versions, sizes and times.

    Examples:
        >>> report = live.swap("step-2000.safetensors")
        >>> report.version, report.previous
        (2, 1)
    """

    target: str
    source: str
    tensors: int
    """The number of weights that were filled; a tied weight counts once."""
    bytes: int
    """The size of these weights."""
    caught_up: bool = False
    """Whether weights in memory have caught up with a step, by the patches that they lacked."""
    version: int = 0
    """The id of the version that serves now."""
    previous: int = 0
    """The id of the version before."""
    staged_seconds: float = 0.0
    """Time to open, read and check the weights."""
    canary_seconds: float = 0.0
    flip_seconds: float = 0.0
    """Time to carry buffers over and to make the version the current one."""
    seconds: float = 0.0
    """Time of the whole swap."""
    carried: tuple[str, ...] = ()
    """Buffers that requests had changed, and that were taken over from the version before."""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        served, tensors, *_ = str(self).splitlines()
        return f"<{type(self).__name__}: {served}, {tensors.strip()}>"

    def __str__(self) -> str:
        lines = [
            f"{self.source} into {self.target}: version {self.version} serves, after {self.previous}",
            f"  {self.tensors} tensors, {size(self.bytes)}" + (", caught up in memory" if self.caught_up else ""),
            f"  staged in {self.staged_seconds:.3f} s, canary {self.canary_seconds:.3f} s, "
            f"flip {self.flip_seconds * 1e3:.3f} ms",
        ]
        if self.carried:
            lines.append(f"  carried over: {listed(self.carried, 8)}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def stage(
    target: Target, source: Source, options: SwapOptions, serving: Program, retired: Weights
) -> tuple[Program, SwapReport]:
    """Loads a source into a new program.

    The weights are maps of the file where that is safe, and have memory of their own elsewhere. Those of a step with
    patches are weights in memory that have caught up, where that is possible. `serving` is the program that serves:
    weights that the checkpoint may lack are copied from it. `retired` has the weights of the version that was retired
    last, whose memory is used again where no request or answer refers to it.

    Returns the program, and a report without versions and times.

    Raises `PlanError` where the source does not fit, `WeightsError` where the program cannot take the weights, and what
    `modelstate.open` and `modelstate.load` raise.
    """
    with trust_known_patches():
        checkpoint, selection = open_source(source), options.loading
    part, given_rules = select_part(checkpoint, selection, lambda: target.names)
    rules = given_rules
    names = set(map(renaming(rules), part) if rules else part)
    if not names <= target.names and (wrappers := wrapper_rule(names, target.names)) is not None:
        rules = (*rules, wrappers)
        names = set(map(renaming(rules), part))
    template, own_rules, without_hooks = target.read_plan(names)
    read, of_checkpoint = None, dict[str, str]()  # by runtime names: the names in the checkpoint
    modules = {prefix: module for prefix, module, *_ in module_tables(template)}
    is_on_cpu = {tensor.device.type for tensor in serving.tensors} <= {"cpu", "meta"}
    has_options = given_rules or selection.allow_missing or selection.allow_unexpected
    if is_on_cpu and not (has_options or part.flat.values or needs_protocol(modules, names, part.versions)):
        of_checkpoint = dict(zip(map(renaming((*rules, *own_rules)), part), part, strict=True))
        of_memory = runtime_state(template), target.free(retired), serving.weights
        read = read_weights(part, of_checkpoint, *of_memory, may_map=target.maps_files, verify=selection.verify)
    if read is not None:
        filled, notes = meta_clone(template, read.tensors), (*read.notes, *drop_frozen_code())
    else:
        of_checkpoint, own_rules = {}, (*rules[len(given_rules) :], *own_rules)
        final = replace(selection, key=None, rules=(*given_rules, *own_rules))
        with _swap_errors(target, options, given_rules, own_rules, part.source, serving):
            filled, notes = _load(part, template, serving, names, final, exact=options.exact, hooks=not without_hooks)
    state = runtime_state(filled)
    if options.check_finite:
        _check_finite(state, runtime_state(serving.module), part.source)
    program = target.program(filled)
    settle(program.tensors)  # requests on any stream find what has been copied
    plain = {id(tensor): tensor.detach() for tensor in program.tensors if tensor.is_cpu and is_plain(tensor)}
    tensors = {name: plain[id(tensor)] for name, tensor in runtime_state(program.module).items() if id(tensor) in plain}
    program.weights = replace(
        program.weights,
        tensors=tensors,
        maps={tensor.data_ptr() for tensor in tensors.values()} if read is None else read.maps,
        checkpoint=part if part.fingerprints else None,
        names=of_checkpoint,
    )
    sizes = {id(tensor): tensor.numel() * tensor.itemsize for tensor in state.values()}
    caught_up = read is not None and read.caught_up
    report = SwapReport(target.name, part.source, len(sizes), sum(sizes.values()), caught_up=caught_up, notes=notes)
    return program, report


def _load(
    part: Checkpoint,
    template: nn.Module,
    serving: Program,
    names: Set[str],
    options: LoadOptions,
    *,
    exact: bool,
    hooks: bool,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Loads into a copy of a module without memory, as `modelstate.load` does. Returns it with the notes of the load.

    `names` are those of the checkpoint by which the program may lack weights; `hooks` is whether the state-dict hooks
    of the module are called. Raises `PlanError`, `WeightsError`, and what `modelstate.load` raises.
    """
    kept = dict[int, torch.Tensor]()
    if options.allow_missing:  # what the checkpoint lacks stays as it serves
        slots = runtime_state(template)
        for name, tensor in runtime_state(serving.module).items():
            if name not in names or any(fnmatchcase(name, pattern) for pattern in options.allow_missing):
                kept[id(slots[name])] = tensor.detach().clone()
    skeleton = meta_clone(template, kept)
    kinds = {name: _kind_of(tensor) for name, tensor in runtime_state(skeleton).items()}
    kept_extra: list[str] = []

    def check(planner: Planner) -> None:
        if options.allow_missing:
            extra = [name for name in planner.slots.extra if name not in planner.extra_states]
            kept_extra.extend(name.rpartition(".")[0] for name in extra)
        if planner.problems:
            raise planner.error()
        if exact:
            _check_casts([item.transfers for item in planner.executions], part.source)

    # Patches may have been checked for another checkpoint: see `trust_known_patches`.
    verify = options.verify or bool(part.contents.patched)
    final = replace(options, verify=verify, device_of_meta=_devices_as_in(serving.module, skeleton))
    with nullcontext() if hooks else without_state_dict_hooks(skeleton), Transaction(skeleton) as transaction:
        report = load_then(transaction, part, final, check=check)
    for path in kept_extra:
        extra_state = serving.module.get_submodule(path).get_extra_state()
        skeleton.get_submodule(path).set_extra_state(copy.deepcopy(extra_state))
    _check_kinds(runtime_state(skeleton), kinds, part.source)
    return skeleton, report.notes


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


# Errors with the remedies of a swap.


def _cast_remedy(problems: Sequence[Problem]) -> list[Remedy]:
    other = casting(problems) or "to cast them: rules=[modelstate.rules.Cast(name, dtype)]"
    return [Remedy(f"give weights with the dtype of the program; or, {other}")]


_COMPLETE = "take a checkpoint that has them"
_REMEDIES: Remedies = {
    ProblemKind.MISSING: lambda members: [
        Remedy(_COMPLETE),
        allowing("allow_missing", members, "or, to keep those of the version that serves"),
    ],
    ProblemKind.UNEXPECTED: lambda members: [
        allowing("allow_unexpected", members, "if they are not needed"),
        Remedy(f"if they are misspelt: rules=[ms.rules.Rename({members[0].seen_by_rules!r}, other)]"),
    ],
    ProblemKind.WRONG_DTYPE: _cast_remedy,
    ProblemKind.UNINITIALISED: _COMPLETE,
}
"""In place of remedies with options that a swap does not have."""


@contextmanager
def _swap_errors(
    target: Target,
    options: SwapOptions,
    rules: tuple[Rule, ...],
    own_rules: tuple[Rule, ...],
    where: str,
    serving: Program,
) -> Iterator[None]:
    """Replaces a plan's error by one with the remedies of a swap, or by the target's own error.

    `own_rules` are those that the swap applies after the rules of the caller.
    """
    try:
        yield
    except PlanError as error:
        back = renaming(way_back(own_rules))
        problems = [replace(problem, name_for_rules=back(problem.name)) for problem in error.problems]
        arguments = {
            "rules": rules,
            "allow_missing": options.loading.allow_missing,
            "allow_unexpected": options.loading.allow_unexpected,
        }
        patterns = {name: f"*{name}" for name, value in arguments.items() if value}
        casts = [problem for problem in problems if problem.kind is ProblemKind.WRONG_DTYPE]
        if options.exact and casts and len(casts) == len(problems):
            differences = [
                (each.name, f"{each.found}, which would have to be cast to {each.expected}") for each in casts
            ]
            raise _dtype_error(differences, where, extended(_cast_remedy(casts)[0].text, patterns)) from error
        unexpected = [problem.name for problem in error.problems if problem.kind is ProblemKind.UNEXPECTED]
        if len(unexpected) == len(error.problems) and target.unexpected_error is not None:
            raise target.unexpected_error(unexpected) from error
        has_values = not any(tensor.is_meta for tensor in serving.tensors)
        remedies = _REMEDIES if has_values else {**_REMEDIES, ProblemKind.MISSING: _COMPLETE}
        raise plan_error(target.name, where, problems, remedies, given=patterns) from error.__cause__
    except PlacementError as error:
        error.remedy = "give weights of the class that the program has, as the state dict of such a module"
        raise


# Checks of the weights.


def _dtype_error(differences: list[tuple[str, str]], where: str, remedy: str) -> WeightsError:
    return _error("weights have another dtype than the program", differences, where, "the dtype of the program", remedy)


def _check_casts(transfers: Iterable[Transfers], where: str) -> None:
    """Raises `WeightsError` where a load casts a weight."""
    cast = [
        (name, f"{short(stored)} to {short(dtype)}")
        for item in transfers
        if item.own is None or not is_dequantized(item.own.stored)
        for name, stored, dtype in item.casts()
    ]
    if cast:
        remedy = "give weights with the dtype of the program, or swap with exact=False, which converts without loss"
        raise _dtype_error(cast, where, remedy)


def _kind_of(tensor: torch.Tensor) -> tuple[torch.layout, type] | None:
    """Returns the layout and class of a tensor; None for plain strided tensors."""
    return None if is_plain(tensor) else (tensor.layout, torch.Tensor if type(tensor) is nn.Parameter else type(tensor))


def _check_kinds(
    state: Mapping[str, torch.Tensor], kinds: Mapping[str, tuple[torch.layout, type] | None], where: str
) -> None:
    """Raises `WeightsError` for sparse tensors and subclasses, except where the program has the same kind."""
    wrong = {name: value for name, value in state.items() if _kind_of(value) not in (None, kinds.get(name))}
    if not wrong:
        return
    differences = [(name, f"{type(value).__name__}, {value.layout}") for name, value in wrong.items()]
    what = "weights are another kind of tensor than the program's: sparse, or a tensor subclass"
    ways = {
        "to_dense()"
        if value.layout is not torch.strided
        else ("dequantize()" if len(payload_of(value)) > 1 else "as_subclass(torch.Tensor)")
        for value in wrong.values()
    }
    remedy = f"give plain tensors: {', '.join(f'weight.{way}' for way in sorted(ways))}"
    remedy = "; ".join(remedies_for([*wrong.values()])) or remedy
    raise _error(what, differences, where, "the kind that the program has", remedy)


def _check_finite(new: Mapping[str, torch.Tensor], serving: Mapping[str, torch.Tensor], where: str) -> None:
    """Raises `WeightsError` for weights with NaN or infinity, unless the same ones that serve have them, too."""

    def is_finite(tensor: torch.Tensor) -> bool:
        parts = [tensor] if is_plain(tensor) else payload_of(tensor)
        return not any(nonfinite(part) for part in parts if not part.is_meta)

    wrong = [name for name, tensor in new.items() if not is_finite(tensor)]
    differences = [(name, "NaN or infinity") for name in wrong if name not in serving or is_finite(serving[name])]
    if differences:
        expected = "finite values wherever those that serve are finite"
        remedy = "look at the training run; check_finite=False accepts them"
        raise _error("weights are NaN or infinite", differences, where, expected, remedy)


def _error(what: str, differences: list[tuple[str, str]], where: str, expected: str, remedy: str) -> WeightsError:
    lines = listed((f"{name}: {difference}" for name, difference in differences), 8, "; ")
    names = [name for name, _ in differences]
    return WeightsError(what, where=where, expected=expected, found=lines, remedy=remedy, names=names)


# Buffers that requests change: which ones have changed, carrying them into a new version, and restoring them.


def on_gpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that are on GPUs."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [tensor for tensor in tensors if tensor.is_cuda] if is_used else []


def settle(tensors: list[torch.Tensor]) -> None:
    """Waits for all work that is queued on the GPUs of these tensors, on any stream.

    A request on a GPU ends when its work is queued, and requests may use streams of their own.
    """
    for device in {tensor.device for tensor in on_gpu(tensors)}:
        torch.cuda.synchronize(device)


def modified_buffers(module: nn.Module, since: BufferDigests) -> dict[str, torch.Tensor | None]:
    """Returns the buffers that requests have changed, and None for buffers that they have set to None."""
    present = buffers_of(module)
    settle([*present.values()])
    modified: dict[str, torch.Tensor | None] = {
        name: buffer for name, buffer in present.items() if since.get(name) != buffer_digest(buffer)
    }
    for prefix, _, _, buffers in module_tables(module):
        names = [f"{prefix}{last}" for last, buffer in buffers.items() if buffer is None]
        modified.update({name: None for name in names if name in since})
    return modified


def carry_over(buffers: Mapping[str, torch.Tensor | None], module: nn.Module) -> tuple[str, ...]:
    """Copies the values of these buffers into a module. Returns their names.

    Names that have one tensor as their value are tied in the module too, and others are not.
    """
    if not buffers:
        return ()
    present = buffers_of(module)
    values_of_present: defaultdict[int, set[int]] = defaultdict(set)
    for name, tensor in present.items():
        values_of_present[id(tensor)].add(id(buffers.get(name)))
    carried: dict[int, torch.Tensor | None] = {id(None): None}
    for name, value in buffers.items():
        buffer = present.get(name)
        if value is not None and id(value) not in carried:
            if buffer is not None and _fits(buffer, value) and len(values_of_present[id(buffer)]) == 1:
                _overwrite(buffer, value)
                carried[id(value)] = buffer
            else:
                carried[id(value)] = value.detach().clone()
        replacement = carried[id(value)]
        if replacement is not buffer:  # requests replace the buffer, such as a cache that grows
            path, _, last = name.rpartition(".")
            own_buffers(module.get_submodule(path))[last] = replacement
    settle([*present.values()])
    return tuple(buffers)


def buffer_restorer(module: nn.Module) -> Callable[[], None]:
    """Returns a function that restores the present buffers: their values, and the set of buffers of each submodule."""
    tables = [(own_buffers(part), non_persistent_buffers(part)) for part in module.modules()]
    before = [(dict(table.items()), {*names}) for table, names in tables]
    saved = [(buffer, buffer.detach().clone()) for buffer in buffers_of(module).values()]

    def restore() -> None:
        for buffer, value in saved:
            if _fits(buffer, value):
                _overwrite(buffer, value)
            else:  # it was resized
                become(buffer, value)
        for (table, names), (buffers, names_before) in zip(tables, before, strict=True):
            # TorchScript does not allow writing its table, so an equal one is left alone.
            if [(name, id(value)) for name, value in table.items()] != [(name, id(buffers[name])) for name in buffers]:
                table.clear()
                table.update(buffers)
            names.clear()
            names.update(names_before)

    return restore


def _fits(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the value can be copied into the tensor without conversion."""
    return (tensor.shape, tensor.dtype, tensor.layout) == (value.shape, value.dtype, value.layout)


def _overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copies into a tensor, which a request in inference mode may have created."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.detach().copy_(value)


# Canaries: requests and checks that try a new version before it serves.


class Canary(msgspec.Struct, frozen=True):
    """A request that a new version has to answer correctly before it serves.

    The new version must not raise. Its answer must have the structure, shapes and dtypes of a reference, and no NaN
    where the reference has none. The reference is `expected`, or the answer of the version that serves to the same
    inputs. Values other than tensors must be of the reference's type. With a tolerance, numbers and tensors must be
    close to the reference, and text must be equal; other objects are compared by class only.

    Args:
        args: Positional inputs of the request.
        kwargs: Inputs by keyword.
        check: Called with the new answer. It refuses the answer by returning False or raising. False includes numpy's,
            and a tensor or an array of dtype bool that is not all true; None, 0 and every other value accept.
        expected: The reference; None asks the version that serves, which must be stateless for that. Where nothing
            serves yet, the answer may be any without NaN.
        atol: The largest absolute difference of an element, in addition to `rtol`. Without both tolerances, any
            difference is allowed.
        rtol: The largest difference of an element, relative to the reference.

    Raises:
        OptionError: an argument is invalid.

    Examples:
        >>> live.swap("step-2000.safetensors", canary=modelstate.Canary((x,), atol=0.1))
    """

    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = msgspec.field(default_factory=dict)
    check: Callable[..., object] | None = None
    expected: object = None
    atol: float | None = None
    rtol: float | None = None

    def __post_init__(self) -> None:
        for name in ("atol", "rtol"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and value >= 0):
                raise invalid_option(name, "must be a tolerance", value, expected="a number from 0, or None")
        if not isinstance(self.args, tuple | list) or not isinstance(self.kwargs, Mapping):
            raise OptionError(
                "args= and kwargs= must be the inputs of a call",
                expected="a tuple, and a dict of names",
                found=f"{type(self.args).__name__}, {type(self.kwargs).__name__}",
            )
        if self.check is not None and not callable(self.check):
            raise OptionError("check= must be callable", found=type(self.check).__name__)

    def _try_out(self, new: Calls) -> None:
        """Calls the new version, and compares its answer with the reference. Raises `CanaryError`."""
        answer = self._answer_of(new, "the new version")
        if self.expected is not None:
            compare(answer, self.expected, atol=self.atol, rtol=self.rtol)
        elif self.needs_reference:
            for leaf in flatten(answer)[0]:
                if isinstance(value := _as_tensor(leaf), torch.Tensor):
                    _check_nan(wide(value))
        if self.check is not None:
            run_check(self.check, answer)

    @property
    def needs_reference(self) -> bool:
        """Whether the version that serves has to give the reference. Without one, only NaN is refused."""
        return self.expected is None and (self.check is None or self.atol is not None or self.rtol is not None)

    def _answer_of(self, program: Calls, who: str) -> object:
        try:
            return program(*self.args, **self.kwargs)
        except Exception as error:
            raise _raised(f"{who} raised on the canary's inputs", error) from error


def prepared(canary: Canary, serving: Calls) -> Canary:
    """Returns a canary with a reference, which the version that serves gives where none is set.

    Raises `CanaryError` where the version that serves raises on the inputs.
    """
    if not canary.needs_reference:
        return canary
    leaves, spec = flatten(canary._answer_of(serving, "the version that serves"))
    # Copies: the next call may use the memory of an answer again, as the graphs of "reduce-overhead" do.
    kept = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return replace(canary, expected=unflatten(kept, spec))


def run_canary(
    canary: Canary | Callable[[Calls], object], new: Program, buffers: Mapping[str, torch.Tensor | None]
) -> None:
    """Tries a program that no request calls, with the buffers that it will take over, and restores its own afterwards.

    Raises `CanaryError`.
    """
    with default_modes():
        restore = buffer_restorer(new.module)
    try:
        with default_modes():
            carry_over(buffers, new.module)
        if isinstance(canary, Canary):
            canary._try_out(new)
        else:
            run_check(canary, new)
    finally:
        with default_modes():
            restore()


def run_check(check: Callable[[_T], object], value: _T) -> None:
    """Runs a check of the user. Raises `CanaryError` where it returns False or raises."""
    try:
        result = check(value)
        if str(getattr(result, "dtype", "")) in ("bool", "torch.bool"):
            refuses = not bool(cast(torch.Tensor, result).all())
        else:
            refuses = result is False
    except Exception as error:
        raise _raised("the canary's check raised", error) from error
    if refuses:
        raise CanaryError("the canary's check refused the new version", found="False")


def compare(answer: object, reference: object, *, atol: float | None, rtol: float | None = None) -> None:
    """Compares an answer with a reference as `Canary` describes it. Raises `CanaryError`."""
    (leaves, spec), (reference_leaves, reference_spec) = flatten(answer), flatten(reference)
    if spec != reference_spec:
        raise CanaryError("the answer has another structure", expected=reference_spec, found=spec)
    is_bounded = atol is not None or rtol is not None
    for leaf, reference_leaf in zip(leaves, reference_leaves, strict=True):
        value, expected = _as_tensor(leaf), _as_tensor(reference_leaf)
        are_tensors = isinstance(leaf, torch.Tensor), isinstance(reference_leaf, torch.Tensor)
        if _kind(value) != _kind(expected) or are_tensors[0] is not are_tensors[1]:
            raise CanaryError("the answer has another type", expected=_kind(reference_leaf), found=_kind(leaf))
        if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
            value, expected = wide(value), wide(expected).to(value.device)
            if not bool(torch.isnan(expected).any()):
                _check_nan(value)
            if is_bounded and not torch.allclose(value, expected, rtol=rtol or 0.0, atol=atol or 0.0, equal_nan=True):
                most = float((value - expected).abs().max())
                expected_text = f"atol={atol}, rtol={rtol}"
                raise CanaryError("the answer differs too much", expected=expected_text, found=f"up to {most:g}")
        elif is_bounded and isinstance(value, str | bytes) and value != expected:
            raise CanaryError("the answer is another text", expected=repr(expected), found=short_repr(value))


def _raised(what: str, error: Exception) -> CanaryError:
    return CanaryError(what, found=f"{type(error).__name__}: {error}")


def _check_nan(value: torch.Tensor) -> None:
    """Raises `CanaryError` where a tensor has NaN."""
    if bool(torch.isnan(value).any()):
        found = f"{int(torch.isnan(value).sum())} of {value.numel()}"
        raise CanaryError("the answer has NaN", expected="none", found=found)


def _as_tensor(value: object) -> object:
    """Converts numbers and numpy arrays to tensors, so that they are compared in the same way."""
    if isinstance(value, bool | int | float | complex) or type(value).__module__ == "numpy":
        try:
            exact = {float: torch.float64, complex: torch.complex128}.get(type(value))
            return torch.as_tensor(value, dtype=exact)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return value  # such as an array of strings, or a number beyond 64 bits
    return value


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f", {value.layout}"
        return f"a tensor, {list(value.shape)}, {value.dtype}{layout}"
    return type(value).__qualname__


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Converts a tensor to a dense one in the widest dtype of its kind."""
    tensor = tensor.detach()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
