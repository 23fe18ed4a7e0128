"""A checkpoint, or a part of it, in memory: its containers and values, and its tensors in memory of their own."""

from collections.abc import Iterable
from typing import Any

import torch

from modelstate.read.checkpoint import Checkpoint
from modelstate.read.ranges import Request
from modelstate.read.tree import rebuild, subtree
from modelstate.spec import Stored, StoredTensor


def whole(checkpoint: Checkpoint, path: str = "") -> Any:
    """The state that was saved, or what stands in it at a dotted path. Tied tensors are one object.

    Raises `KeyNotFoundError`, `ReadFailedError`, `CodecError`.
    """
    node = subtree(checkpoint.contents.tree, ".".join(filter(None, (checkpoint.key, path))), checkpoint.source)
    made = _read_plain(checkpoint, [name for name in checkpoint if not path or f"{name}.".startswith(f"{path}.")])
    return rebuild(node, lambda stored: _taken(made, checkpoint, stored))


def _read_plain(checkpoint: Checkpoint, names: Iterable[str]) -> dict[int, torch.Tensor]:
    """Those of the tensors that are one run of bytes, read at once; by the identity of their descriptions."""
    made: dict[int, torch.Tensor] = {}
    requests = []
    for name in names:
        stored = checkpoint.stored(name)
        if isinstance(stored, StoredTensor) and stored.is_contiguous and id(stored) not in made:
            made[id(stored)] = tensor = torch.empty(stored.shape, dtype=stored.dtype)
            if stored.nbytes:
                requests.append(Request(stored.extent, tensor.data_ptr()))
    checkpoint.read_all(requests)
    return made


def _taken(made: dict[int, torch.Tensor], checkpoint: Checkpoint, stored: Stored) -> torch.Tensor:
    found = made.get(id(stored))
    return checkpoint.read(stored) if found is None else found
