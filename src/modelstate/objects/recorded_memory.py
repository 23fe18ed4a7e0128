"""The tensors of optimizers on a GPU, whose addresses a CUDA graph of a training step may have recorded.

A restore makes new tensors, so that it can be undone. When nothing can fail any more, their values are copied to the
tensors that were there before, which then take their places again.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

Recorded = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]
"""Values of an optimizer, a name among them, the new tensor of this name, and the one that was there."""


def recorded_by_graphs(
    before: Mapping[str, object], new: Mapping[str, object], values: dict[str, Any]
) -> Iterator[Recorded]:
    """Yields the tensors on a GPU that new ones take the place of: a CUDA graph may have recorded their addresses."""
    for key, value in new.items():
        old = before.get(key)
        if (
            type(value) is torch.Tensor
            and type(old) is torch.Tensor
            and old.is_cuda
            and not old.is_inference()
            and (old.shape, old.stride(), old.dtype, old.device)
            == (value.shape, value.stride(), value.dtype, value.device)
        ):
            yield values, key, value, old


def into_recorded_memory(recorded: Iterable[Recorded]) -> None:
    """Copies new values to the tensors that were there before, and puts these in their place again.

    A tensor that was there under several names, as the learning rate of several groups, is left out if it cannot have
    the new values of all of them.
    """
    by_memory = defaultdict[tuple[torch.device, int], list[Recorded]](list)
    for entry in recorded:
        values, key, new, old = entry
        if values.get(key) is new:
            by_memory[old.device, old.data_ptr()].append(entry)
    with torch.inference_mode(False), torch.no_grad():
        for entries in by_memory.values():
            _, _, first, old = entries[0]
            if all(new.dtype == first.dtype and torch.equal(new, first) for _, _, new, _ in entries[1:]):
                old.copy_(first)
                for values, key, _, before in entries:
                    values[key] = before
