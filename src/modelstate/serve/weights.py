"""What is known of the values of a version, and weights that catch up with a step of a store with `delta=`.

Of weights that were read from a checkpoint as they are, the digests are those of the checkpoint. A patch names the
digest of the tensor that it is for. So which patches lead from a weight in memory to a step is known without reading
the weight. They are applied to the memory of a version that no request uses, or to a copy of a weight that serves.

A request may have written to a weight, and no count of torch has all writes (`.data`, collectives, fused optimizers).
So weights that have caught up are hashed, and all is read from the files where one is not as the step says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

import msgspec
import torch
import xxhash
from msgspec.structs import replace
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.mapped import Maps
from modelstate.formats.block_writer import write_blocks
from modelstate.io.engine import OpenFiles, Request, read_ranges
from modelstate.io.memory import fresh_tensors
from modelstate.io.tensors import compute
from modelstate.serve.meta_clone import buffers_of
from modelstate.spec import ByteRange, Combined, Stored, StoredTensor, bytes_key, is_run
from modelstate.torch_compat.plain import has_its_memory, in_a_row, is_plain

BufferDigests = dict[str, object]
"""A digest of the values of each buffer, by name."""


def buffer_digests(module: nn.Module) -> BufferDigests:
    """Returns digests of the present buffers, which tell later whether a request has written to them."""
    return {name: buffer_digest(buffer) for name, buffer in buffers_of(module).items()}


def buffer_digest(buffer: torch.Tensor) -> object:
    """Returns a digest of the values. The number of writes does not suffice: batch norm writes past it."""
    if not is_plain(buffer) or buffer.is_meta or buffer.is_quantized:
        return id(buffer)
    return buffer.shape, xxhash.xxh3_128_digest(in_a_row(buffer).view(torch.uint8).numpy().data)


class Weights(msgspec.Struct, eq=False):
    """The weights of a version that are plain tensors of the CPU, by their runtime names."""

    tensors: Mapping[str, torch.Tensor] = {}
    """They share the memory of the version."""
    maps: Set[int] = frozenset()
    """The addresses of those that are maps of a file, into which nothing is read."""
    buffers: BufferDigests = {}
    """As they were when the version was made."""
    checkpoint: Checkpoint | None = None
    """The files that they were read from."""
    names: dict[str, str] = {}
    """The names there of weights that were read as they are. Empty once other values are read into the memory."""

    @property
    def memory(self) -> dict[str, torch.Tensor]:
        """The memory that values can be read into."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor.data_ptr() not in self.maps}

    def digest(self, name: str) -> str:
        """Returns the digest of what was read into a weight; empty where it is not known, or a buffer has changed."""
        tensor, saved = self.tensors.get(name), self.names.get(name)
        if tensor is None or saved is None or self.checkpoint is None:
            return ""
        stored = self.checkpoint.stored(saved)
        is_unchanged = name not in self.buffers or self.buffers[name] == buffer_digest(tensor)
        return "".join(self.checkpoint.digests_of(stored)[-1:]) if is_unchanged and _fits(tensor, stored) else ""


class WeightsRead(NamedTuple):
    """The result of `read_weights`."""

    tensors: dict[int, torch.Tensor]
    """By the ids of their slots."""
    maps: set[int]
    """The addresses of those that are maps of a file."""
    caught_up: bool
    """Whether weights in memory have caught up."""
    notes: Sequence[str]
    """Remarks about files that cannot be mapped."""


