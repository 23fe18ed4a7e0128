"""What weights have to be, beyond what every load asks of them, before they may serve."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from modelstate.codec.plain import remedies_for
from modelstate.errors import (
    NonFiniteWeightError,
    WeightDtypeError,
    WeightKindError,
    WeightsError,
    WeightStorageError,
    WeightStrideError,
)
from modelstate.live.names import runtime_state
from modelstate.plan.placement import is_plain
from modelstate.plan.plan import Step
from modelstate.plan.problems import Problem, WrongDtype
from modelstate.plan.torch_private import payload_of, storage_of
from modelstate.read.checkpoint import Checkpoint
from modelstate.spec import StoredComposite, StoredTensor

_LISTED = 8
Kind = tuple[torch.layout, type] | None
_EXACT = "give the weights as the program has them, or swap with exact=False, which copies and converts what it can"


def check_layout(part: Checkpoint, slots: Mapping[str, torch.Tensor | None], where: str) -> None:
    """Elements in their own order, or in that of the slot, and in storages of their own.

    Views of a flat buffer and transposed views are what a loader by pointers takes wrong; one source has to be right
    for every kind of target. Raises `WeightStrideError` and `WeightStorageError`.
    """
    strided: list[tuple[str, str]] = []
    shared: list[tuple[str, str]] = []
    for name, spec in part.items():
        stored = spec.stored
        if isinstance(stored, torch.Tensor):
            if stored.layout is not torch.strided or len(payload_of(stored)) > 1:
                continue
            in_order, own = stored.is_contiguous(), storage_of(stored).nbytes() if stored.numel() else 0
        elif isinstance(stored, StoredTensor):
            in_order, own = stored.is_contiguous, stored.storage.nbytes if stored.nbytes else 0
        else:
            continue
        slot = slots.get(name)
        same = slot is not None and slot.layout is torch.strided and tuple(slot.stride()) == spec.stride
        if not in_order and not same:
            strided.append((name, f"stride {spec.stride} of shape {spec.shape}"))
        if own and own != spec.nbytes:
            shared.append((name, f"{spec.nbytes:,} bytes of a storage of {own:,}"))
    if strided:
        raise _error(
            WeightStrideError, "elements of weights lie in another order", strided, where, "contiguous tensors"
        )
    if shared:
        what = "weights are parts of a larger storage"
        raise _error(WeightStorageError, what, shared, where, "a storage for each tensor")


def kind_of(tensor: torch.Tensor) -> Kind:
    """None of a plain strided tensor; the layout and the class of any other."""
    return None if is_plain(tensor) else (tensor.layout, torch.Tensor if type(tensor) is nn.Parameter else type(tensor))


def check_kinds(found: Mapping[str, object], kinds: Mapping[str, Kind], where: str) -> None:
    """Raises `WeightKindError` for sparse tensors and subclasses, except where the program has the same."""
    wrong = []
    for name, one in found.items():
        if name not in kinds:
            continue
        if isinstance(one, StoredComposite):
            if "sparse" in one.kind and kinds[name] is None:  # what others are made of may be plain
                wrong.append((name, one.kind))
        elif isinstance(one, torch.Tensor) and kind_of(one) not in (None, kinds[name]):
            wrong.append((name, f"{type(one).__name__}, {one.layout}"))
    if wrong:
        what = "weights are another kind of tensor than the program's: sparse, or of a class of their own"
        special = remedies_for(found[name] for name, _ in wrong)
        remedy = "; ".join(special) or "give plain tensors: weight.to_dense(), weight.as_subclass(torch.Tensor)"
        raise _error(WeightKindError, what, wrong, where, "the kind that the program has", remedy)


def check_casts(steps: Iterable[Step], where: str) -> None:
    """Raises `WeightDtypeError` for weights that are, or would be, cast."""
    cast = [(step.name, step.cast) for step in steps if step.cast]
    if cast:
        what = "weights have another dtype than the program"
        raise _error(WeightDtypeError, what, cast, where, "the dtype of the program")


def dtype_error(problems: Sequence[Problem], where: str) -> WeightDtypeError | None:
    """The error for a plan that has no other problem than dtypes that cannot be cast without loss."""
    wrong = [one for one in problems if isinstance(one, WrongDtype)]
    if not wrong or len(wrong) < len(problems):
        return None
    found = [(one.name, f"{one.found}, which would have to be cast to {one.expected}") for one in wrong]
    remedy = "give the weights as the program has them, or cast them: rules=[modelstate.Cast(name, dtype)]"
    what = "weights have another dtype than the program"
    error = _error(WeightDtypeError, what, found, where, "the dtype of the program", remedy)
    assert isinstance(error, WeightDtypeError)
    return error


def check_finite(new: nn.Module, serving: Callable[[], Mapping[str, torch.Tensor]], where: str) -> None:
    """Raises `NonFiniteWeightError` for values that are not finite, except where those that serve are not either."""
    suspects = {name: tensor for name, tensor in runtime_state(new).items() if not _is_finite(tensor)}
    if not suspects:
        return
    before = serving()
    found = []
    for name, tensor in suspects.items():
        wrong = ~torch.isfinite(_comparable(tensor))
        old = before.get(name)
        if old is not None and old.shape == tensor.shape:
            wrong &= torch.isfinite(_comparable(old))
        count = int(wrong.sum())
        if count:
            found.append((name, f"{count} of {tensor.numel()} elements"))
    if found:
        raise NonFiniteWeightError(
            "weights are NaN or infinite",
            where=where,
            expected="finite values wherever those that serve are finite",
            found=_lines(found),
            remedy="look at the training run; check_finite=False lets them through",
            names=[name for name, _ in found],
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Cheaply where it is so: the sum is finite only if every element is."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return True
    with torch.no_grad():
        plain = _comparable(tensor)
        return bool(torch.isfinite(plain.sum())) or bool(torch.isfinite(plain).all())


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _error(
    kind: type[WeightsError],
    what: str,
    found: list[tuple[str, str]],
    where: str,
    expected: str,
    remedy: str = _EXACT,
) -> WeightsError:
    names = [name for name, _ in found]
    return kind(what, where=where, expected=expected, found=_lines(found), remedy=remedy, names=names)


def _lines(found: list[tuple[str, str]]) -> str:
    more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return "; ".join(f"{name}: {what}" for name, what in found[:_LISTED]) + more
