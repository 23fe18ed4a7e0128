"""From a checkpoint into a live model: plan, stage, commit."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import NO_PICKLE, argument_order, foreign_arguments, is_module, is_source
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.errors import ModelStateError, OptionError, PlacementError, ReadFailedError
from modelstate.loading.background import LoadHandle
from modelstate.loading.commit import LOAD_AGAIN, Place, StagedLoad
from modelstate.loading.options import AnyTransform, check_budget_option, check_model, options_of
from modelstate.loading.prefetch import bring_in, prefault_async, prefetch_range
from modelstate.loading.report import LoadReport, progress_bar
from modelstate.loading.stage import check_budget, read_in_place, stage
from modelstate.planning.plan import LoadPlan, Options
from modelstate.planning.prepare import Preparation
from modelstate.process import gc_paused
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Schema
from modelstate.torch_compat.plain import is_plain
from modelstate.transaction.exclusive import exclusive
from modelstate.transaction.optimizers import check_optimizers, following_state, placed
from modelstate.transaction.references import lost_references
from modelstate.transaction.transaction import Transaction

Source = str | os.PathLike[str] | Mapping[str, Any] | Checkpoint
_OF_TORCH = {
    "map_location": "device=: where the tensors go; without it they stay where the model has them",
    "strict": 'leave it out: all names have to fit. To allow some that do not: allow_missing=["head.*"], '
    'allow_unexpected=["old.*"]',
    "assign": "leave it out: tensors on meta get memory, and all parameters stay the objects that they are",
    "weights_only": NO_PICKLE,
    "mmap": "map=: whether tensors on meta may show the file itself",
}
"""Arguments of `torch.load` and `load_state_dict`, and what takes their place."""


@argument_order("ms.plan", is_module, is_source)
@foreign_arguments(**_OF_TORCH)
def plan(
    model: nn.Module,
    source: Source,
    *,
    key: str | None = None,
    rules: Iterable[Rule] | Schema = (),
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    transform: AnyTransform | Mapping[str, AnyTransform | None] | None = None,
    map: bool | None = None,
    in_place: bool = False,
    init_missing: bool = False,
) -> LoadPlan:
    """What `load` with the same arguments would do, and everything that stands in its way.

    The model is not changed. Its own loading code runs (hooks and `_load_from_state_dict` overrides; not
    `set_extra_state`), and what that does is undone. No tensor's bytes are read, unless that code or the function of
    an `Apply` looks at them, or two values have to be compared: of tied tensors, of a `Same`, and of non-persistent
    buffers that the checkpoint has too.

    Raises what opening raises, `AmbiguousCheckpointError`, `KeyNotFoundError`, `OptionError`, and `ModelCodeError`
    where the model's code raises. Problems do not raise: see `Plan.ok`, `Plan.problems`.
    """
    options = options_of(
        key, rules, allow_missing, allow_unexpected, dtype, device, transform, map, in_place, init_missing
    )
    model = check_model(model)
    checkpoint = open_checkpoint(source)
    with exclusive(model), Transaction(model) as transaction, gc_paused(), torch.random.fork_rng(devices=[]):
        return Preparation(transaction, checkpoint, options, Place, call_extra_state=False).plan()


@overload
def load(
    model: nn.Module,
    source: Source | LoadPlan,
    *,
    key: str | None = ...,
    rules: Iterable[Rule] | Schema = ...,
    allow_missing: Iterable[str] = ...,
    allow_unexpected: Iterable[str] = ...,
    dtype: torch.dtype | str | None = ...,
    device: torch.device | str | None = ...,
    transform: AnyTransform | Mapping[str, AnyTransform | None] | None = ...,
    map: bool | None = ...,
    in_place: bool = ...,
    init_missing: bool = ...,
    verify: bool = ...,
    optimizers: Iterable[torch.optim.Optimizer] = ...,
    progress: bool | None = ...,
    max_memory_bytes: int | None = ...,
    prefault: bool | None = ...,
    background: Literal[False] = False,
) -> LoadReport: ...
@overload
def load(
    model: nn.Module,
    source: Source | LoadPlan,
    *,
    key: str | None = ...,
    rules: Iterable[Rule] | Schema = ...,
    allow_missing: Iterable[str] = ...,
    allow_unexpected: Iterable[str] = ...,
    dtype: torch.dtype | str | None = ...,
    device: torch.device | str | None = ...,
    transform: AnyTransform | Mapping[str, AnyTransform | None] | None = ...,
    map: bool | None = ...,
    in_place: bool = ...,
    init_missing: bool = ...,
    verify: bool = ...,
    optimizers: Iterable[torch.optim.Optimizer] = ...,
    progress: bool | None = ...,
    max_memory_bytes: int | None = ...,
    prefault: bool | None = ...,
    background: Literal[True],
) -> LoadHandle: ...
@overload
def load(
    model: nn.Module,
    source: Source | LoadPlan,
    *,
    key: str | None = ...,
    rules: Iterable[Rule] | Schema = ...,
    allow_missing: Iterable[str] = ...,
    allow_unexpected: Iterable[str] = ...,
    dtype: torch.dtype | str | None = ...,
    device: torch.device | str | None = ...,
    transform: AnyTransform | Mapping[str, AnyTransform | None] | None = ...,
    map: bool | None = ...,
    in_place: bool = ...,
    init_missing: bool = ...,
    verify: bool = ...,
    optimizers: Iterable[torch.optim.Optimizer] = ...,
    progress: bool | None = ...,
    max_memory_bytes: int | None = ...,
    prefault: bool | None = ...,
    background: bool,
) -> LoadReport | LoadHandle: ...
@argument_order("ms.load", is_module, lambda value: is_source(value) or isinstance(value, LoadPlan))
@foreign_arguments(**_OF_TORCH)
def load(
    model: nn.Module,
    source: Source | LoadPlan,
    *,
    key: str | None = None,
    rules: Iterable[Rule] | Schema = (),
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    transform: AnyTransform | Mapping[str, AnyTransform | None] | None = None,
    map: bool | None = None,
    in_place: bool = False,
    init_missing: bool = False,
    verify: bool = False,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    progress: bool | None = None,
    max_memory_bytes: int | None = None,
    prefault: bool | None = None,
    background: bool = False,
) -> LoadReport | LoadHandle:
    """Loads a checkpoint into a model, all or nothing, with every reference kept.

    Afterwards every parameter and buffer is the object that it was: optimizers, ties and hooks that refer to it go on
    working. Every name of the checkpoint and every slot of the model has to be accounted for. On any error the model
    is what it was, bit for bit.

    Args:
        model: a module, or a part of one; on the meta device (see `modelstate.skeleton`), materialised, or mixed.
        source: a path, a directory, a mapping of names to tensors, a `Checkpoint`; or a `LoadPlan`, whose steps are
            executed as they are. A plan has its own arguments, and is refused where the model has changed since.
        key: the part of the checkpoint to load, by its dotted path. Without it, the part that has the model's names.
        rules: changes of the checkpoint's names and tensors, applied in their order; or a `Schema`, which gives those
            that lead from the checkpoint's version to the current one.
        allow_missing: glob patterns of names that the model has and the checkpoint need not have.
        allow_unexpected: glob patterns of names that the checkpoint has and the model need not have.
        dtype: casts floating-point tensors on the way; what is loaded has that dtype afterwards. A torch.dtype, or its
            name: "bfloat16", "bf16". Without it, only casts that lose nothing are made, to the dtype of the model.
        device: where the tensors go. Without it they stay where they are, and those on meta go to the CPU.
        transform: called once for each tensor, in the order of the file, with its name in the model and the tensor as
            the file has it; returns the tensor to load, of the same shape. A tensor subclass is possible. Or a mapping
            from glob patterns, of names or of the paths of modules, to transforms, or to None for what is left alone:
            the first pattern that matches counts. See also `modelstate.loading.Quantize`.
        map: whether tensors on meta may show the file itself, copy-on-write, so that nothing is copied. None maps a
            file only where that is safe: not a torch file that this process may write to, since `torch.save` would
            overwrite it in place, and no file that cannot be protected from other processes. True maps it all the
            same, and the report's notes say what is not protected; overwriting such a file in place changes the model,
            or ends the process. With False the tensors get memory of their own. All other targets always do.
        in_place: reads straight into the memory that is there, with no second copy. An I/O error or an interrupt in
            the middle of that read leaves a model that is partly overwritten; every other error leaves it as it was.
        init_missing: initialises what the checkpoint lacks by the model's own code, as the constructor does: by the
            `reset_parameters` of the module that owns a tensor, and the `_init_weights` of a Hugging Face model. They
            run on a copy, so that no tensor that the file has is touched; plan and report name the methods for each
            tensor. A tensor that has values and that `allow_missing` matches keeps them.
        verify: compares the file with the checksums that it keeps, before any value is put in place.
        optimizers: their state follows where a parameter's dtype or device changes, or it has had no memory.
        progress: a bar on the terminal; None shows it when the load takes longer than half a second.
        max_memory_bytes: the most memory that the load may need beyond the final tensors.
        prefault: True brings in the pages of the file that tensors show, with several threads, before anything is put
            in place; then nothing waits for the disk later. None does so in the background; False leaves it to
            whoever uses them.
        background: plans and checks, and returns a `LoadHandle` while a thread reads, casts and transforms; the model
            is what it was until its `result`. The report's `seconds` are those from this call to that return.

    Raises `PlanError` with all problems at once; what opening raises; `ModelCodeError`, `TransformError`,
    `PlacementError`, `ReadFailedError`, `ChecksumError`, `MemoryBudgetError`, `OptionError`, `StalePlanError`.
    """
    model = check_model(model)
    trained = check_optimizers(optimizers, model)
    check_budget_option(max_memory_bytes)
    how = _LoadOptions(trained, verify, progress, max_memory_bytes, prefault, time.perf_counter())
    options = options_of(
        key, rules, allow_missing, allow_unexpected, dtype, device, transform, map, in_place, init_missing
    )
    # A transform is the user's code, and may leave cycles of tensors behind that have to be collected on the way.
    chosen = source.options if isinstance(source, LoadPlan) else options
    quiet = gc_paused if chosen.transform is None else nullcontext[None]
    if not background:
        with exclusive(model), quiet(), Transaction(model) as transaction:
            return _carry_out(transaction, source, options, how)
    if chosen.in_place:
        raise OptionError(
            "in_place=True reads into memory that the program goes on using",
            where="background=True",
            remedy="leave one of them out: without in_place=True the values wait in memory of their own",
        )
    with exclusive(model), quiet():
        staged = _staged(model, source, options, how)

    def commit() -> LoadReport:
        with exclusive(model), quiet(), Transaction(model) as transaction:
            return _carry_out(transaction, staged.plan, Options(), replace(how, progress=False), staged)

    return LoadHandle(staged, progress, commit)


@dataclass(frozen=True, slots=True)
class _LoadOptions:
    """What a load has to keep to, and that does not decide about its plan."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    verify: bool
    progress: bool | None
    max_memory_bytes: int | None
    prefault: bool | None
    started: float


