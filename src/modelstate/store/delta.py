"""Writes models as differences to their values in the last checkpoint. A copy of these values is kept in memory.

A payload is made from a copy whose digest is the one in the manifest of the last checkpoint, and is applied to it. The
digest of the result is the one that the new manifest gets. So a patch that was written leads from the one to the other,
even where the model was changed meanwhile, or another process has written a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch

from modelstate.arguments import check_integer
from modelstate.distributed.writing import ShardedTensor
from modelstate.errors import ModelStateError
from modelstate.formats.block_writer import write_blocks
from modelstate.formats.layers import Patch
from modelstate.formats.manifest import BLOCK_BYTES
from modelstate.formats.serialize import SerializedState
from modelstate.io.engine import for_each, read_threads
from modelstate.io.memory import empty_cpu
from modelstate.io.staging import copy_all
from modelstate.torch_compat.dtypes import floating_dtype
from modelstate.torch_compat.plain import in_a_row

_Tensors = Mapping[str, torch.Tensor]
_Key = tuple[str, str]
"""The path of an object, and the name of a tensor."""


class Delta(msgspec.Struct, frozen=True):
    """The steps of a `Store` as differences: of a model, a step has the changes since the step before.

    Every step is complete by itself, as without it: files of earlier steps that it needs are linked. A step is whole
    where the difference would be larger than half of the model, or with the linked files larger than the model twice.
    Other objects than modules are whole in every step, and so are modules with DTensors.

    The store keeps a copy of the models as they were saved last in memory of the CPU, without frozen parameters, until
    `Store.close`.

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


class Published:
    """The values of the modules as they were saved last, by the paths of the objects and the names of the tensors."""

    def __init__(self, delta: Delta) -> None:
        self.delta = delta
        self._copies: dict[_Key, torch.Tensor] = {}
        self._digests: dict[_Key, str] = {}
        """Those of the copies that are not being changed."""

    def held(self, path: str, tensors: _Tensors, digests: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Returns the copies of tensors that have these digests."""
        copies = {}
        for name, tensor in tensors.items():
            copy = self._copies.get((path, name)) if self._digests.get((path, name)) == digests[name] else None
            if copy is not None and (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape):
                copies[name] = copy
        return copies

    def encode(
        self, path: str, tensors: _Tensors, digests: Mapping[str, str], read: Callable[[str], torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Patch]]:
        """Returns the payloads of the tensors that can be patched, and the patches; no patch of an equal tensor.

        Args:
            path: the path of the object.
            tensors: the tensors, with the dtypes and shapes that they have in the last checkpoint.
            digests: their digests in the last checkpoint.
            read: returns the values in the last checkpoint.
        """
        from modelstate.formats.delta import BLOCK_ELEMENTS, apply, encode, joined  # with a codec that only deltas need

        for name in tensors.keys() - self.held(path, tensors, digests).keys():
            try:
                values = read(name)
            except (ModelStateError, OSError):
                return {}, {}  # all is written whole
            self._copies[path, name] = values
            (self._digests[path, name],) = write_blocks(None, 0, [values])
        # Those that are held now: not what was damaged since it was saved.
        copies, whole = self.held(path, tensors, digests), set[str]()
        parts = {name: _parts(tensor, BLOCK_ELEMENTS) for name, tensor in copies.items()}
        encoded = dict[tuple[str, range], tuple[torch.Tensor, int, str]]()

        @torch.inference_mode(False)
        @torch.no_grad()
        def encode_part(part: tuple[str, range]) -> None:
            name, elements = part
            if name not in whole:
                copy = copies[name].view(-1)[elements.start : elements.stop]
                values = in_a_row(tensors[name], elements.start, elements.stop)
                payload = encode(copy, values, tensors[name].nbytes // 2)
                if payload is None:
                    whole.add(name)
                else:
                    changed = apply(payload, copy, 0)
                    (digest,) = write_blocks(None, 0, [copy])  # while the part is in the cache of the processor
                    encoded[part] = payload, changed, digest

        for name in copies:
            del self._digests[path, name]
        every = [(name, part) for name, of_tensor in parts.items() for part in of_tensor]
        for_each(every, [encode_part] * min(read_threads(), len(every)), with_torch=True)
        payloads, patches = dict[str, torch.Tensor](), dict[str, Patch]()
        for name in (name for name in copies if name not in whole):
            found = [encoded[name, part] for part in parts[name]]
            payload = joined([(of_part, len(part)) for (of_part, _, _), part in zip(found, parts[name], strict=True)])
            if 2 * payload.nbytes <= tensors[name].nbytes:
                payloads[name] = payload
                self._digests[path, name] = after = "".join(digest for _, _, digest in found)
                if payload.numel():
                    patches[name] = Patch(sum(changed for _, changed, _ in found), digests[name], after)
        return payloads, patches

    @torch.inference_mode(False)
    def copied(self, path: str, tensors: _Tensors) -> dict[str, torch.Tensor]:
        """Returns copies of tensors, which are kept until the next save. `note` gives them their digests."""
        copies = {}
        for name, tensor in tensors.items():
            self._digests.pop((path, name), None)
            copy = self._copies.get((path, name))
            if copy is None or (copy.dtype, copy.shape) != (tensor.dtype, tensor.shape):
                # By its bytes: some dtypes cannot be filled with zeros.
                copy = empty_cpu((tensor.nbytes,), torch.uint8).view(tensor.dtype).view(tensor.shape)
                self._copies[path, name] = copy
            copies[name] = copy
        copy_all(list(tensors.values()), list(copies.values()))
        return copies

    def note(self, path: str, digests: Mapping[str, str]) -> None:
        """Notes the digests of copies that were written."""
        self._digests |= {(path, name): digest for name, digest in digests.items()}


def _parts(tensor: torch.Tensor, block_elements: int) -> list[range]:
    """The elements of a tensor in parts that begin at blocks of payloads, and of digests."""
    step = max(block_elements, BLOCK_BYTES // tensor.itemsize)
    return [range(first, min(first + step, tensor.numel())) for first in range(0, tensor.numel(), step)]
