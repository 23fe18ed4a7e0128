"""Tells plain tensors from those whose values are more than strided memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from modelstate.errors import keep_interrupt
from modelstate.problems import GATHER, REAL
from modelstate.spec import span
from modelstate.torch_compat.dtypes import UNSAVED
from modelstate.torch_compat.private import storage_id, without_subclasses

_PLAIN = frozenset([torch.Tensor, nn.Parameter, nn.Buffer])


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are one run of CPU memory in their own order, with nothing on top."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and (type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


def same_place(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    """Whether two tensors are the same view of the same storage, with the same lazy conjugation and negation."""
    if (tensor.layout, tensor.device, tensor.dtype) != (alias.layout, alias.device, alias.dtype):
        return False
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor is alias
    return (
        tensor.is_conj() == alias.is_conj()
        and tensor.is_neg() == alias.is_neg()
        and tensor.size() == alias.size()
        and tensor.stride() == alias.stride()
        and tensor.storage_offset() == alias.storage_offset()
        and storage_id(tensor) == storage_id(alias)
    )


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether the tensors are strided ones with nothing on top: no subclass that has a say in what happens to them."""
    for tensor in tensors:
        cls = type(tensor)
        if not ((cls in _PLAIN or _is_mere_parameter(cls)) and tensor.layout is torch.strided):
            return False
    return True


@lru_cache(maxsize=1024)
def _is_mere_parameter(cls: type[torch.Tensor]) -> bool:
    """Whether a class is one of parameters that differ from torch's in their attributes only."""
    return (
        issubclass(cls, nn.Parameter)
        and not issubclass(cls, UninitializedParameter | UninitializedBuffer)
        and cls.__torch_dispatch__ is nn.Parameter.__torch_dispatch__
        and cls.__torch_function__ is nn.Parameter.__torch_function__
        and cls.module_load is nn.Parameter.module_load
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory and none lie apart: the strides only order the dimensions."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != step:
            return not tensor.numel()
        step *= size
    return True


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a `FakeTensor`, which has no values."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return False
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a `DTensor`, as the parameters of FSDP2 are: this process may hold only a shard."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(tensor, getattr(module, "DTensor", ()))


def remedies_for(values: Iterable[object]) -> list[str]:
    """What to do about values that cannot be read, as they are fake or shards; nothing where none of them is."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [GATHER] * any(map(is_sharded, tensors)) + [REAL] * any(map(is_fake, tensors))


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


def why_not_saved(tensor: torch.Tensor) -> str:
    """Why a file of `torch.save` would not have a tensor's values; empty where it would, or where the class decides."""
    has_own_class = type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter
    if has_own_class and not is_fake(tensor) and not is_sharded(tensor):
        return ""
    return "" if is_plain_or_sparse(tensor) else why_not_plain(tensor)


SPARSE_PARTS = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that return the parts of a sparse tensor, by its layout."""


def is_plain_or_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one with values, or a sparse one, of a dtype that a file of `torch.save` holds."""
    if tensor.dtype in UNSAVED:
        return False
    if not why_not_plain(tensor):
        return True
    is_own_class = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_own_class and not is_fake(tensor) and not tensor.is_meta and tensor.layout in SPARSE_PARTS


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a wrapper subclass of one dtype stores its values in another one, as torchao's quantized tensors do."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    flatten = getattr(tensor, "__tensor_flatten__", None)
    with suppress(Exception):  # code of the class
        parts = [getattr(tensor, name) for name in flatten()[0]] if flatten is not None else []
        return any(part.dtype != tensor.dtype or is_quantized(part) for part in parts)
    return False


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The offsets in the storage, in elements, of the first element and behind the last; zeros for an empty tensor."""
    if not tensor.numel():
        return 0, 0
    start = int(tensor.storage_offset())
    return start, start + span(tensor.size(), tensor.stride())


def has_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage of a strided tensor, which is not on meta, reaches as far as its elements.

    Code that saves memory frees storages, and torch goes on using the memory where they were. True where the tensors of
    a device have no storage to be asked.
    """
    if tensor.is_contiguous():
        end_bytes = int(tensor.nbytes)
        if end_bytes and (offset := tensor.storage_offset()):
            end_bytes += int(offset) * tensor.itemsize
    else:
        end_bytes = extent(tensor)[1] * tensor.itemsize
    try:
        return tensor.untyped_storage().nbytes() >= end_bytes
    except (NotImplementedError, RuntimeError) as error:
        keep_interrupt(error)
        return True


def has_dispatch(tensor: torch.Tensor) -> bool:
    """Whether the class of a tensor overrides `__torch_dispatch__`, as wrapper subclasses do."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit. Two equal views of one storage are not compared.

    Sparse tensors are equal if their indices and values are. A quantized tensor, or one of a wrapper subclass, only
    equals itself.
    """
    with without_subclasses(), torch.no_grad():
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        tensors = first, second
        if first.layout == second.layout != torch.strided and not any(map(has_dispatch, tensors)):
            parts = _sparse_parts(first), _sparse_parts(second)
            return first is second or (bool(parts[0]) and all(map(same_values, *parts)))
        if any(has_dispatch(tensor) or tensor.layout is not torch.strided or tensor.is_quantized for tensor in tensors):
            return first is second
        if same_place(first, second):
            return True
        if first.device != second.device:
            first, second = first.cpu(), second.cpu()
        a, b = (tensor.resolve_conj().resolve_neg() for tensor in (first, second))
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
        return torch.equal(a.view(bits), b.view(bits))


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the indices and the values of a sparse tensor; an empty list for another layout."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [getattr(tensor, name)() for name in SPARSE_PARTS.get(tensor.layout, ())]


def in_a_row(tensor: torch.Tensor, first: int = 0, end: int | None = None) -> torch.Tensor:
    """Elements of a tensor in their order, contiguous in CPU memory: its own memory if possible, else a copy of them.

    Args:
        tensor: A strided tensor.
        first: The first element.
        end: The element behind the last one; None for the end of the tensor.
    """
    with torch.inference_mode(False), torch.no_grad():
        parts = [*_parts_in_order(tensor.detach(), first, tensor.numel() if end is None else end)]
        if len(parts) == 1:
            plain = _by_memory(parts[0]).resolve_conj().resolve_neg().cpu().contiguous()
        else:
            plain = torch.empty(sum(part.numel() for part in parts), dtype=tensor.dtype, device="cpu")
            at = 0
            for part in parts:
                plain[at : at + part.numel()].view(part.shape).copy_(_by_memory(part))
                at += part.numel()
        # A single element may have any stride, which `view` would refuse.
        return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())


