"""Rules for a checkpoint and a model, from all that can be seen without reading a value."""

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from modelstate.errors import AmbiguousKeyError, OptionError
from modelstate.plan.matching import matching_part
from modelstate.plan.slots import HIDDEN, Slots, slots_of
from modelstate.plan.suggest.found import find
from modelstate.plan.suggest.skeletons import Leaf, kind_of
from modelstate.plan.suggest.suggestion import Suggestion
from modelstate.plan.suggest.verified import verified
from modelstate.plan.torch_private import unwrapped
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.open import argument_order, is_module, is_source
from modelstate.read.open import open as open_checkpoint


@argument_order("ms.suggest", is_module, is_source)
def suggest(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any] | Checkpoint,
    *,
    key: str | None = None,
) -> Suggestion:
    """Works out rules by which a checkpoint fits a model, from names, shapes, dtypes and the order of numbers.

    Nothing is loaded, no tensor's bytes are read, and the model is not changed. The result is a list of rules, for
    `rules=` of `modelstate.load`, if they are what is meant: print it first. Where several answers are equally good
    none is given; they are listed as ambiguous. A suggestion cannot see what a tensor means: parts or elements in
    another order, of the same shape, look the same.

    Raises what opening raises, `AmbiguousKeyError`, `KeyNotFoundError` and `OptionError`; what it cannot work out
    stays open, and does not raise.
    """
    if not isinstance(model, nn.Module):
        raise OptionError("not a model", expected="a torch.nn.Module", found=type(model).__name__)
    checkpoint = open_checkpoint(source)
    slots = slots_of(unwrapped(model))
    checkpoint = _part(checkpoint, slots) if key is None else checkpoint.select(key)
    sources = [Leaf(name, spec.shape, kind_of(spec.dtype)) for name, spec in checkpoint.items()]
    wanted = [slot for slot in slots.tensors if slot.kind != HIDDEN and not torch.nn.parameter.is_lazy(slot.tensor)]
    targets = [
        Leaf(name, tuple(slot.tensor.shape), kind_of(slot.tensor.dtype)) for slot in wanted for name in slot.names
    ]
    return verified(find(sources, targets, slots), checkpoint, slots)


def _part(checkpoint: Checkpoint, slots: Slots) -> Checkpoint:
    """The part of the checkpoint that is meant: by the model's names, or by its shapes."""
    names = [name for slot in slots.tensors for name in slot.names]
    part = matching_part(checkpoint, names, [str])
    if part.key or len(checkpoint.containers) < 2 or any(name in checkpoint for name in names):
        return part
    wanted = Counter(tuple(slot.tensor.shape) for slot in slots.tensors if not torch.nn.parameter.is_lazy(slot.tensor))
    scores = {}
    for key in dict.fromkeys(["", *checkpoint.containers]):
        shapes = Counter(spec.shape for name, spec in checkpoint.items() if not key or name.startswith(f"{key}."))
        scores[key] = (shapes & wanted).total(), -shapes.total(), len(key)
    best = max(scores, key=scores.__getitem__)
    rivals = [
        one
        for one, score in scores.items()
        if score[:2] == scores[best][:2] and not (best.startswith(f"{one}.") or one == best or not one)
    ]
    if rivals:
        raise AmbiguousKeyError(
            "the checkpoint holds several parts with tensors like the model's",
            where=checkpoint.source,
            found=", ".join(map(repr, [best, *rivals])),
            remedy=f"say which: key={best!r}",
            candidates=tuple((one, scores[one][0]) for one in [best, *rivals]),
        )
    return checkpoint.select(best) if best else checkpoint