def read_weights(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    slots: Mapping[str, torch.Tensor],
    free: Weights,
    serving: Weights,
    *,
    may_map: bool,
    verify: bool,
) -> WeightsRead | None:
    """Reads the weights of a version as they are in a checkpoint, as far as they cannot catch up in memory.

    Returns None where it does not have exactly the values for these slots, or a weight in memory is not what was read
    into it: a load says what is wrong, casts, or reads all.

    Args:
        checkpoint: The checkpoint.
        names: The name in the checkpoint for each runtime name.
        slots: The tensors on meta for which weights are needed, by their runtime names.
        free: Weights whose memory nothing uses. It is written to: afterwards their values are not known.
        serving: The weights that serve, which stay as they are.
        may_map: Whether weights may be maps of the files.
        verify: Whether values only count that are compared with their digests.

    Raises `ReadFailedError`, `ChecksumError` with `verify`, and `DamagedFileError` for a patch that cannot be applied.
    """
    sources = dict[int, tuple[str, Stored]]()
    for name, slot in slots.items():
        stored = checkpoint.stored(names[name]) if name in names else None
        if stored is None or not (slot.is_meta and _fits(slot, stored)):  # TorchScript has memory
            return None
        first_name, first = sources.setdefault(id(slot), (name, stored))
        if bytes_key(first, first_name) != bytes_key(stored, name):
            return None
    places = {stored.storage if isinstance(stored, StoredTensor) else id(stored) for _, stored in sources.values()}
    if len(names) > len(slots) or len(places) < len(sources):  # weights that are not tied would share a map
        return None
    contents, memory, targets = checkpoint.contents, free.memory, list[_Target]()
    maps = Maps(checkpoint.fingerprints, checkpoint.format)
    found, mapped, to_verify = dict[int, torch.Tensor](), set[int](), set[ByteRange]()
    caught_up = dict[int, str]()  # the digests that the weights must have then
    for slot_id, (name, stored) in sources.items():
        value, patched = stored, contents.patched.get(stored) if isinstance(stored, Combined) else None
        digests = checkpoint.digests_of(stored) if contents.patched else ()
        for weights in (free,) if patched is None else (free, serving) if digests else ():
            digest = weights.digest(name)
            if digest in digests:
                value, caught_up[slot_id] = weights.tensors[name], digests[-1]
                if patched is None or (weights is free and digest == digests[-1]):
                    found[slot_id] = value
                else:
                    value = patched.later(value, digests.index(digest))
                break
        # Payloads are verified in any case: see `trust_known_patches`.
        parts = [*value.parts[0 if verify else 1 :]] if isinstance(value, Combined) else [value] if verify else []
        to_verify.update(part.storage for part in parts if isinstance(part, StoredTensor))
        if may_map and isinstance(value, StoredTensor) and maps.can_map(value.extent, None):
            found[slot_id] = maps.tensor(value)
            mapped.add(found[slot_id].data_ptr())
        elif slot_id not in found:
            new = memory.get(name)
            new = fresh_tensors([(torch.Size(value.shape), None, value.dtype)])[0] if new is None else new
            targets.append((value, new))
            found[slot_id] = new
    if verify or to_verify:
        check = checkpoint.verification()
        replace(check, names_of={place: of for place, of in check.names_of.items() if place in to_verify}).run()
    free.names.clear()
    with OpenFiles(checkpoint.fingerprints) as files, torch.no_grad():
        read = partial(read_ranges, files=files)
        read([Request(value.extent, out.data_ptr()) for value, out in targets if isinstance(value, StoredTensor)])
        computed = [(value, out) for value, out in targets if isinstance(value, Combined)]
        compute(computed, partial(read, threads=1), read_whole=maps.read)
        for value, out in targets:
            if isinstance(value, torch.Tensor):
                out.copy_(value)
        files.check_unchanged()
    maps.check_unchanged()
    if write_blocks(None, 0, [found[slot_id] for slot_id in caught_up]) != [*caught_up.values()]:
        return None  # a request has written to a weight
    mapped |= free.maps & {tensor.data_ptr() for tensor in found.values()}
    return WeightsRead(found, mapped, bool(caught_up), maps.notes)


_Target = tuple[Stored, torch.Tensor]
"""A value, and the memory that it is read into."""


def _fits(tensor: torch.Tensor, stored: Stored) -> bool:
    """Whether a tensor has the elements of a stored one in their order, or could have them."""
    if isinstance(stored, torch.Tensor):
        is_whole = is_plain(stored) and not stored.is_meta and has_its_memory(stored)
    else:
        is_whole = stored.is_read_in_blocks if isinstance(stored, Combined) else is_run(stored)
    kind = stored.dtype, torch.Size(stored.shape)
    return is_whole and is_plain(tensor) and tensor.is_contiguous() and (tensor.dtype, tensor.shape) == kind
