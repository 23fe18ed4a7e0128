"""Memory of weights that others have as well: answers, before it is written over."""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from modelstate.live.program import Program
from modelstate.plan.torch_private import payload_of, storage_id, storage_of, storage_owners

_TABLES = ("_parameters", "_buffers", "_modules")


def leave_to_others(program: Program) -> None:
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
