"""Plain tensors: those that are nothing but their values."""

from collections.abc import Iterable
from contextlib import suppress

import torch

_FAKE = "torch._subclasses.fake_tensor.FakeTensor"
_SHARDED = "torch.distributed.tensor.DTensor"
GATHER = (
    "gather them first: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
    "torch.distributed.checkpoint.state_dict on every rank, or tensor.full_tensor() for one of them"
)
"""What to do where a DTensor is to be read."""
REAL = "make them outside of FakeTensorMode: a FakeTensor has a shape and no values"
"""What to do where a FakeTensor is to be read, or to be filled."""


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether this is a `FakeTensor`, which has no values."""
    return _is_of(tensor, _FAKE)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a `DTensor`, as the parameters of FSDP2 are: this process may hold only a shard."""
    return _is_of(tensor, _SHARDED)


def remedies_for(values: Iterable[object]) -> list[str]:
    """What to do about values that cannot be read, as they are fake or shards; nothing where none of them is."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [GATHER] * any(map(is_sharded, tensors)) + [REAL] * any(map(is_fake, tensors))


def _is_of(tensor: torch.Tensor, name: str) -> bool:
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return False
    return any(f"{cls.__module__}.{cls.__qualname__}" == name for cls in type(tensor).__mro__)


def why_not_plain(tensor: torch.Tensor) -> str:
    """Why a tensor is not a plain one with values; empty where it is."""
    if is_fake(tensor):
        return "a FakeTensor, which has a shape and no values"
    if is_sharded(tensor):
        return "a DTensor: this process may hold only a shard (FSDP2, tensor parallelism)"
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return (
            f"a tensor of the class {type(tensor).__module__}.{type(tensor).__qualname__}, which is more than a tensor"
        )
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values"
    if tensor.layout is not torch.strided:
        return f"a tensor of the layout {tensor.layout}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    return "" if has_its_memory(tensor) else "a tensor whose memory has been given back"


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a wrapper subclass of one dtype stores its values in another one, as torchao's quantized tensors do."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    flatten = getattr(tensor, "__tensor_flatten__", None)
    with suppress(Exception):  # code of the class
        parts = [getattr(tensor, name) for name in flatten()[0]] if flatten is not None else []
        return any(part.dtype != tensor.dtype or is_quantized(part) for part in parts)
    return False


def has_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage of a strided tensor, which is not on meta, reaches as far as its elements.

    Code that saves memory frees storages, and torch goes on using the memory where they were. True where the tensors of
    a device have no storage to be asked.
    """
    if tensor.is_contiguous():
        end = tensor.storage_offset() + tensor.numel() if tensor.numel() else 0
    else:
        steps = zip(tensor.size(), tensor.stride(), strict=True)
        end = tensor.storage_offset() + 1 + sum((size - 1) * step for size, step in steps)
    try:
        return tensor.untyped_storage().nbytes() >= end * tensor.itemsize
    except (NotImplementedError, RuntimeError):
        return True


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The values in memory that nobody else has."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        return plain.clone(memory_format=torch.contiguous_format)
