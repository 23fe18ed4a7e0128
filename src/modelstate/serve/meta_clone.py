"""Copies of modules on the meta device, and memory that is detached from other holders."""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import nn

from modelstate.errors import LiveTargetError
from modelstate.serve.target import Program
from modelstate.spec import contiguous_stride
from modelstate.torch_compat.plain import is_dense, is_plain
from modelstate.torch_compat.private import address_range, payload_of, storage_id, storage_of, storage_owners


def meta_clone(module: nn.Module) -> nn.Module:
    """A deep copy whose parameters and persistent buffers are on meta, tied as they are; all else is its own.

    Weights of tensor subclasses are copied in full, as only their class knows how. Raises `LiveTargetError` where the
    module cannot be copied, and where its tensors overlap without being tied, which a copy would not keep.
    """
    _check_overlaps(module)
    memo: dict[int, object] = {}
    hidden = {id(buffer) for buffer in _hidden(module)}
    for tensor in (*module.parameters(), *module.buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise LiveTargetError(
                "a module that has not run yet has parameters without a shape",
                where=type(module).__name__,
                remedy="run it once before it is served",
            )
        if is_plain(tensor) and id(tensor) not in hidden:
            memo[id(tensor)] = _on_meta(tensor)
    kept = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) in memo]
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        raise LiveTargetError(
            "the module cannot be copied, so that no second version of it can be made",
            where=type(module).__name__,
            found=f"{type(error).__name__}: {error}",
            remedy="give the class that is named there a __deepcopy__, or keep what cannot be copied off the module",
        ) from error
    del kept  # ids stand for these
    return made


def state_module(state: Mapping[str, torch.Tensor], *, meta: bool = True) -> nn.Module:
    """A bare module that has a state's tensors under its names: without their memory, or the tensors themselves."""
    root, seen = nn.Module(), dict[int, torch.Tensor]()
    for name, tensor in state.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            # Names that a program may have, and that the attributes of a module would be in the way of.
            below = owner._modules.get(part)
            if below is None:
                below = owner._modules[part] = nn.Module()
            owner = below
        value = seen.setdefault(id(tensor), _on_meta(tensor) if meta and is_plain(tensor) else tensor)
        table: dict[str, torch.Tensor | None] = (
            owner._parameters if isinstance(value, nn.Parameter) else owner._buffers  # type: ignore[assignment]
        )
        table[last] = value
    return root


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    # Not `empty_like`, which imports sympy for this: seconds, in a process that has requests to answer.
    stride = tensor.stride() if is_dense(tensor) else contiguous_stride(tensor.shape)
    empty = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")
    made: torch.Tensor = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    made.__dict__.update(tensor.__dict__)
    return made


def _hidden(module: nn.Module) -> list[torch.Tensor]:
    """Buffers that are persistent nowhere: what they hold comes with the module, and with no checkpoint."""
    found: dict[int, torch.Tensor] = {}
    shown: set[int] = set()
    for one in module.modules():
        for name, buffer in one._buffers.items():
            if buffer is None:
                continue
            if name in one._non_persistent_buffers_set:
                found[id(buffer)] = buffer
            else:
                shown.add(id(buffer))
    return [buffer for key, buffer in found.items() if key not in shown]


def _check_overlaps(module: nn.Module) -> None:
    names = dict[int, str]()
    ranges: list[tuple[int, int, int]] = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) in names or not is_plain(tensor) or tensor.is_meta or not tensor.numel():
            continue
        names[id(tensor)] = name
        start = tensor.data_ptr()
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        ranges.append((start, min(start + span * tensor.itemsize, address_range(tensor)[1]), id(tensor)))
    ranges.sort()
    for (_, end, one), (start, _, other) in pairwise(ranges):
        if start < end:
            raise LiveTargetError(
                "tensors of the module overlap without being tied, which a second version would not keep",
                where=type(module).__name__,
                found=f"{names[one]} and {names[other]}",
                remedy="give each of them memory of its own, or register one tensor under both names",
            )


_TABLES = ("_parameters", "_buffers", "_modules")


def detach_shared_storage(program: Program) -> None:
    """Gives weights and buffers new memory, with the values that they have, where others have the old one.

    An answer that is a weight, or a view of one, or that autograd needs a weight for, is so left as it was given. The
    tensors stay who they are; views that modules have as attributes move with them.
    """
    own: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for tensor in _tensors(program):
        for part in payload_of(tensor):
            own[storage_id(part)][id(part)] = part
    own.pop(0, None)
    for tensors in own.values():
        first = next(iter(tensors.values()))
        if storage_owners(first) > len(tensors):
            storage = storage_of(first).clone()  # type: ignore[no-untyped-call]
            for tensor in tensors.values():
                _move(tensor, storage)


def _move(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        moved = tensor.detach()
        moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = moved


def _tensors(program: Program) -> Iterator[torch.Tensor]:
    yield from program.holder.parameters()
    yield from program.buffers.values()
    for module in program.holder.modules():
        for name, value in vars(module).items():
            if name not in _TABLES:
                yield from _in(value, 4)


def _in(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | set | dict) and not isinstance(value, nn.Module):
        for one in list(value.values()) if isinstance(value, dict) else list(value):
            yield from _in(one, depth - 1)
