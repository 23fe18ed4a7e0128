"""What users' transforms are given, and what is taken of what they return."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from modelstate.errors import ModelStateError, TransformError
from modelstate.place.memory import fresh_tensors
from modelstate.plan.assignment import Assignment
from modelstate.plan.placement import after_remaking, is_dense, is_plain
from modelstate.plan.torch_private import payload_of, storage_id, storage_owners
from modelstate.plan.transforms import Transform
from modelstate.read.overflow import nonfinite

BY_TRANSFORM = "transform="


def called(transform: Transform, name: str, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """What the transform returns, if it is a tensor of that shape. Raises `TransformError`."""
    with told_of(name):
        result = transform(name, value)
    if not isinstance(result, torch.Tensor) or result.shape != torch.Size(shape) or result.is_meta:
        is_tensor = isinstance(result, torch.Tensor)
        raise TransformError(
            "the transform returned something that cannot be loaded; nothing has been changed",
            where=name,
            expected=f"a tensor of shape {tuple(shape)}",
            found=f"shape {tuple(result.shape)} on {result.device}" if is_tensor else repr(result)[:80],
        )
    return result


@contextmanager
def told_of(name: str) -> Iterator[None]:
    """Makes a `TransformError` of what a transform raises for the tensor of this name."""
    try:
        yield
    except ModelStateError:
        raise
    except Exception as error:
        raise TransformError(
            "the transform raised; nothing has been changed", where=name, found=f"{type(error).__name__}: {error}"
        ) from error


def remade(made: Assignment, last: Transform, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """What a module's transform returns for a value, or for some rows of it, with its new infinite values counted."""
    before = nonfinite(value) if is_plain(value) else 0
    result = called(last, made.name, value, shape)
    if is_plain(result):
        made.overflows.check_function(made.name, BY_TRANSFORM, result, lambda: before)
    return result


def remake(made: Assignment, last: Transform, value: torch.Tensor) -> None:
    """Lets a module's transform have the last word on a value that is about to be reused."""
    if is_plain(value) and not (made.on_cpu and value.dtype == made.dtype and value.stride() == made.stride):
        value = settled(made, value)
    result = remade(made, last, value, made.param.shape)
    made.freezes = isinstance(result, nn.Parameter) and not result.requires_grad
    try:
        result = result.detach().to(made.device)
        held = {storage_id(part) for part in payload_of(value)}
        kept = any(storage_id(part) in held or storage_owners(part) > 1 for part in payload_of(result))
        kept = kept or (is_plain(result) and not is_dense(result))
        made.final = result.clone() if kept else result
    except Exception as error:
        raise TransformError(
            "what the transform returned cannot be given memory of its own; nothing has been changed",
            where=made.name,
            found=f"{type(result).__name__}: {type(error).__name__}: {error}",
        ) from error
    made.dtype = result.dtype
    made.placement = after_remaking(made.placement, made.param, result)


def settled(made: Assignment, value: torch.Tensor) -> torch.Tensor:
    """The value in memory of its own, as the slot wants it."""
    if made.on_cpu:
        (final,) = fresh_tensors([made.layout])
        final.copy_(value)
    else:
        final = value.to(made.dtype)
    made.overflows.check(made.name, value, final)
    return final.to(made.device)
