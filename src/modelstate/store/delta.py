"""Writes modules as differences to the last checkpoint: in one process, or byte for byte the same with several ranks.

A rank has blocks of each tensor (`distributed/blocks.py`); a process that saves alone has all of them. It keeps a copy
of its blocks in memory, and encodes their changes. Then all ranks know the sizes of all changes, so that the first one
can choose what is patched and what is written whole. Both are written from the memory of the ranks that have them.

A payload has the changes that are made in a copy whose digest is the one in the manifest of the last checkpoint. The
digest of the copy is then the one that the new manifest gets. So a patch that was written leads from the one to the
other, even where the model was changed meanwhile, or another process has written a checkpoint.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
import torch

from modelstate.arguments import check_integer
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.distributed.agreement import Agreement
from modelstate.distributed.blocks import BlockTensor, block_tensor, divided
from modelstate.distributed.shards import Mesh
from modelstate.distributed.writing import CollectiveWriter, Piece, ShardedTensor, by_rank, rounds
from modelstate.errors import ModelStateError
from modelstate.formats.block_writer import LazyTensor, write_blocks
from modelstate.formats.layers import NewLayers, Patch, PatchLayer
from modelstate.formats.manifest import BLOCK_BYTES, digest
from modelstate.formats.safetensors import FileLayout
from modelstate.formats.serialize import SerializedState
from modelstate.io.engine import for_each, memory_at, read_threads
from modelstate.io.memory import empty_cpu
from modelstate.store.directory import StepIndex
from modelstate.torch_compat.dtypes import floating_dtype
from modelstate.torch_compat.plain import byte_tensor, in_a_row, is_plain_memory

if TYPE_CHECKING:
    from modelstate.formats.delta import Difference

_Key = tuple[str, str]
"""The path of a module, and the name of a tensor."""
LastObject = tuple[dict[str, str], str, bool]
"""An object in the last checkpoint: the digests of the tensors that have the same dtypes and shapes there; its index,
relative to the directory of the store, or nothing; and whether its tensors may be patched."""
LinkedObject = tuple[int, int, list[str]]
"""The step, the number of the save, and the tensors of an object whose files the new checkpoint has of the last one."""
_Tensor = torch.Tensor | LazyTensor
_Frames = list[tuple[int, int]] | None
"""`Directory.blocks` of a payload; None where it was not compared, or has changed too much."""
_Report = tuple[str, int, _Frames]
"""What a rank says of a block: the digest, the number of changed elements, and the frames."""
COMPARING, CHOOSING, EXCHANGING = "comparing with the last checkpoint", "choosing the files", "exchanging changes"
"""The phases before differences are written."""


class Delta(msgspec.Struct, frozen=True):
    """The steps of a `Store` as differences: of a model, a step has the changes since the step before.

    Every step is complete by itself, as without it: files of earlier steps that it needs are linked. A step is whole
    where the difference would be larger than half of the model, or with the linked files larger than the model twice.
    Other objects than modules are whole in every step.

    The store keeps a copy of the models as they were saved last in memory of the CPU, until `Store.close`, without
    frozen parameters that do not change. Of a module with DTensors, each rank keeps a copy of its part, with them.

    Args:
        full_every: the first of each so many steps is whole, so that at most one less have to be applied.
        dtype: the dtype that floating-point parameters and buffers of modules are saved in, also in whole steps, such
            as "bfloat16" for a model that trains in float32; None for their own. They are cast as by `torch.Tensor.to`
            on their device, which takes memory there during a save. Optimizers and all other objects stay as they are.

    Raises:
        OptionError: An argument cannot be used.

    Examples:
        >>> store = ms.Store("checkpoints", delta=ms.Delta(full_every=16, dtype="bfloat16"))
    """

    full_every: int = 32
    dtype: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        check_integer("full_every", self.full_every, least=1)
        floating_dtype(self.dtype, other_casts="save a module in that dtype")

    def cast(self, state: SerializedState) -> None:
        """Casts the floating-point parameters and buffers of a module's state."""
        dtype = floating_dtype(self.dtype)
        if dtype is not None:
            for name in state.plain_names:
                tensor = state.tensors[name]
                if not tensor.dtype.is_floating_point:
                    continue
                if isinstance(tensor, ShardedTensor):
                    state.tensors[name] = tensor.cast(dtype)
                elif isinstance(tensor, torch.Tensor):
                    state.tensors[name] = tensor.to(dtype)


