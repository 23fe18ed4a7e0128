"""The conversion of a live module by `modelstate.convert`, and by `.to()`, `.half()` and their like."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from modelstate.arguments import check_flag, check_integer, checked_call, invalid_option
from modelstate.conversion.conversion import Conversion, running_conversion
from modelstate.conversion.tensors import Target, by_function, cast_and_move
from modelstate.distributed.agreement import COMMIT, PLANNING, TIMEOUT_SECONDS, Digest, agreement_of
from modelstate.errors import MemoryBudgetError, ModelCodeError, OptionError, code_errors
from modelstate.forks import fork_safe_lock
from modelstate.planning.options import check_model, device_of, is_device
from modelstate.planning.plan import LoadReport
from modelstate.planning.transfer import COPYABLE
from modelstate.process import deferred_signals, gc_paused
from modelstate.torch_compat.dtypes import dtype_named, floating_dtype
from modelstate.torch_compat.modules import MethodOverride, Overrides, is_cast_of_torch, modules_of, tensors_of
from modelstate.torch_compat.plain import is_fake
from modelstate.torch_compat.private import is_faking, is_transforming, stock_apply
from modelstate.transaction.optimizers import check_optimizers, following_state, left_behind, other_optimizers, placed
from modelstate.transaction.transaction import Transaction, exclusive

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _before_call(*args: object, **options: object) -> AbstractContextManager[object]:
    from modelstate.loading.collective import before_call  # only a wrong call needs it

    return before_call("modelstate.convert")(*args, **options)


@checked_call("ms.convert", within=_before_call)
def convert(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    *,
    device: torch.device | str | None = None,
    transform: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    empty: bool = False,
    max_memory_bytes: int | None = None,
    process_group: ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> LoadReport:
    """Converts the parameters and buffers of a model, and keeps them the same objects: all of them, or none.

    It does what `model.to(dtype)`, `.to(device)`, `.bfloat16()`, `.cpu()` and `.to_empty(device=...)` do, or what a
    function of tensors does. Every parameter and buffer stays the same object, so that optimizers, ties, hooks and
    weak references still have the live one. `requires_grad`, gradients (converted too), attributes and memory formats
    are kept, and tensors that share memory still share it. New tensors are made and checked before the first one is
    put in place; on any error the model is bit for bit as before. The ranks of a model with DTensors convert it
    together: all of them, or none.

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
        process_group: The ranks that convert together, where the model has DTensors; None for the ranks of their mesh.
        timeout_seconds: How long a rank waits for the others.

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
        DistributedError: The ranks convert to different dtypes, or give other different arguments.
        RankLostError: A rank has not taken part within `timeout_seconds`.

    Examples:
        >>> report = modelstate.convert(model, torch.bfloat16, optimizers=[optimizer])
        >>> report.references_lost
        ()
    """
    started = time.perf_counter()
    given = model if isinstance(model, nn.Module) else ()
    agreement = agreement_of(given, process_group, timeout_seconds, "modelstate.convert")
    with agreement.before(PLANNING):
        model = check_model(model)
        check_integer("max_memory_bytes", max_memory_bytes, least=0, accepts_none=True)
        checked = check_optimizers(optimizers, model)
        target = _target(dtype, device, transform, empty)

    def arguments() -> list[Digest]:
        from modelstate.loading.collective import text_of  # a conversion on one rank does not need it

        to, to_device = dtype_named(dtype) if isinstance(dtype, str) else dtype, device_of(device)
        kind = None if to_device is None else to_device.type  # each rank has a device of its own
        text = f"dtype={to}, device={kind}, transform={text_of(transform)}, {empty=}"
        return [Digest.of("the arguments", text, [text])]

    with agreement.collective(), exclusive(model), gc_paused(), Transaction(model) as transaction, ExitStack() as held:
        with agreement.phase(PLANNING, arguments, decides=True), _memory_errors():
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
            if agreement.is_collective:  # a rank that is interrupted behind the vote would not commit, and others would
                held.enter_context(deferred_signals())
        with agreement.phase(COMMIT, effect="all other ranks have converted"), _memory_errors():
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
    # `Module.to` takes a device first, too.
    if isinstance(dtype, torch.device) or (isinstance(dtype, str) and dtype_named(dtype) is None and is_device(dtype)):
        raise OptionError(
            "dtype= must be a dtype",
            found=f"the device {str(dtype)!r}",
            remedy=f"ms.convert(model, device={str(dtype)!r})",
        )
    dtype = floating_dtype(dtype, or_complex=True, other_casts="transform=")
    if transform is not None and not callable(transform):
        raise invalid_option(
            "transform",
            "must be a function of a name and a tensor",
            transform,
            expected="a function that can be called as transform(name, tensor)",
        )
    if dtype is None and device is None and transform is None:
        raise OptionError("nothing to convert to", expected="dtype=, device= or transform=", found="none of them")
    if empty and transform is not None:
        raise OptionError("empty= keeps no values that transform= could be called with", remedy="give one of them")
    target_device = device_of(device)
    cast = cast_and_move(dtype, target_device, empty)
    if transform is None:
        return cast
    return by_function(transform, None if dtype is None and target_device is None else cast, dtype is not None)


Apply = Callable[[torch.Tensor], torch.Tensor]


_switches: tuple[reference_keeping, ...] = ()
"""The switches of all threads that have not been left, in the order in which they were set. The last one counts. A
change replaces the tuple, since modules are converted in other threads meanwhile."""


class reference_keeping:
    """Makes `.to()`, `.cpu()`, `.half()`, `.to_empty()` and all that uses `nn.Module._apply` keep references.

    Use it as a context manager for a part of a program, or call it to switch it on for all threads and for good;
    `modelstate.reference_keeping(False)` switches it off again. What `modelstate.convert` promises holds meanwhile:
    all or nothing, with parameters, buffers and ties the same objects as before. Errors of the conversion itself, such
    as an unknown device, come as torch raises them. A tensor that is held by a graph that waits for backward raises
    `modelstate.errors.PlacementError`; torch finds that out at the backward, or never.

    The state of optimizers does not follow, since `Module.to` gets no optimizers. Where an optimizer has state already,
    call `modelstate.convert(model, dtype, optimizers=[optimizer])` instead. That holds in particular for an optimizer
    that was built on meta and made its state there, as `Adagrad` does: in place of `model.to_empty(device=device)`,
    call `modelstate.convert(model, device=device, empty=True, optimizers=[optimizer])`, which initialises the state.

    `torch.__future__.set_overwrite_module_params_on_conversion` and `set_swap_module_params_on_conversion` have no
    effect meanwhile. Modules that are traced (within `FakeTensorMode`, or with tensors of one) are left to torch.

    Args:
        on: Whether references are kept.

    Examples:
        >>> with modelstate.reference_keeping():
        ...     model.to(torch.bfloat16)
    """

    def __init__(self, on: bool = True) -> None:
        check_flag("on", on)
        self._on, self._is_fresh = on, True
        self._add()

    def __enter__(self) -> None:
        if not self._is_fresh:  # the object is entered a second time
            self._add()
        self._is_fresh = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _switches
        with _lock:
            last = max(index for index, switch in enumerate(_switches) if switch is self)
            _switches = _switches[:last] + _switches[last + 1 :]
        _overrides.update()

    def _add(self) -> None:
        global _switches
        with _lock:
            _switches = (*_switches, self)
        _overrides.update()

    @staticmethod
    def _is_on() -> bool:
        """Whether references are kept now."""
        switches = _switches
        return bool(switches) and switches[-1]._on


def _apply(_stock: Callable[..., nn.Module], self: nn.Module, fn: Apply, recurse: bool = True) -> nn.Module:
    if (conversion := running_conversion(self)) is not None:
        conversion.apply_stock_part(self, fn, recurse)
        return self
    if (
        not reference_keeping._is_on()
        or is_faking()  # a traced module, whose tensors stand for others
        or is_transforming()
        or any(map(is_fake, tensors_of(modules_of(self))))
    ):
        return stock_apply(self, fn, recurse)
    with exclusive(self), gc_paused(), Transaction(self) as transaction:
        conversion = Conversion(transaction, _applying(fn))
        conversion.record(recurse)
        conversion.commit()
        del conversion  # before the garbage collector goes on, which would visit every change first
    return self


_lock = fork_safe_lock()
_overrides = Overrides(MethodOverride(nn.Module, "_apply", _apply), holds=reference_keeping._is_on)
replaced_apply = _overrides.used
"""Makes torch's part of a module's own `_apply` run in the conversion of this thread."""


def _applying(fn: Apply) -> Target:
    """Returns the target of a conversion by `Module.to` and its like: the function that they pass to `_apply`."""

    def deferred_cast(dtype: torch.dtype) -> torch.Tensor | None:
        if dtype not in COPYABLE or not dtype.is_floating_point or not is_cast_of_torch(fn):
            return None
        new = fn(torch.empty(0, dtype=dtype, device="cpu"))
        return new if new.is_cpu and new.dtype in COPYABLE and new.is_floating_point() else None

    return Target(lambda _, tensor: fn(tensor), lambda grad, _: fn(grad), deferred_cast)
