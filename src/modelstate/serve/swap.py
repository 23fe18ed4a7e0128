"""Loads a source into a new version, checks its weights, and carries the buffers over that requests have changed.

Weights that are in a checkpoint as they are needed are mapped or read into free memory, without a plan. Everything else
is a load.

Of weights that were read from a checkpoint as they are, the digests are those of the checkpoint. A patch names the
digest of the tensor that it is for. So which patches lead from a weight in memory to a step is known without reading
the weight. They are applied to the memory of a version that no request uses, or to a copy of a weight that serves.

A request may have written to a weight, and no count of torch has all writes (`.data`, collectives, fused optimizers).
So weights that have caught up are hashed, and all is read from the files where one is not as the step says.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.mapped import Maps
from modelstate.checkpoint.open import Source, open as open_checkpoint
from modelstate.errors import PlacementError, Remedy, WeightsError
from modelstate.formats.block_writer import write_blocks
from modelstate.formats.layers import trusts_known_patches
from modelstate.io.engine import Request, read_ranges
from modelstate.io.files import OpenFiles
from modelstate.io.memory import fresh_tensors
from modelstate.io.tensors import compute
from modelstate.loading.load import load_then
from modelstate.planning.matching import select_part, wrapper_rule
from modelstate.planning.options import LoadOptions
from modelstate.planning.planner import Planner
from modelstate.problems import Problem, ProblemKind, Remedies, allowing, casting, extended, plan_error
from modelstate.rules.expression import is_dequantized
from modelstate.rules.rule import Rule
from modelstate.rules.schema import renaming, way_back
from modelstate.serve.meta_clone import buffers_of, meta_clone, runtime_state
from modelstate.serve.targets import Program, Target, Weights, buffer_digest, fits
from modelstate.spec import ByteRange, Combined, Stored, StoredTensor, bytes_key, is_run
from modelstate.text_format import listed, size
from modelstate.torch_compat.dtypes import nonfinite, short
from modelstate.torch_compat.modules import module_tables, needs_protocol, own_buffers, without_state_dict_hooks
from modelstate.torch_compat.plain import is_plain, remedies_for
from modelstate.torch_compat.private import drop_frozen_code, payload_of
from modelstate.transaction.transaction import Transaction


class SwapReport(msgspec.Struct, frozen=True):
    """The result of `Live.swap`. Printing it shows the versions, sizes and times.

    Attributes:
        tensors: The number of weights that were filled; a tied weight counts once.
        bytes: The size of these weights.
        caught_up: Whether weights in memory have caught up with a step, by the patches that they lacked.
        version: The id of the version that serves now.
        previous: The id of the version before.
        staged_seconds: Time to open, read and check the weights.
        flip_seconds: Time to carry buffers over and to make the version the current one.
        seconds: Time of the whole swap.
        carried: Buffers that requests had changed, and that were taken over from the version before.

    Examples:
        >>> report = live.swap("step-2000.safetensors")
        >>> report.version, report.previous
        (2, 1)
    """

    target: str
    source: str
    tensors: int
    bytes: int
    caught_up: bool = False
    version: int = 0
    previous: int = 0
    staged_seconds: float = 0.0
    canary_seconds: float = 0.0
    flip_seconds: float = 0.0
    seconds: float = 0.0
    carried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

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
    target: Target,
    source: Source,
    options: LoadOptions,
    serving: Program,
    retired: Weights,
    *,
    exact: bool,
    check_finite: bool,
) -> tuple[Program, SwapReport]:
    """Loads a source into a new program.

    The weights are maps of the file where that is safe, and have memory of their own elsewhere. Those of a step with
    patches are weights in memory that have caught up, where that is possible. `serving` is the program that serves:
    weights that the checkpoint may lack are copied from it. `retired` has the weights of the version that was retired
    last, whose memory is used again where no request or answer refers to it. `exact` and `check_finite` are those of
    `Live.swap`.

    Returns the program, and a report without versions and times.

    Raises `PlanError` where the source does not fit, `WeightsError` where the program cannot take the weights, and what
    `modelstate.open` and `modelstate.load` raise.
    """
    with trusts_known_patches.replaced(True):
        checkpoint = open_checkpoint(source)
    part, given_rules = select_part(checkpoint, options, lambda: target.names)
    names, own_rules = set(map(renaming(given_rules), part) if given_rules else part), tuple[Rule, ...]()
    if not names <= target.names and (wrappers := wrapper_rule(names, target.names)) is not None:
        names, own_rules = set(map(renaming((wrappers,)), names)), (wrappers,)
    template, rules, without_hooks = target.read_plan(names)
    own_rules = (*own_rules, *rules)
    read, of_checkpoint = None, dict[str, str]()  # by runtime names: the names in the checkpoint
    modules = {prefix: module for prefix, module, *_ in module_tables(template)}
    is_on_cpu = {tensor.device.type for tensor in serving.tensors} <= {"cpu", "meta"}
    has_options = given_rules or options.allow_missing or options.allow_unexpected
    if is_on_cpu and not (has_options or part.flat.values or needs_protocol(modules, names, part.versions)):
        of_checkpoint = dict(zip(map(renaming(own_rules), part) if own_rules else part, part, strict=True))
        of_memory = runtime_state(template), cache(partial(target.free, retired)), serving.weights
        read = read_weights(part, of_checkpoint, *of_memory, may_map=target.maps_files, verify=options.verify)
    if read is not None:
        filled, notes = meta_clone(template, read.tensors), (*read.notes, *drop_frozen_code())
    else:
        of_checkpoint = {}
        slots = runtime_state(template)
        kept = {  # what the checkpoint lacks stays as it serves
            id(slots[name]): tensor.detach().clone()
            for name, tensor in (runtime_state(serving.module) if options.allow_missing else {}).items()
            if name not in names or any(fnmatchcase(name, pattern) for pattern in options.allow_missing)
        }
        filled = meta_clone(template, kept)
        with nullcontext() if not without_hooks else without_state_dict_hooks(filled):
            notes = _load(part, filled, target, serving, options, given_rules, own_rules, exact=exact)
    state = runtime_state(filled)
    if check_finite:
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
    return program, SwapReport(target.name, part.source, len(sizes), sum(sizes.values()), caught_up, notes=notes)


class WeightsRead(NamedTuple):
    """The result of `read_weights`.

    Attributes:
        tensors: By the ids of their slots.
        maps: The addresses of those that are maps of a file.
        caught_up: Whether weights in memory have caught up.
        notes: Remarks about files that cannot be mapped.
    """

    tensors: dict[int, torch.Tensor]
    maps: set[int]
    caught_up: bool
    notes: Sequence[str]


def read_weights(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    slots: Mapping[str, torch.Tensor],
    free: Callable[[], Weights],
    serving: Weights,
    *,
    may_map: bool,
    verify: bool,
) -> WeightsRead | None:
    """Reads the weights of a version as they are in a checkpoint, as far as they cannot catch up in memory.

    Returns None where it does not have exactly the values for these slots, or a weight in memory is not what was read
    into it: a load says what is wrong, casts, or reads all.

    Args:
        checkpoint: The checkpoint.
        names: The name in the checkpoint for each runtime name.
        slots: The tensors on meta for which weights are needed, by their runtime names.
        free: Returns weights whose memory nothing uses. It is written to: afterwards their values are not known.
        serving: The weights that serve, which stay as they are.
        may_map: Whether weights may be maps of the files.
        verify: Whether values only count that are compared with their digests.

    Raises `ReadFailedError`, `ChecksumError` with `verify`, and `DamagedFileError` for a patch that cannot be applied.
    """
    sources = dict[int, tuple[str, Stored]]()
    for name, slot in slots.items():
        stored = checkpoint.stored(names[name]) if name in names else None
        if stored is None or not (slot.is_meta and fits(slot, stored)):  # TorchScript has memory
            return None
        first_name, first = sources.setdefault(id(slot), (name, stored))
        if bytes_key(first, first_name) != bytes_key(stored, name):
            return None
    places = {stored.storage if is_run(stored) else id(stored) for _, stored in sources.values()}
    if len(names) > len(slots) or len(places) < len(sources):  # weights that are not tied would share a map
        return None
    contents, targets = checkpoint.contents, list[tuple[Stored, torch.Tensor]]()
    maps = Maps(checkpoint.fingerprints, checkpoint.format)
    found, mapped, to_verify = dict[int, torch.Tensor](), set[int](), set[ByteRange]()
    caught_up = dict[int, str]()  # the digests that the weights must have then
    for slot_id, (name, stored) in sources.items():
        value, patched = stored, contents.patched.get(stored) if isinstance(stored, Combined) else None
        digests = checkpoint.digests_of(stored) if contents.patched else ()
        for weights in (free(), serving)[: 1 if patched is None else 2] if digests else ():
            digest = weights.digest(name)
            if digest in digests:
                value, caught_up[slot_id] = weights.tensors[name], digests[-1]
                if patched is None or (weights is not serving and digest == digests[-1]):
                    found[slot_id] = value
                else:
                    value = patched.later(value, digests.index(digest))
                break
        # Payloads are verified in any case: see `trusts_known_patches`.
        parts = [*value.parts[0 if verify else 1 :]] if isinstance(value, Combined) else [value] if verify else []
        to_verify.update(part.storage for part in parts if isinstance(part, StoredTensor))
        if isinstance(value, StoredTensor) and (not value.nbytes or (may_map and maps.can_map(value.extent, None))):
            found[slot_id] = maps.tensor(value)
            mapped.add(found[slot_id].data_ptr())
        elif slot_id not in found:
            new = free().tensors.get(name)
            if new is None or new.data_ptr() in free().maps:
                new = fresh_tensors([(torch.Size(value.shape), None, value.dtype)])[0]
            targets.append((value, new))
            found[slot_id] = new
    if verify or to_verify:
        check = checkpoint.verification()
        replace(check, names_of={place: of for place, of in check.names_of.items() if place in to_verify}).run()
    if targets or caught_up:
        free().names.clear()
    if targets:
        with OpenFiles(checkpoint.fingerprints) as files, torch.no_grad():
            read = partial(read_ranges, files=files)
            read([Request(value.extent, out.data_ptr()) for value, out in targets if isinstance(value, StoredTensor)])
            if computed := [(value, out) for value, out in targets if isinstance(value, Combined)]:
                compute(computed, partial(read, threads=1), read_whole=maps.read)
            for value, out in targets:
                if isinstance(value, torch.Tensor):
                    out.copy_(value)
            files.check_unchanged()
    maps.check_unchanged()
    if caught_up and write_blocks(None, 0, [found[slot_id] for slot_id in caught_up]) != [*caught_up.values()]:
        return None  # a request has written to a weight
    mapped |= free().maps & {tensor.data_ptr() for tensor in found.values()} if caught_up else set()
    return WeightsRead(found, mapped, bool(caught_up), maps.notes)


def _load(
    part: Checkpoint,
    module: nn.Module,
    target: Target,
    serving: Program,
    options: LoadOptions,
    rules: tuple[Rule, ...],
    own_rules: tuple[Rule, ...],
    *,
    exact: bool,
) -> tuple[str, ...]:
    """Loads into the module of a new version, as `modelstate.load` does. Returns the notes of the load.

    `rules` are those of the caller, and `own_rules` those that the swap applies after them. Raises `PlanError` with the
    remedies of a swap, `WeightsError`, and what `modelstate.load` raises.
    """
    kinds = {name: _kind_of(tensor) for name, tensor in runtime_state(module).items()}
    kept_extra: list[str] = []

    def check(planner: Planner) -> None:
        if options.allow_missing:
            extra = [name for name in planner.slots.extra if name not in planner.extra_states]
            kept_extra.extend(name.rpartition(".")[0] for name in extra)
        back = renaming(way_back(own_rules))
        problems = [replace(problem, name_for_rules=back(problem.name)) for problem in planner.problems]
        of_kinds = {problem.kind for problem in problems}
        given = {name: f"*{name}" for name in ("rules", "allow_missing", "allow_unexpected") if getattr(options, name)}
        casts = [
            (name, f"{short(stored)} to {short(dtype)}")
            for item in (execution.transfers for execution in planner.executions)
            if item.own is None or not is_dequantized(item.own.stored)
            for name, stored, dtype in item.casts()
        ]
        remedy = "give weights with the dtype of the program, or swap with exact=False, which converts without loss"
        if of_kinds == {ProblemKind.WRONG_DTYPE}:
            casts = [(problem.name, f"{problem.found} to {problem.expected}") for problem in problems]
            remedy = extended(_cast_remedy(problems)[0].text, given)
        if exact and casts and of_kinds <= {ProblemKind.WRONG_DTYPE}:
            what, expected = "weights have another dtype than the program", "the dtype of the program"
            raise _error(what, casts, part.source, expected, remedy)
        if of_kinds == {ProblemKind.UNEXPECTED} and not target.has_all_names:
            names = [problem.name for problem in problems]
            raise WeightsError(
                "the package has no such tensors: they were inlined when it was compiled, or are no part of it",
                where=target.name,
                found=listed(names, 8),
                remedy="compile with modelstate.export(..., kind='aoti'), so that every weight can be swapped; or, for "
                "tensors that are the same in every version: rules=[modelstate.rules.Ignore(name)]",
                names=names,
            )
        if problems:
            has_values = not any(tensor.is_meta for tensor in serving.tensors)
            remedies = _REMEDIES if has_values else {**_REMEDIES, ProblemKind.MISSING: _COMPLETE}
            raise plan_error(target.name, part.source, problems, remedies, given=given) from planner.cause

    final = replace(
        options,
        key=None,
        rules=(*rules, *own_rules),
        verify=options.verify or bool(part.contents.patched),  # see `trusts_known_patches`
        device_of_meta=_devices_as_in(serving, module),
    )
    try:
        with Transaction(module) as transaction:
            report = load_then(transaction, part, final, check=check)
    except PlacementError as error:
        error.remedy = "give weights of the class that the program has, as the state dict of such a module"
        raise
    for path in kept_extra:
        extra_state = serving.module.get_submodule(path).get_extra_state()
        module.get_submodule(path).set_extra_state(copy.deepcopy(extra_state))
    _check_kinds(runtime_state(module), kinds, part.source)
    return report.notes


def _devices_as_in(serving: Program, module: nn.Module) -> Callable[[torch.Tensor], torch.device] | None:
    """Returns the devices of a module's tensors: those that serve under the same names. None where all are the CPU.

    A tensor that does not serve, as one on meta or a buffer that requests have removed, gets the device of the first
    one that does.
    """
    with_values = [tensor.device for tensor in serving.tensors if not tensor.is_meta]
    if all(device.type == "cpu" for device in with_values):
        return None
    devices = {name: tensor.device for name, tensor in runtime_state(serving.module).items() if not tensor.is_meta}
    by_id = {id(tensor): devices.get(name, with_values[0]) for name, tensor in runtime_state(module).items()}
    return lambda tensor: by_id.get(id(tensor), with_values[0])


# Remedies of a swap, in place of those with options that it does not have.


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


# Checks of the weights.


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


def on_gpu(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Returns the tensors that are on GPUs."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [tensor for tensor in tensors if tensor is not None and tensor.is_cuda] if is_used else []


def settle(tensors: Iterable[torch.Tensor | None]) -> None:
    """Waits for all work that is queued on the GPUs of these tensors, on any stream.

    A request on a GPU ends when its work is queued, and requests may use streams of their own.
    """
    for device in {tensor.device for tensor in on_gpu(tensors)}:
        torch.cuda.synchronize(device)


def modified_buffers(program: Program) -> dict[str, torch.Tensor | None]:
    """Returns the buffers that requests have changed, and None for buffers that they have set to None."""
    present, since = buffers_of(program.module), program.weights.buffers
    settle(present.values())
    return {name: buffer for name, buffer in present.items() if since.get(name) != buffer_digest(buffer)}


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
            kind = value.shape, value.dtype, value.layout
            has_kind = buffer is not None and (buffer.shape, buffer.dtype, buffer.layout) == kind
            if buffer is not None and has_kind and len(values_of_present[id(buffer)]) == 1:
                # A request in inference mode may have created the buffer.
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.detach().copy_(value)
                carried[id(value)] = buffer
            else:
                carried[id(value)] = value.detach().clone()
        replacement = carried[id(value)]
        if replacement is not buffer:  # requests replace the buffer, such as a cache that grows
            path, _, last = name.rpartition(".")
            own_buffers(module.get_submodule(path))[last] = replacement
    settle(present.values())
    return tuple(buffers)
