"""A safetensors file: the length of the header, the header, the bytes of the tensors.

Tensors with wide elements come first, so that all lie at multiples of their element's size, whatever their number:
they can be mapped. The header is written last, for it has the digests of what stands behind it, and a seal, which is
the digest of itself.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from modelstate.codec.plain import why_not_plain
from modelstate.codec.walk import is_unicode
from modelstate.read.digests import BLOCK_BYTES, HEX, OPEN_SEAL, SEAL, digest, sealed
from modelstate.read.json_text import quote
from modelstate.read.safetensors import DTYPES, MAX_ENTRIES, MAX_HEADER_BYTES
from modelstate.write.blocks import write_blocks
from modelstate.write.files import Output
from modelstate.write.later import Later
from modelstate.write.uncached import past_page_cache

NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"

Tensors = list[tuple[str, torch.Tensor | Later]]
Metadata = Callable[[Mapping[str, str]], Mapping[str, str]]
"""What a file says of itself, given the digests of its tensors by their names; as long with any digests."""


def why_not(name: object, tensor: torch.Tensor | Later) -> str:
    """What keeps a tensor from being stored under a name; empty where nothing does."""
    if not isinstance(name, str) or not is_unicode(name) or name == _METADATA:
        return "not a name that the format has"
    problem = why_not_plain(tensor) if isinstance(tensor, torch.Tensor) else ""
    if not problem and tensor.dtype not in NAMES:
        problem = f"{tensor.dtype}, which safetensors does not have"
    if not problem and tensor.dtype is torch.float4_e2m1fn_x2 and not tensor.shape:
        problem = f"{tensor.dtype} without dimensions, which safetensors does not have"
    return problem


@dataclass(frozen=True, slots=True)
class Layout:
    """A file that is going to be written."""

    tensors: Tensors
    """In the order of their bytes."""
    metadata: Metadata
    header_bytes: int
    """With the eight bytes of its length."""

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self.header_bytes + sum(nbytes_of(tensor) for _, tensor in self.tensors)


def layout(tensors: Mapping[str, torch.Tensor | Later], metadata: Metadata) -> Layout:
    """Raises `ValueError` where it is more than a header holds."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    blank = {name: "0" * (HEX * -(-nbytes_of(tensor) // BLOCK_BYTES)) for name, tensor in ordered}
    return Layout(ordered, metadata, len(_header(ordered, metadata(blank))))


@dataclass(frozen=True, slots=True)
class Written:
    """What a file has come to hold."""

    digests: dict[str, str]
    """Of its tensors, by their names."""
    content: str
    """A digest of everything in it."""


def write(output: Output, planned: Layout, threads: int | None = None) -> Written:
    """Writes the file, which is not yet synced."""
    output.reserve(planned.nbytes)
    with past_page_cache(output, planned.nbytes) as file:
        found = write_blocks(file, planned.header_bytes, [tensor for _, tensor in planned.tensors], threads)
    digests = {name: one for (name, _), one in zip(planned.tensors, found, strict=True)}
    header = _header(planned.tensors, planned.metadata(digests))
    assert len(header) == planned.header_bytes
    output.write_at(0, header)
    return Written(digests, digest(header + "".join(found).encode()))


def _header(tensors: Iterable[tuple[str, torch.Tensor | Later]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {_METADATA: {SEAL: OPEN_SEAL, **metadata}}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + nbytes_of(tensor)
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": _shape(tensor), "data_offsets": [begin, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES or len(entries) > MAX_ENTRIES:
        raise ValueError(f"{len(entries):,} tensors and a header of {len(text):,} bytes")
    return len(text).to_bytes(8, "little") + sealed(text)


def _shape(tensor: torch.Tensor | Later) -> list[int]:
    sizes = list(tensor.shape)
    return [*sizes[:-1], 2 * sizes[-1]] if tensor.dtype is torch.float4_e2m1fn_x2 else sizes


def nbytes_of(tensor: torch.Tensor | Later) -> int:
    """Bytes of the elements."""
    return tensor.numel() * tensor.itemsize


def listed(problems: Mapping[Any, str], most: int = 8) -> str:
    """Names with what is wrong with each."""
    lines = [f"{quote(str(name))}: {problem}" for name, problem in list(problems.items())[:most]]
    return "; ".join(lines) + (f"; and {len(problems) - most} more" if len(problems) > most else "")
