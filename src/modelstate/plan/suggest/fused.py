"""Several tensors of one side that are one tensor of the other: query, key and value; gate and up."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelstate.plan.suggest.concepts import INTERLEAVED, PARTS, contradict, of_path, shared
from modelstate.plan.suggest.order import order_is_told
from modelstate.plan.suggest.pairing import Pairing, Unit, units
from modelstate.plan.suggest.skeletons import Leaf, Level, Skeleton


@dataclass(frozen=True, slots=True)
class Fusion:
    """A tensor, and those that are parts of it, in their order; for each combination of the numbers in the names."""

    whole: Skeleton
    parts: tuple[Skeleton, ...]
    sizes: tuple[int, ...] | None
    """Along the first dimension; None where they are all the same."""


@dataclass(frozen=True, slots=True)
class _Parts:
    kind: str
    units: tuple[Unit, ...]
    means: frozenset[str]
    """What the names say beside which part it is."""

    @property
    def skeletons(self) -> tuple[Skeleton, ...]:
        return tuple(next(iter(unit.roles.values())) for unit in self.units)


def fusions(
    wholes: Iterable[Leaf], parts: Iterable[Leaf], pairing: Pairing, *, named: bool, turned: bool = False
) -> list[Fusion]:
    """Which tensors of one side are made of which of the other, where that is clear.

    `named` asks for those that are called so, otherwise for those that are called nothing else. `turned` says that
    the parts are those of the checkpoint.
    """
    single = units(wholes, Level.WHOLE, owners=False)
    found = []
    for group in _groups(units(parts, Level.WHOLE, owners=False)):
        fitting = [one for one in single if _fits(one, group)]
        fitting = [one for one in fitting if (group.kind in _words(one) if named else not _words(one) & _TAKEN)]
        best = _best(fitting, group, pairing, turned)
        if best is not None:
            single.remove(best)
            skeleton = next(iter(best.roles.values()))
            found.append(Fusion(skeleton, group.skeletons, _sizes(group)))
    return found


_MARGIN = 0.25
_TAKEN = {INTERLEAVED, "out", "up", "down", "q", "k", "v", *PARTS}


def interleaved(leaves: Iterable[Leaf]) -> list[Leaf]:
    """Tensors whose names say that the parts take turns in them."""
    return [leaf for leaf in leaves if INTERLEAVED in of_path(leaf.name.split("."))]


def _words(unit: Unit) -> frozenset[str]:
    return _sample(unit).words(unit.owner.count("."))


def _sample(unit: Unit) -> Leaf:
    return next(iter(next(iter(unit.roles.values())).leaves.values()))


def _groups(single: Iterable[Unit]) -> list[_Parts]:
    """Siblings that are called query, key and value, or the like."""
    kinds = {part: kind for kind, names in PARTS.items() for part in names if kind != "kv"}
    stems: dict[tuple[str, str, str], dict[str, Unit]] = defaultdict(dict)
    for unit in single:
        segments = unit.owner.split(".")
        for at in range(len(segments) - 1, max(len(segments) - 3, -1), -1):
            (part, *others) = [word for word in _sample(unit).words(at) if word in kinds] or [""]
            if part and not others:
                stem = ".".join([*segments[:at], "?", *segments[at + 1 :]])
                stems[stem, next(iter(unit.roles)), kinds[part]][part] = unit
                break
    found = []
    for (stem, _, kind), members in stems.items():
        names = PARTS[kind]
        if members.keys() >= set(names):
            found.append(_Parts(kind, tuple(members[name] for name in names), of_path(stem.split("."))))
    return found


def _sizes(group: _Parts) -> tuple[int, ...] | None:
    sizes = tuple(next(iter(one.leaves.values())).shape[0] for one in group.skeletons)
    return sizes if len(set(sizes)) > 1 else None


def _fits(unit: Unit, group: _Parts) -> bool:
    """Whether the sizes of the parts add up to that of the tensor, in every layer."""
    ((role, whole),) = unit.roles.items()
    first, *others = group.skeletons
    if role != first.role or any(one.leaves.keys() != whole.leaves.keys() for one in (first, *others)):
        return False
    if not order_is_told(whole, first):
        return False
    sizes = set()
    for ranks, leaf in whole.leaves.items():
        parts = [one.leaves[ranks] for one in (first, *others)]
        if not leaf.shape or any(not part.shape or part.kind != leaf.kind for part in parts):
            return False
        added = sum(part.shape[0] for part in parts)
        if leaf.shape[0] != added or any(part.shape[1:] != leaf.shape[1:] for part in parts):
            return False
        sizes.add(tuple(part.shape[0] for part in parts))
    return len(sizes) == 1


def _best(fitting: Sequence[Unit], group: _Parts, pairing: Pairing, turned: bool) -> Unit | None:
    scored = []
    for at, one in enumerate(fitting):
        if not contradict(one.means - frozenset(PARTS), group.means):
            pair = (group.units[0], one) if turned else (one, group.units[0])
            scored.append((shared(one.means, group.means) + pairing.context(*pair), at))
    scored.sort(reverse=True)
    if not scored or (len(scored) > 1 and scored[0][0] - scored[1][0] < _MARGIN):
        return None
    return fitting[scored[0][1]]
