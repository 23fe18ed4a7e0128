"""`modelstate.convert`: converts a live module to another dtype or device, or by a function of its tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from modelstate.arguments import checked_call
from modelstate.checkpoint.open import check_budget_option
from modelstate.conversion.conversion import Conversion
from modelstate.conversion.reference_keeping import replaced_apply
from modelstate.conversion.tensors import ByFunction, CastAndMove, Target
from modelstate.errors import MemoryBudgetError, ModelCodeError, OptionError, code_errors
from modelstate.planning.options import check_model, device_of, is_device
from modelstate.planning.plan import LoadReport
from modelstate.process import gc_paused
from modelstate.text_format import short_repr
from modelstate.torch_compat.dtypes import dtype_named, floating_dtype
from modelstate.torch_compat.modules import modules_of
from modelstate.transaction.optimizers import check_optimizers, following_state, left_behind, other_optimizers, placed
from modelstate.transaction.transaction import Transaction, exclusive


@checked_call("ms.convert")
def convert(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    *,
    device: torch.device | str | None = None,
    transform: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    empty: bool = False,
    max_memory_bytes: int | None = None,
) -> LoadReport:
    """Converts the parameters and buffers of a model, and keeps them the same objects: all of them, or none.

    It does what `model.to(dtype)`, `.to(device)`, `.bfloat16()`, `.cpu()` and `.to_empty(device=...)` do, or what a
    function of tensors does. Every parameter and buffer stays the same object, so that optimizers, ties, hooks and
    weak references still have the live one. `requires_grad`, gradients (converted too), attributes and memory formats
    are kept, and tensors that share memory still share it. New tensors are made and checked before the first one is
    put in place; on any error the model is bit for bit as before.

    Args:
        model: The model; with everything below it.
        dtype: For floating-point tensors. Integers and booleans keep their dtype, and so do complex numbers unless the
            dtype is complex.
        device: For all tensors. From meta, which has no values, only with `empty`.
        transform: Called with the name of each tensor and the tensor; returns a new tensor of the same shape, of any
            dtype or tensor subclass, or `modelstate.conversion.UNCHANGED`. It is called once for a tied tensor, with
            its first name. `dtype` and `device` apply to its result.
        optimizers: Their state follows the parameters in dtype and device; step counters stay where the optimizer
            wants them, and `param_groups` is not touched. The report names the optimizers that have state and were
            not passed.
        empty: Gives memory without values, as `to_empty` does.
        max_memory_bytes: The most memory to use on top of the model's own. Casts on the CPU free the old tensors one
            by one as they go; for a device or a function, all new tensors are made beside the old ones.

    Returns:
        A report with a step for each tensor.

    Raises:
        OptionError: An argument cannot be used.
        TransformError: The function raised, or returned something that cannot be used.
        PlacementError: An autograd graph that waits for backward, a reducer of distributed training or a view would
            keep the old value of a tensor, and the error says which, and where; or a tensor is on meta, or torch cannot
            convert it.
        MemoryBudgetError: The conversion takes more than `max_memory_bytes`, or more than a device or the system has.
        ModelCodeError: An `_apply` of the model's own raised.

    Examples:
        >>> report = modelstate.convert(model, torch.bfloat16, optimizers=[optimizer])
        >>> report.references_lost
        ()
    """
    started = time.perf_counter()
    model = check_model(model)
    check_budget_option(max_memory_bytes)
    checked = check_optimizers(optimizers, model)
    target = _target(dtype, device, transform, empty)
    with _memory_errors(), exclusive(model), gc_paused(), Transaction(model) as transaction:
        others = other_optimizers(modules_of(model), checked)
        before = placed((*checked, *others))
        conversion = Conversion(transaction, target, max_memory_bytes)
        if conversion.runs_own_apply:
            what = "the model's own _apply raised; nothing has been changed"
            where = type(conversion.root).__name__
            with replaced_apply(), code_errors(ModelCodeError, what, where=where), _memory_errors():
                conversion.record()
        else:
            conversion.record()
        finals = conversion.finals() if before else {}
        state = following_state(checked, finals, before, conversion.spend)
        behind = left_behind(others, finals, before)
        conversion.commit(*(partial(values.__setitem__, key, value) for values, key, value in state))
        report = LoadReport(
            target=type(conversion.root).__name__,
            source="",
            notes=(
                *conversion.notes,
                *transaction.notes,
                *(conversion.overflows.notes() if conversion.overflows is not None else ()),
            ),
            slots=len(conversion.slots.tensors),
            seconds=time.perf_counter() - started,
            peak_memory_bytes=conversion.peak_bytes,
            references_lost=conversion.references_lost(),
            left_behind=behind,
            action=f"converted to {target.description}",
            make_steps=conversion.steps(),
        )
        del conversion, finals  # before the garbage collector goes on, which would visit every change first
        return report


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raises `MemoryBudgetError` in place of torch's error for a device without memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryBudgetError(
            "the device has no memory for the new tensors beside the old ones; nothing has been changed",
            found=". ".join(str(error).split(". ")[:2]),
            remedy="convert the parts of the module one after the other, or free memory of the device first",
        ) from error


def _target(
    dtype: torch.dtype | str | None, device: torch.device | str | None, transform: object, empty: bool
) -> Target:
    _check_is_no_device(dtype)
    dtype = floating_dtype(dtype, or_complex=True, other_casts="transform=")
    if transform is not None and not callable(transform):
        raise OptionError(
            "transform= must be a function of a name and a tensor",
            expected="a function that can be called as transform(name, tensor)",
            found=short_repr(transform),
        )
    if dtype is None and device is None and transform is None:
        raise OptionError("nothing to convert to", expected="dtype=, device= or transform=", found="none of them")
    if empty and transform is not None:
        raise OptionError("empty= keeps no values that transform= could be called with", remedy="give one of them")
    target_device = device_of(device)
    cast = CastAndMove(dtype, target_device, empty)
    if transform is None:
        return cast
    return ByFunction(transform, None if dtype is None and target_device is None else cast)


def _check_is_no_device(dtype: object) -> None:
    """Raises `OptionError` for a device, which `Module.to` also takes first."""
    if isinstance(dtype, torch.device) or (isinstance(dtype, str) and dtype_named(dtype) is None and is_device(dtype)):
        raise OptionError(
            "dtype= must be a dtype",
            found=f"the device {str(dtype)!r}",
            remedy=f"ms.convert(model, device={str(dtype)!r})",
        )