def load_then(
    transaction: Transaction,
    checkpoint: Checkpoint,
    options: Options,
    then: Callable[[Set[str]], None],
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    verify: bool = False,
    progress: bool | None = None,
    max_memory_bytes: int | None = None,
    prefault: bool | None = None,
) -> LoadReport:
    """Loads into the root of a transaction that the caller has entered, together with other changes of the caller.

    `then` is called before the commit, when every tensor has its final shape, dtype and device, and only copies between
    existing memory remain. Code that reads tensors there, within the transaction's `model_code`, sees the new values.
    The argument of `then` is the names of the tensors that the model initialises. `then` registers the undo of each of
    its changes with the transaction.
    """
    check_budget_option(max_memory_bytes)
    how = _LoadOptions(tuple(optimizers), verify, progress, max_memory_bytes, prefault, time.perf_counter())
    with exclusive(transaction.root), gc_paused():
        return _carry_out(transaction, checkpoint, options, how, then=then)


def _staged(model: nn.Module, source: Source | LoadPlan, options: Options, how: _LoadOptions) -> StagedLoad:
    """Plans a load, checks it, and hands it over to be read while the model goes on as it is."""
    checkpoint, options, plan = _opened(source, options)
    with Transaction(model) as transaction:
        with torch.random.fork_rng(devices=[]):
            preparation = Preparation(transaction, checkpoint, options, Place, call_extra_state=False, plan=plan)
        preparation.check()
        check_budget(preparation, how.max_memory_bytes)
        _check_trained(preparation, how.optimizers)
        return StagedLoad(preparation, how.verify, preparation.notes_on_mapping())


