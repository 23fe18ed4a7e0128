"""The places of a model, for rules that make values for them."""

from collections.abc import Callable, Iterable, Iterator

import torch

from modelstate.plan.initialise import Initialisers
from modelstate.plan.rules.chain import renamed_by, way_back
from modelstate.plan.rules.rule import Entries, Rule, Wanted
from modelstate.plan.slots import HIDDEN, Slots


class Places:
    """What a model has places for."""

    def __init__(self, slots: Slots, initialisers: Initialisers) -> None:
        self._slots, self._initialisers = slots, initialisers

    def before(self, rules: Iterable[Rule]) -> Wanted:
        """The places by the names that they would have before these rules."""
        back = way_back(rules)
        wanted = [slot.name for slot in self._slots.tensors if slot.kind != HIDDEN]
        return _Before(self._slots, self._initialisers, {renamed_by(back, name): name for name in wanted})


class _Before:
    def __init__(self, slots: Slots, initialisers: Initialisers, names: dict[str, str]) -> None:
        self._slots, self._initialisers, self._names = slots, initialisers, names

    def lacking(self, entries: Entries) -> Iterator[str]:
        return (name for name in self._names if name not in entries)

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        slot = self._slots.by_name.get(self._names.get(name, ""))
        if slot is None or torch.nn.parameter.is_lazy(slot.tensor):
            return None
        return tuple(slot.tensor.shape), slot.tensor.dtype

    def initialiser(self, name: str) -> Callable[[], torch.Tensor] | None:
        found = self._initialisers.find(self._names.get(name, ""))
        return None if found is None else found.make
