"""Finds tensors that torch keeps in two parts and the model in one: weight norm and pruning masks.

The names are torch's own, and the shapes must be those that torch gives to the parts, so the rules are sure.
"""

from collections.abc import Collection, Mapping, Sequence

from modelstate.rules.joining import Multiply, WeightNorm, weight_norm_dim
from modelstate.rules.rule import Rule, template
from modelstate.suggestion.generalise import families
from modelstate.suggestion.skeletons import Shape
from modelstate.text_format import folded

_Fold = type[WeightNorm] | type[Multiply]
_FOLDS: tuple[_Fold, _Fold] = (WeightNorm, Multiply)
_PARTS = (("_g", "_v"), ("_orig", "_mask"))
"""What weight norm and pruning add to the name of a parameter."""
_NEW = ("original0", "original1")
"""The names of the parts in the parametrization of weight norm."""
_PARAMETRIZATIONS = "parametrizations"


def fold_rules(shapes: Mapping[str, Shape], wanted: Collection[str]) -> tuple[list[Rule], list[str]]:
    """Returns the rules that fold tensors, and notes about those that no rule folds.

    Args:
        shapes: the shapes of the tensors of the checkpoint.
        wanted: the names of the model. Two parts that the model has too are not folded.
    """
    rows: dict[_Fold, list[tuple[str, str, str]]] = {WeightNorm: [], Multiply: []}
    spectral = []
    ends = tuple(end for parts in (*_PARTS, _NEW) for end in parts)
    is_plain = not any(name.endswith(ends) for name in wanted)
    for first in shapes:
        whole, second, kind = _whole(first)
        if not whole or first in wanted or whole in shapes or not (is_plain or whole in wanted):
            continue
        if f"{whole}_u" in shapes or f"{first.rpartition('.')[0]}.0._u" in shapes:
            spectral.append(first)
        elif kind is None or second not in shapes or second in wanted:
            continue
        elif _fits(kind, shapes[first], shapes[second]):
            rows[kind].append((first, second, whole))
    rules: list[Rule] = []
    for make, members in rows.items():
        rules += [make((first, second), whole) for first, second, whole in _patterns(members, shapes)]
    notes = [
        f"{', '.join(folded(spectral))}: no rule folds spectral norm; load it into a model with spectral norm, remove "
        "that, and save the model"
    ]
    return rules, notes if spectral else []


def _fits(kind: _Fold, first: Shape, second: Shape) -> bool:
    return first == second if kind is Multiply else weight_norm_dim(first, second) is not None


def _whole(first: str) -> tuple[str, str, _Fold | None]:
    """Returns the names of the whole and of the second part, and the rule, for a name that may be of a first part."""
    path, _, last = first.rpartition(".")
    owner, _, parametrized = path.rpartition(".")
    module, _, between = owner.rpartition(".")
    if between == _PARAMETRIZATIONS and last in ("original", _NEW[0]):
        whole = f"{module}.{parametrized}" if module else parametrized
        return whole, f"{path}.{_NEW[1]}", WeightNorm if last == _NEW[0] else None
    for (end, other), kind in zip(_PARTS, _FOLDS, strict=True):
        if first.endswith(end):
            whole = first.removesuffix(end)
            return whole, whole + other, kind
    return "", "", None


def _patterns(rows: Sequence[tuple[str, ...]], names: Collection[str]) -> list[tuple[str, ...]]:
    """Returns patterns of the rows: one for each name of a parameter where it matches nothing else."""
    by_end: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        depth = 3 if f".{_PARAMETRIZATIONS}." in f".{row[0]}" else 1
        cut = len(row[0]) - len(".".join(row[0].split(".")[-depth:]))
        by_end.setdefault(tuple(name[cut:] for name in row), []).append(row)
    patterns: list[tuple[str, ...]] = []
    for ends, members in by_end.items():
        short = tuple(f"*.{end}" for end in ends)
        matching = [{name for name in names if template(pattern).match(name) is not None} for pattern in short[:2]]
        fits = matching == [{row[side] for row in members} for side in (0, 1)]
        patterns += [short] if fits and len(members) > 1 else [family.patterns for family in families(members)]
    return patterns
