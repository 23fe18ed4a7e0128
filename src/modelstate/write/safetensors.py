"""A safetensors file: the length of the header, the header, the bytes of the tensors.

Tensors with wide elements come first, so that all lie at multiples of their element's size, whatever their number:
they can be mapped.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from modelstate.codec.plain import why_not_plain
from modelstate.codec.walk import is_unicode
from modelstate.read.json_text import quote
from modelstate.read.safetensors import DTYPES, MAX_ENTRIES, MAX_HEADER_BYTES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"


def why_not(name: object, tensor: torch.Tensor) -> str:
    """What keeps a tensor from being stored under a name; empty where nothing does."""
    if not isinstance(name, str) or not is_unicode(name) or name == _METADATA:
        return "not a name that the format has"
    problem = why_not_plain(tensor)
    if not problem and tensor.dtype not in NAMES:
        problem = f"{tensor.dtype}, which safetensors does not have"
    if not problem and tensor.dtype is torch.float4_e2m1fn_x2 and not tensor.dim():
        problem = f"{tensor.dtype} without dimensions, which safetensors does not have"
    return problem


def in_file_order(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return sorted(tensors.items(), key=lambda item: -item[1].itemsize)


def header_of(tensors: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> bytes:
    """The header, with its length, for tensors in the order of their bytes. Raises `ValueError` if it is too large."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.numel() * tensor.itemsize
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": _shape(tensor), "data_offsets": [begin, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES or len(entries) > MAX_ENTRIES:
        raise ValueError(f"{len(entries):,} tensors and a header of {len(text):,} bytes")
    return len(text).to_bytes(8, "little") + text


def _shape(tensor: torch.Tensor) -> list[int]:
    sizes = list(tensor.shape)
    return [*sizes[:-1], 2 * sizes[-1]] if tensor.dtype is torch.float4_e2m1fn_x2 else sizes


def data_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[memoryview]:
    """The bytes of each tensor: its own memory where that has them in a row, else a copy of this one tensor."""
    with torch.inference_mode(False), torch.no_grad():
        for _, tensor in tensors:
            if tensor.numel():
                plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
                # A single element may have any stride, which `view` minds.
                row = plain.as_strided((plain.numel(),), (1,), plain.storage_offset())
                yield row.view(torch.uint8).numpy().data


def listed(problems: Mapping[Any, str], most: int = 8) -> str:
    """Names with what is wrong with each."""
    lines = [f"{quote(str(name))}: {problem}" for name, problem in list(problems.items())[:most]]
    return "; ".join(lines) + (f"; and {len(problems) - most} more" if len(problems) > most else "")
