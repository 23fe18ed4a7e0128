"""Which weights lie transposed: those of a Conv1D, whose second size is that of the bias."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from modelstate.plan.suggest.concepts import role_of
from modelstate.plan.suggest.skeletons import Leaf

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Orientation:
    """How the weights of one side lie."""

    transposed: frozenset[str]
    """Names of the weights that certainly lie as a Conv1D has them: inputs first."""
    families: Mapping[str, frozenset[bool]]
    """What is certain within a layer, by the path of the layer: whether weights are transposed."""

    def of_square(self, name: str) -> bool | None:
        """Whether a square weight is transposed, by what is certain of its neighbours; None where nothing is."""
        known = self.families.get(family(name), frozenset())
        return next(iter(known)) if len(known) == 1 else None

    @property
    def turned_layers(self) -> set[str]:
        """Layers in which nothing certain lies otherwise."""
        return {layer for layer, known in self.families.items() if known == {True}}

    def straight(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """The tensors with the shapes that they have in a Linear."""
        return [replace(leaf, shape=leaf.shape[::-1]) if leaf.name in self.transposed else leaf for leaf in leaves]


def family(name: str) -> str:
    """The layer that a tensor is in, without its number."""
    text = _NUMBER.sub("#", name)
    return text[: text.rfind("#") + 1]


def without_numbers(name: str) -> str:
    """The name with # for the parts that are numbers."""
    return _NUMBER.sub("#", name)


def orientation(leaves: Iterable[Leaf]) -> Orientation:
    """What can be told from weights and their biases."""
    owners: dict[str, dict[str, Leaf]] = defaultdict(dict)
    for leaf in leaves:
        path, _, last = leaf.name.rpartition(".")
        rest, role = role_of(last)
        owners[f"{path}.{rest}"][role] = leaf
    transposed: set[str] = set()
    families: dict[str, set[bool]] = defaultdict(set)
    for roles in owners.values():
        weight, bias = roles.get("weight"), roles.get("bias")
        if weight is None or bias is None or len(weight.shape) != 2 or len(bias.shape) != 1:
            continue
        first, second = (size == bias.shape[0] for size in weight.shape)
        if first != second:
            families[family(weight.name)].add(second)
            if second:
                transposed.add(weight.name)
    return Orientation(frozenset(transposed), {path: frozenset(known) for path, known in families.items()})