class _Change(msgspec.Struct):
    """A tensor beside what it was: the same on all ranks."""

    digest: str = ""
    changed: int = 0
    frames: _Frames = []
    """None where it was not compared, or has changed too much."""
    ranges: list[tuple[int, int]] = []
    """The elements that the ranks have, as `BlockTensor.ranges`."""
    frame_ranges: list[tuple[int, int]] = []
    """The bytes of frames that the ranks have."""

    def add(self, block: Piece, digest: str, changed: int, frames: _Frames) -> None:
        self.digest += digest
        self.changed += changed
        self.frames = None if frames is None or self.frames is None else self.frames + frames
        self.ranges.append((block.rank, len(block.elements)))
        self.frame_ranges.append((block.rank, sum(nbytes for nbytes, _ in frames or ())))

    def payload_bytes(self, head_bytes: int) -> int:
        """Returns the size of the payload; 0 where nothing has changed."""
        nbytes = sum(nbytes for _, nbytes in self.frame_ranges)
        return head_bytes + nbytes if nbytes else 0


class _OwnBlock(msgspec.Struct):
    """A block of this rank."""

    last: str
    """Its digest in the last checkpoint; empty where the tensor cannot be patched."""
    copy: torch.Tensor | None
    """Its values as they were saved last, if they are kept."""
    digest: str
    """That of the copy; empty where it is not known."""
    difference: Difference | None = None
    """What has been written into the copy; None where it was not compared, or has changed too much."""


