"""Which weights may lie transposed with no bias to show it: only where it is certain of them or their neighbours."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from modelstate.plan.suggest.orientation import family
from modelstate.plan.suggest.skeletons import Leaf


@dataclass(frozen=True, slots=True)
class Turns:
    """What is certain."""

    names: Collection[str] = ()
    """Names of the checkpoint that fit transposed only."""
    layers: Collection[str] = ()
    """Layers of the checkpoint with such weights, or with those of a Conv1D."""
    places: Collection[str] = ()
    """Layers of the model with those of a Conv1D."""

    def certain(self, leaf: Leaf, goal: Leaf) -> bool:
        layer, place = family(leaf.name), family(goal.name)
        beside = (bool(layer) and layer in self.layers) != (bool(place) and place in self.places)
        return leaf.name in self.names or beside


def turns(
    sources: Sequence[Leaf],
    targets: Sequence[Leaf],
    done: Collection[str],
    filled: Collection[str],
    layers: Collection[str],
    places: Collection[str],
) -> Turns:
    """What the shapes show; `done` and `filled` are settled, `layers` and `places` those with a Conv1D."""
    there = {(leaf.shape, leaf.kind) for leaf in targets}
    lacking = {(leaf.shape, leaf.kind) for leaf in targets if leaf.name not in filled}
    names = {
        leaf.name
        for leaf in sources
        if leaf.name not in done
        and len(leaf.shape) == 2
        and (leaf.shape, leaf.kind) not in there
        and (leaf.shape[::-1], leaf.kind) in lacking
    }
    return Turns(names, {*layers, *map(family, names)}, places)
