"""Bytes into values: read, cast, transformed, each in the memory where it can stay."""

import time
from collections.abc import Callable, Sequence

import torch

from modelstate.errors import MemoryBudgetError, ModelStateError, TransformError
from modelstate.place.memory import fresh_tensors
from modelstate.plan.prepare import Assignment, Preparation
from modelstate.read.checkpoint import is_plain_memory
from modelstate.read.ranges import Request
from modelstate.spec import StoredTensor

_SCRATCH_BYTES = 64 << 20
"""What is read at once for casts, unless a single tensor is larger."""

Progress = Callable[[int], None]


def stage(preparation: Preparation, progress: Progress) -> None:
    """Gives every assignment that has none its final value. Nothing of the model is changed but by `direct` ones.

    Raises `ReadFailedError` and `TransformError`.
    """
    waiting = [made for made in preparation.assignments if made.final is None]
    waiting.sort(key=_place_in_file)
    transform = preparation.options.transform
    if transform is not None:
        for made in waiting:
            stage_one(preparation, made)
            progress(made.nbytes)
        return
    as_they_are: list[Assignment] = []
    cast: list[Assignment] = []
    for made in waiting:
        if made.placement.direct or made.placement.mapped or made.placement.by_handler or _is_in_memory(made):
            continue
        (as_they_are if made.value.dtype == made.dtype else cast).append(made)
    _read_as_they_are(preparation, as_they_are, progress)
    _read_and_cast(preparation, cast, progress)
    for made in waiting:
        if made.final is None and not made.placement.direct:
            stage_one(preparation, made)
            progress(made.nbytes)


def read_in_place(preparation: Preparation, progress: Progress) -> None:
    """Reads the assignments whose bytes go straight to the memory of their slots."""
    direct = [made for made in preparation.assignments if made.placement.direct and made.final is None]
    simple = [made for made in direct if made.value.dtype == made.dtype and _can_read_into(made, made.param)]
    _read(preparation, [(made, made.param) for made in simple], progress)
    for made in simple:
        made.final = made.param
    done = set(map(id, simple))
    for made in direct:
        if id(made) not in done:
            made.final = made.value
            progress(made.nbytes)


def stage_one(preparation: Preparation, made: Assignment) -> None:
    """Gives one assignment its final value."""
    started = time.perf_counter()
    if preparation.options.transform is not None:
        made.final = _transformed(preparation, made)
    elif made.placement.mapped or made.placement.by_handler:
        made.final = made.value
    else:
        made.final = _own(made, made.value)
    made.seconds += time.perf_counter() - started


def check_budget(preparation: Preparation, max_memory_bytes: int | None) -> None:
    """Raises `MemoryBudgetError` where the load would need more memory beyond the final tensors."""
    needed = preparation.extra_bytes
    if max_memory_bytes is not None and needed > max_memory_bytes:
        staged = any(made.placement.staged for made in preparation.assignments)
        raise MemoryBudgetError(
            "the load needs more memory beyond the final tensors than it was given; nothing has been changed",
            expected=f"at most {max_memory_bytes} bytes",
            found=f"{needed} bytes",
            remedy=f"max_memory_bytes={needed}" + (", or in_place=True, which needs no second copy" if staged else ""),
        )


def _own(made: Assignment, value: torch.Tensor) -> torch.Tensor:
    """A copy of the value, as the slot will have it."""
    with torch.no_grad():
        stride = tuple(made.param.stride()) if _has_layout(made.param) else None
        if made.device.type == "cpu":
            (fresh,) = fresh_tensors([(made.param.size(), stride, made.dtype)])
            return fresh.copy_(value)
        return value.to(made.dtype).to(made.device)