class ModuleDeltas:
    """Keeps the blocks of this process as they were saved last, until `Store.close`.

    Args:
        delta: The options of the store.
        index: The checkpoints of the store.
    """

    def __init__(self, delta: Delta, index: StepIndex) -> None:
        self.delta, self._index = delta, index
        self._copies: dict[_Key, torch.Tensor] = {}
        """For each tensor its blocks, one after another."""
        self._digests: dict[_Key, dict[range, str]] = {}
        """Those of the blocks in the copies that are not being changed, by their elements."""
        self._moving: set[_Key] = set()
        """Frozen parameters that have changed all the same, such as those of a moving average."""

    def write(
        self,
        path: str,
        state: SerializedState,
        frozen: Set[str],
        agreement: Agreement,
        writer: CollectiveWriter | None,
        last_object: Callable[[], LastObject],
        link: Callable[[Set[str], Mapping[str, int] | None], LinkedObject],
    ) -> NewLayers:
        """Compares a module with the last checkpoint, and links its files: a call of all ranks.

        Args:
            path: The path of the module.
            state: Its state, whose tensors are replaced by those that are written.
            frozen: The parameters that training does not change.
            agreement: The ranks.
            writer: Their writer; None where this process saves alone.
            last_object: Returns the module in the last checkpoint; called on the first rank.
            link: Links its files, by the tensors that have not changed, and the bytes of the payloads of those that can
                be patched (None for a step that is to be whole); called on the first rank.

        Returns:
            What is to be written.

        Raises what `CollectiveWriter.write` raises.
        """
        from modelstate.formats.delta import BLOCK_ELEMENTS, head  # with a codec that only deltas need

        tensors, ranks = state.tensors, agreement.ranks or (agreement.rank,)
        meshes: Mapping[Mesh, Mesh] = {}
        if writer is not None:
            planned = FileLayout([*tensors.items()], lambda _: {}, 0)
            meshes, _ = writer.planned([planned], lambda: {path: state.values(path)}, list)
        last, index, takes_patches = agreement.decided(COMPARING, last_object)
        # Blocks of deltas are also those of digests.
        blocks = divided(tensors, meshes, ranks, lambda itemsize: math.lcm(BLOCK_ELEMENTS, BLOCK_BYTES // itemsize))
        patchable = {name: last[name] for name in last.keys() & state.plain_names} if takes_patches else {}
        # Values of frozen parameters stay where they are, if this process has them.
        fixed = {name for name in frozen if writer is None and (path, name) not in self._moving}
        with agreement.phase(COMPARING), agreement.barrier():
            own = self._own(path, [block for block in blocks if block.rank == agreement.rank], fixed, patchable)
            self._encode(own, rounds(agreement, by_rank(blocks, ranks)), os.path.join(self._index.directory, index))
        frames: dict[str, list[bytes]] = {}
        found: list[_Report] = []
        for (name, elements), of in own.items():
            if of.copy is not None:
                self._digests.setdefault((path, name), {})[elements] = of.digest
            if of.difference is not None:
                frames.setdefault(name, []).extend(of.difference.frames)
                found.append((of.digest, of.difference.changed, of.difference.blocks))
            else:
                found.append((of.digest, 0, None))
        texts = agreement.texts(COMPARING, msgspec.json.encode(found).decode())
        decode = msgspec.json.Decoder(list[_Report]).decode
        reports = {rank: iter(decode(text)) for rank, text in zip(ranks, texts, strict=True)}
        changes = {name: _Change() for name in tensors}
        for block in blocks:
            changes[block.name].add(block, *next(reports[block.rank]))
        same = {name for name, change in changes.items() if change.digest == last.get(name)}
        self._moving |= {(path, name) for name in fixed & last.keys() - same}
        heads = {name: head(tensors[name].numel(), change.frames or ()) for name, change in changes.items()}
        sizes = {name: change.payload_bytes(len(heads[name])) for name, change in changes.items() if change.frames}
        payload_bytes = {name: size for name, size in sizes.items() if 2 * size <= tensors[name].nbytes}
        step, serial, names = agreement.decided(CHOOSING, lambda: link(same, payload_bytes if takes_patches else None))
        linked = {*names}
        payloads, patches = dict[str, _Tensor](), dict[str, Patch]()
        for name, tensor in tensors.items():
            change = changes[name]
            if (path, name) in self._copies or writer is not None:
                local = self._copies.get((path, name), torch.empty(0, dtype=tensor.dtype, device="cpu"))
                tensors[name] = block_tensor(local, tuple(tensor.shape), change.ranges, writer)
            if name in linked and payload_bytes.get(name):
                start = heads[name] if agreement.is_first else b""
                local = byte_tensor(b"".join([start, *frames.get(name, ())]))
                ranges = [(ranks[0], len(heads[name])), *change.frame_ranges]
                payloads[name] = block_tensor(local, (payload_bytes[name],), ranges, writer)
                patches[name] = Patch(change.changed, last[name], change.digest)
        if writer is not None:
            digests = _exchange(payloads, agreement, writer)
            patches = {name: msgspec.structs.replace(patch, payload=digests[name]) for name, patch in patches.items()}
        whole = {name: tensor for name, tensor in tensors.items() if name not in linked}
        return NewLayers(whole, same if index else frozen, payloads, PatchLayer(step, serial, patches))

    @torch.inference_mode(False)
    def _own(
        self, path: str, blocks: Sequence[Piece], fixed: Set[str], last: Mapping[str, str]
    ) -> dict[tuple[str, range], _OwnBlock]:
        """Returns the blocks of this rank, by the name of the tensor and the elements.

        Args:
            path: The path of the module.
            blocks: The blocks.
            fixed: The tensors whose values are not kept.
            last: The digests in the last checkpoint of the tensors that can be patched.
        """
        own = dict[tuple[str, range], _OwnBlock]()
        before = {key: self._copies.pop(key) for key in [*self._copies] if key[0] == path}
        for name, group in groupby(blocks, lambda block: block.name):
            of, key = [*group], (path, name)
            known, copy = self._digests.pop(key, {}), before.pop(key, None)
            copies: Sequence[torch.Tensor | None] = [None] * len(of)
            if name not in fixed:
                sizes, dtype = [len(block.elements) for block in of], of[0].tensor.dtype
                if copy is None or copy.dtype != dtype or [*known] != [block.elements for block in of]:
                    # By its bytes: some dtypes cannot be filled with zeros.
                    copy, known = empty_cpu((sum(sizes) * dtype.itemsize,), torch.uint8).view(dtype), {}
                self._copies[key], copies = copy, torch.split(copy, sizes)
            for block, part in zip(of, copies, strict=True):
                digest = known.get(block.elements, "")
                own[name, block.elements] = _OwnBlock(last.get(name, "")[block.digests], part, digest)
        return own

    def _encode(
        self,
        own: Mapping[tuple[str, range], _OwnBlock],
        received: Iterable[Sequence[tuple[Piece, _Tensor]]],
        index: str,
    ) -> None:
        """Compares blocks with their values, and keeps these. `index` is the module in the last checkpoint."""
        from modelstate.formats.delta import advance

        last: Checkpoint | None = None
        if any(of.copy is not None and of.last not in ("", of.digest) for of in own.values()):
            with suppress(ModelStateError, OSError):  # otherwise all is written whole
                last = open_checkpoint(index, cache=self._index.cache)

        # Between blocks that fill the caches of the processor, each call of torch takes as long as a tenth of a block.
        def encode_block(item: tuple[Piece, _Tensor]) -> None:
            block, elements = item
            of = own[block.name, block.elements]
            values = elements if isinstance(elements, torch.Tensor) else elements.make(0, elements.numel())
            if not is_plain_memory(values):
                values = in_a_row(values)
            copy = values if of.copy is None else of.copy
            if of.copy is not None and of.last:
                if of.digest != of.last and last is not None:
                    with suppress(ModelStateError, OSError):  # otherwise the tensor is written whole
                        _copy(of.copy, _read(last, block))
                        of.digest = _digest(of.copy)
                if of.digest == of.last:
                    of.difference = advance(copy, values, block.tensor.nbytes // 2)
            if of.difference is None and copy is not values:
                _copy(copy, values)
            if of.difference is None or of.difference.changed:
                # The digest is computed while the block is in the cache of the processor.
                of.digest = _digest(copy)

        for of_round in received:
            for_each(of_round, [encode_block] * min(read_threads(), len(of_round)), with_torch=True)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)


def _digest(tensor: torch.Tensor) -> str:
    octets = memory_at(tensor.data_ptr(), tensor.nbytes)
    return "".join(digest(octets[at : at + BLOCK_BYTES]) for at in range(0, len(octets), BLOCK_BYTES))


def _exchange(payloads: dict[str, _Tensor], agreement: Agreement, writer: CollectiveWriter) -> dict[str, str]:
    """Replaces payloads by the same ones in whole blocks of digests. Returns the digests."""
    meshes = {payload.mesh: payload.mesh for payload in payloads.values() if isinstance(payload, BlockTensor)}
    blocks = divided(payloads, meshes, writer.ranks, lambda _: BLOCK_BYTES)
    own: dict[str, list[torch.Tensor]] = {name: [] for name in payloads}
    with agreement.phase(EXCHANGING), agreement.barrier():
        for of_round in rounds(agreement, by_rank(blocks, writer.ranks)):
            for block, octets in of_round:
                own[block.name].append(octets if isinstance(octets, torch.Tensor) else octets.make(0, octets.numel()))
        hashes = write_blocks(None, 0, [part for parts in own.values() for part in parts])
    texts = agreement.texts(EXCHANGING, " ".join(hashes))
    of_ranks = {rank: iter(text.split()) for rank, text in zip(writer.ranks, texts, strict=True)}
    digests, ranges = dict.fromkeys(payloads, ""), dict[str, list[tuple[int, int]]]()
    for block in blocks:
        digests[block.name] += next(of_ranks[block.rank])
        ranges.setdefault(block.name, []).append((block.rank, len(block.elements)))
    for name, parts in own.items():
        local = byte_tensor(b"".join(part.numpy().data for part in parts))
        payloads[name] = block_tensor(local, payloads[name].shape, ranges[name], writer)
    return digests


def _read(checkpoint: Checkpoint, block: Piece) -> torch.Tensor:
    """Reads the elements of a block."""
    shape, row = block.tensor.shape, math.prod(block.tensor.shape[1:])
    first, end = block.elements.start // row, -(-block.elements.stop // row)
    rows = torch.empty((end - first, *shape[1:]) if shape else (), dtype=block.tensor.dtype, device="cpu")
    checkpoint.read_into(block.name, rows, *((first, end) if shape else ()))
    return rows.view(-1)[block.elements.start - first * row :][: len(block.elements)]
