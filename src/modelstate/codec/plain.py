"""Plain tensors: those that are nothing but their values."""

import torch


def why_not_plain(tensor: torch.Tensor) -> str:
    """Why a tensor is not a plain one with values; empty where it is."""
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
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
    return "a tensor whose memory has been given back" if needed > tensor.untyped_storage().nbytes() else ""


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The values in memory that nobody else has."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        return plain.clone(memory_format=torch.contiguous_format)