def _carry_out(
    transaction: Transaction,
    source: Source | LoadPlan,
    options: Options,
    how: _LoadOptions,
    staged: StagedLoad | None = None,
    then: Callable[[Set[str]], None] | None = None,
) -> LoadReport:
    """Loads into the root of a transaction. `staged` holds the values that were read before.

    When it returns, it has dropped all that it needed.
    """
    checkpoint, options, plan = _opened(source, options)
    before = placed(how.optimizers)
    preparation = Preparation(
        transaction,
        checkpoint,
        options,
        Place,
        call_extra_state=True,
        plan=plan,
        stale_remedy="make the plan again" if staged is None else LOAD_AGAIN,
    )
    preparation.check()
    check_budget(preparation, how.max_memory_bytes)
    _check_trained(preparation, how.optimizers)
    if staged is None:
        verified = preparation.checkpoint.verify() if how.verify else 0
        preparation.notes += preparation.notes_on_mapping()  # what was staged is not read again
        preparation.notes += prefetch_range(preparation)
    else:
        verified = staged.verified_bytes
        staged.give(preparation)
    with progress_bar(how.progress, preparation.nbytes) as advance:
        stage(preparation, advance)
        new_state = following_state(how.optimizers, _finals(preparation), before) if how.optimizers else []
        _place_what_may_fail(preparation)
        if how.prefault and staged is None:
            preparation.notes += bring_in(preparation.assignments, lambda _: None)
        _check_shown(preparation)
        _read_in_place(preparation, advance)
    if then is not None:
        then(preparation.initialised)
    transaction.commit(*(partial(state.__setitem__, name, value) for state, name, value in new_state))
    if how.prefault is None and staged is None:
        preparation.notes += prefault_async(preparation)
    return _report(preparation, how.started, verified)


