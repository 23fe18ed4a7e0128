"""Who is who in a module: the objects that its tensors are, and what else refers to them or shows their memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import nn

from modelstate.plan.overlap import overlap, sharing
from modelstate.plan.placement import is_plain
from modelstate.plan.slots import Slots, slots_of


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """A fingerprint of references, to be compared with another one of the same module. Made by `modelstate.identity`.

    It refers to the tensors, and so keeps objects alive that the module has lost; it holds nothing of their values.
    """

    objects: Mapping[str, torch.Tensor]
    """The object under each name; two names of a tied tensor have the same."""
    views: frozenset[tuple[str, str]]
    """Pairs of names of different tensors that show common memory."""
    optimized: Mapping[tuple[int, int, int], torch.Tensor]
    """What each place in an optimizer refers to: by the optimizer, the group and the place within it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and not self.differences(other)

    __hash__ = None  # type: ignore[assignment]

    def differences(self, later: "Identity") -> list[str]:
        """What has changed until `later`, a line each; empty where every reference is what it was."""
        texts = []
        for name in {**self.objects, **later.objects}:
            before, now = self.objects.get(name), later.objects.get(name)
            if before is None or now is None:
                texts.append(f"{name} is {'gone' if now is None else 'new'}")
            elif before is not now:
                texts.append(f"{name} is another object")
        texts += [f"{one} and {other} no longer share memory" for one, other in sorted(self.views - later.views)]
        texts += [f"{one} and {other} share memory now" for one, other in sorted(later.views - self.views)]
        places = {**self.optimized, **later.optimized}
        changed = [at for at in places if self.optimized.get(at) is not later.optimized.get(at)]
        return texts + [f"optimizer {at[0]}, group {at[1]}, place {at[2]} refers to another object" for at in changed]

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that are one object."""
        groups: dict[int, list[str]] = {}
        for name, tensor in self.objects.items():
            groups.setdefault(id(tensor), []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def identity(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> Identity:
    """Who is who in a module, to compare before and after something that should keep all references.

    >>> before = modelstate.identity(model, [optimizer])
    >>> model.bfloat16()
    >>> print(before.differences(modelstate.identity(model, [optimizer])))
    """
    slots = slots_of(module)
    return Identity(
        objects={name: slot.tensor for name, slot in slots.by_name.items()},
        views=frozenset(
            (one.name, other.name)
            for group in sharing([slot for slot in slots.tensors if is_plain(slot.tensor)])
            for one, other in combinations(sorted(group, key=lambda slot: slot.name), 2)
            if overlap(one.tensor, other.tensor)
        ),
        optimized={
            (number, index, place): param
            for number, optimizer in enumerate(optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for place, param in enumerate(group["params"])
        },
    )


def lost_references(before: Slots, module: nn.Module) -> tuple[str, ...]:
    """Names of a module that have lost the object that they had, a line each."""
    now = slots_of(module).by_name
    changed = [name for name, slot in before.by_name.items() if name not in now or now[name].tensor is not slot.tensor]
    return tuple(f"{name} is {'another object' if name in now else 'gone'}" for name in changed)