def _transformed(preparation: Preparation, made: Assignment) -> torch.Tensor:
    transform, name = preparation.options.transform, made.name
    assert transform is not None
    value = made.value if made.placement.mapped or _is_in_memory(made) else made.value.clone()
    try:
        result = transform(name, value)
    except ModelStateError:
        raise
    except Exception as error:
        raise TransformError(
            "the transform raised; nothing has been changed", where=name, found=f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(result, torch.Tensor) or result.shape != made.param.shape or result.is_meta:
        found = (
            f"{result.dtype} of shape {tuple(result.shape)} on {result.device}"
            if isinstance(result, torch.Tensor)
            else repr(result)[:80]
        )
        raise TransformError(
            "the transform returned something that cannot be loaded; nothing has been changed",
            where=name,
            expected=f"a tensor of shape {tuple(made.param.shape)}",
            found=found,
        )
    return _as_asked(preparation, made, result.detach())


def _as_asked(preparation: Preparation, made: Assignment, result: torch.Tensor) -> torch.Tensor:
    """The result with the dtype and device that were asked for, in memory that nobody else has."""
    options = preparation.options
    if options.dtype is not None and result.is_floating_point() and type(result) is torch.Tensor:
        result = result.to(options.dtype)
    result = result.to(made.device)
    made.dtype = result.dtype
    shows_value = type(result) is torch.Tensor and result.data_ptr() == made.value.data_ptr()
    return result.clone() if shows_value and not made.placement.mapped else result


def _read_as_they_are(preparation: Preparation, made: Sequence[Assignment], progress: Progress) -> None:
    layouts = [(m.param.size(), tuple(m.param.stride()) if _has_layout(m.param) else None, m.dtype) for m in made]
    fresh = fresh_tensors(layouts)
    pairs = [(m, t) for m, t in zip(made, fresh, strict=True) if _can_read_into(m, t)]
    _read(preparation, pairs, progress)
    direct = {id(m) for m, _ in pairs}
    for m, tensor in zip(made, fresh, strict=True):
        if id(m) not in direct:
            with torch.no_grad():
                tensor.copy_(m.value)
            progress(m.nbytes)
        m.final = tensor.to(m.device)


def _read_and_cast(preparation: Preparation, made: Sequence[Assignment], progress: Progress) -> None:
    """Reads into a buffer that is used again and again, and casts out of it."""
    layouts = [(m.param.size(), tuple(m.param.stride()) if _has_layout(m.param) else None, m.dtype) for m in made]
    finals = fresh_tensors(layouts)
    start = 0
    while start < len(made):
        stop, total = start, 0
        while stop < len(made) and (total == 0 or total + made[stop].nbytes <= _SCRATCH_BYTES):
            total += -(-made[stop].nbytes // 64) * 64
            stop += 1
        group = list(zip(made[start:stop], finals[start:stop], strict=True))
        buffers = fresh_tensors([(m.value.size(), None, m.value.dtype) for m, _ in group])
        sources = {id(m): buffer for (m, _), buffer in zip(group, buffers, strict=True) if _can_read_into(m, buffer)}
        _read(preparation, [(m, sources[id(m)]) for m, _ in group if id(m) in sources], progress)
        with torch.no_grad():
            for m, final in group:
                started = time.perf_counter()
                final.copy_(sources.get(id(m), m.value))
                m.final = final.to(m.device)
                m.seconds += time.perf_counter() - started
        start = stop


def _read(preparation: Preparation, pairs: Sequence[tuple[Assignment, torch.Tensor]], progress: Progress) -> None:
    requests = []
    for made, tensor in pairs:
        assert isinstance(made.stored, StoredTensor)
        requests.append(Request(made.stored.extent, tensor.data_ptr()))
    started = time.perf_counter()
    preparation.checkpoint.read_all(requests, progress)
    seconds, total = time.perf_counter() - started, sum(made.nbytes for made, _ in pairs)
    for made, _ in pairs:
        made.seconds += seconds * made.nbytes / max(total, 1)


def _can_read_into(made: Assignment, tensor: torch.Tensor) -> bool:
    """Whether the bytes of the file are, in their order, the bytes of the tensor."""
    stored = made.stored
    return (
        isinstance(stored, StoredTensor)
        and stored.nbytes > 0
        and stored.is_contiguous
        and stored.shape == tuple(made.value.shape)
        and is_plain_memory(tensor)
    )


def _has_layout(tensor: torch.Tensor) -> bool:
    """Whether the tensor's strides are a layout to keep (channels last, say), and not a view with gaps."""
    return (
        tensor.layout is torch.strided and not tensor.is_contiguous() and tensor.dim() > 1 and 0 not in tensor.stride()
    )


def _is_in_memory(made: Assignment) -> bool:
    """Whether the value is somebody's live tensor, and not a view of a file."""
    return not isinstance(made.stored, StoredTensor)


def _place_in_file(made: Assignment) -> tuple[str, int]:
    if isinstance(made.stored, StoredTensor):
        return made.stored.extent.path, made.stored.extent.start
    return "", 0