def _parts_in_order(tensor: torch.Tensor, first: int, end: int) -> Iterator[torch.Tensor]:
    """Yields views of a tensor that together have a range of its elements, in their order: few, also of a large one."""
    if first >= end:
        return
    if tensor.dim() == 1 or tensor.is_contiguous():
        yield tensor.reshape(-1)[first:end]
        return
    row = tensor.numel() // len(tensor)
    top, bottom = -(-first // row), end // row  # the rows that are in the range as a whole
    if top > bottom:
        yield from _parts_in_order(tensor[bottom], first - bottom * row, end - bottom * row)
        return
    if first < top * row:
        yield from _parts_in_order(tensor[top - 1], first - (top - 1) * row, row)
    if top < bottom:
        yield tensor[top:bottom]
    if bottom * row < end:
        yield from _parts_in_order(tensor[bottom], 0, end - bottom * row)


def _by_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a matrix whose columns lie in runs of memory as one of contiguous columns, which torch copies faster.

    torch transposes block by block only what is contiguous when transposed: eight times as fast as a few of the rows.
    """
    if tensor.dim() == 2 and tensor.stride(0) < tensor.stride(1):
        return tensor.t().contiguous().t()
    return tensor


def byte_tensor(data: bytes) -> torch.Tensor:
    """The bytes as a tensor of `uint8`, in memory of its own."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The values in memory that nobody else has."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        return plain.clone(memory_format=torch.contiguous_format)