def _check_shown(preparation: Preparation) -> None:
    """What is going to be shown is not read, so that only the file itself can say whether it is still the same."""
    if any(made.placement.mapped for made in preparation.assignments):
        preparation.incoming.maps.check_unchanged()


def _opened(source: Source | LoadPlan, options: Options) -> tuple[Checkpoint, Options, LoadPlan | None]:
    if not isinstance(source, LoadPlan):
        return open_checkpoint(source), options, None
    if options != Options():
        raise OptionError("a plan brings its own arguments", remedy="give them to modelstate.plan")
    if source.checkpoint is None or source.binding is None:
        raise OptionError(
            "the plan was not made by modelstate.plan", remedy="make it by modelstate.plan(model, source)"
        )
    return source.checkpoint, source.options, source


def _check_trained(preparation: Preparation, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    """Nothing is known of the state that fits what a module's transform makes of a parameter."""
    if not optimizers:
        return
    trained = {param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    for made in preparation.assignments:
        if made.remake is not None and made.param in trained:
            raise OptionError(
                "an optimizer's state cannot follow what the transform makes of its parameter",
                where=made.name,
                found=made.placement.why,
                remedy="build the optimizer after the load, or leave the parameter alone: transform={name: None, ...}",
            )


def _finals(preparation: Preparation) -> dict[torch.Tensor, torch.Tensor]:
    """What each parameter is going to be, before it is; what a tensor subclass has made is there already."""
    made = preparation.assignments
    return {one.param: one.final for one in made if one.final is not None and is_plain(one.final)}


def _place_what_may_fail(preparation: Preparation) -> None:
    """Values that run code of a tensor subclass on their way in; they can still be undone."""
    for write in preparation.transaction.writes:
        if isinstance(write, Place) and not write.done and not write.made.placement.direct and not write.cannot_fail:
            try:
                write.run(preparation.transaction)
            except ModelStateError:
                raise
            except Exception as error:
                raise PlacementError(
                    "a value cannot be put in its place; nothing has been changed",
                    where=write.made.name,
                    expected=f"{type(write.target).__name__}, {write.target.dtype}",
                    found=f"{type(write.value).__name__}, {write.value.dtype}: {error}",
                    remedy="give the tensor subclass a module_load handler, or convert the value with transform=",
                ) from error
            write.done = True


def _read_in_place(preparation: Preparation, advance: Callable[[int], None]) -> None:
    try:
        read_in_place(preparation, advance)
    except ReadFailedError as error:
        raise ReadFailedError(
            "reading failed while the model was read in place: its values are partly overwritten",
            where=error.where,
            found=error,
            remedy="load again, or load without in_place=True, which keeps the old values until all is read",
        ) from error


def _report(preparation: Preparation, started: float, verified_bytes: int) -> LoadReport:
    target, source = preparation.names
    return LoadReport(
        target=target,
        source=source,
        steps=preparation.steps(with_sources=False),
        notes=(*preparation.notes, *preparation.overflows.notes()),
        slots=preparation.slot_count,
        seconds=time.perf_counter() - started,
        peak_memory_bytes=preparation.held.peak_bytes,
        verified_bytes=verified_bytes,
        # Our own writes keep every object; code of the model may put another one in its place.
        references_lost=lost_references(preparation.slots_before, preparation.model)
        if preparation.transaction.armed
        else (),
    )
