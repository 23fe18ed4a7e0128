"""The places of a model, for rules that make values for them."""

import copy
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from modelstate.plan.rules.chain import renamed_by, way_back
from modelstate.plan.rules.rule import Entries, Rule, Wanted
from modelstate.plan.slots import HIDDEN, Slots


class Places:
    """What a model has places for."""

    def __init__(self, model: nn.Module, slots: Slots) -> None:
        self._model, self._slots = model, slots

    def before(self, rules: Iterable[Rule]) -> Wanted:
        """The places by the names that they would have before these rules."""
        back = way_back(rules)
        wanted = [slot.name for slot in self._slots.tensors if slot.kind != HIDDEN]
        return _Before(self._model, self._slots, {renamed_by(back, name): name for name in wanted})


class _Before:
    def __init__(self, model: nn.Module, slots: Slots, names: dict[str, str]) -> None:
        self._model, self._slots, self._names = model, slots, names

    def lacking(self, entries: Entries) -> Iterator[str]:
        return (name for name in self._names if name not in entries)

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        slot = self._slots.by_name.get(self._names.get(name, ""))
        if slot is None or torch.nn.parameter.is_lazy(slot.tensor):
            return None
        return tuple(slot.tensor.shape), slot.tensor.dtype

    def initialiser(self, name: str) -> Callable[[], torch.Tensor] | None:
        path, _, attribute = self._names.get(name, "").rpartition(".")
        owner = self._model.get_submodule(path)
        if not callable(getattr(owner, "reset_parameters", None)):
            return None
        return lambda: _initialised(owner, attribute)


def _initialised(owner: nn.Module, attribute: str) -> torch.Tensor:
    """The tensor as a new owner would have it; the owner itself is left alone."""
    below = (tensor for child in owner.children() for tensor in (*child.parameters(), *child.buffers()))
    memo: dict[int, object] = {id(tensor): _empty(tensor, torch.device("meta")) for tensor in below}
    for tensor in (*owner.parameters(recurse=False), *owner.buffers(recurse=False)):
        memo[id(tensor)] = _empty(tensor, torch.device("cpu") if tensor.is_meta else tensor.device)
    twin = copy.deepcopy(owner, memo)
    twin.reset_parameters()  # type: ignore[operator]
    made: torch.Tensor = getattr(twin, attribute).detach()
    return made


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    fresh = torch.empty_like(tensor, device=device)
    return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
