"""Applies rules for parameters to the state of an optimizer, which has values for each element of a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeGuard

import torch

from modelstate.formats.tree import leaf_paths, map_leaves, same_value
from modelstate.problems import Problem, ProblemKind, rule_error
from modelstate.rules.expression import values_of
from modelstate.rules.names import Fill
from modelstate.rules.rule import Entries, Entry, Rule, Value, new_name, unscoped
from modelstate.rules.schema import apply_rules, in_memory
from modelstate.rules.tensors import Apply, Cast

State = Mapping[str, Mapping[str, object]]
"""From the name of a parameter to what the optimizer keeps for it: "exp_avg", "step", ...; containers can be nested."""


def apply_to_optimizer(
    rules: Iterable[Rule], state: State
) -> tuple[dict[str, dict[str, object]], dict[str, tuple[str, ...]]]:
    """Applies the rules of the parameters to an optimizer's state.

    A tensor with a value for each element of its parameter (moments, sums) is cut, joined and moved as the parameter
    is. A value for the whole parameter (`step`) must be equal in parameters that are joined. A rule that computes
    with values is refused, because what it does to a parameter does not tell what to do to the moments: that is a
    `Multiply`, a `WeightNorm`, and any `Apply` without `moves=True`. A new parameter has no state, and a `Cast` is left
    to the optimizer.

    Returns the new state by name, and for each name the names in the old state that it is made of.
    Raises `RuleError` with every problem.
    """
    kept = [rule for rule in rules if not isinstance(unscoped(rule), Fill | Cast)]
    why = "it computes with values"
    problems: list[Problem] = [
        Problem(
            ProblemKind.BAD_RULE,
            name,
            found=repr(rule),
            why=f"{why}: moves=True says that it only moves elements" if isinstance(inner, Apply) else why,
        )
        for rule in kept
        if not getattr(inner := unscoped(rule), "moves", True)
        for name in state
        if rule.rename(name) is not None
    ]

    def apply(entries: Entries) -> Entries:
        # A rule that matches nothing is no problem here: an optimizer need not have state for every parameter.
        applied = apply_rules(kept, entries, in_memory)
        problems.extend(applied.problems)
        return applied.entries

    moved: dict[tuple[str, Path], torch.Tensor] = {}
    sources: dict[str, tuple[str, ...]] = {}
    elementwise: dict[Path, dict[str, Entry]] = {}
    shapes: dict[str, set[tuple[int, ...]]] = {name: set() for name in state}
    for name, values in state.items():
        for path, leaf in leaf_paths(dict(values)):
            if _is_elementwise(leaf):
                elementwise.setdefault(path, {})[name] = Entry(leaf.detach(), (name,))
                shapes[name].add(tuple(leaf.shape))
    # An optimizer with several shapes for a parameter keeps sums over rows or columns, or products of them: only names
    # can be changed. All parameters count, since a factor has the shape of its parameter where that is square.
    several = {name: sorted(of_param) for name, of_param in shapes.items() if len(of_param) > 1}
    for path, entries in elementwise.items():
        for name, entry in apply(entries).items():
            if several and not all(map(_is_of_names, entry.rules)):
                source = next((source for source in entry.sources if source in several), next(iter(several)))
                why = f"the optimizer has several shapes for {source}: {several[source]}"
                problems.append(Problem(ProblemKind.BAD_RULE, name, found=entry.rules[-1], why=why))
            if entry.tensor is not None:
                moved[name, path] = values_of(entry.tensor, in_memory)
            sources[name] = entry.sources
    bare = {name: Entry(Value(None), (name,)) for name, of_param in shapes.items() if not of_param}
    for name, entry in apply(bare).items():
        sources[name] = entry.sources
    result: dict[str, dict[str, object]] = {}
    for name, origins in sources.items():
        first, *others = [_without_elements(state[source]) for source in origins]
        differs = [
            key for other in others for key in {**first, **other} if not same_value(first.get(key), other.get(key))
        ]
        if differs:
            why = f"it differs between {', '.join(origins)}"
            problems.append(Problem(ProblemKind.BAD_RULE, name, found=str(differs[0]), why=why))
        result[name] = map_leaves(first, lambda path, leaf: moved.get((name, path)) if leaf is _ELEMENTS else leaf)  # noqa: B023
    if problems:
        raise rule_error("the rules cannot be applied to the optimizer; nothing has been changed", problems)
    return result, sources


def changed_values(rules: Iterable[Rule], names: Iterable[str]) -> list[str]:
    """Returns a line for each name whose tensor a rule changes, beside its name. A `Cast` is left to the optimizer.

    State that is not by parameter cannot follow such a rule.
    """
    lines = []
    for name in names:
        current = name
        for rule in rules:
            renamed = new_name(rule, current)
            if renamed is not None:
                inner = unscoped(rule)
                if hasattr(inner, "apply") and not isinstance(inner, Fill | Cast) and not _is_of_names(repr(rule)):
                    lines.append(f"{name}: {rule!r} changes the parameter, and not only its name")
                current = renamed
    return lines


Path = tuple[object, ...]
"""The keys and positions that lead to a value in the state of a parameter: ("exp_avg",), ("factors", "L")."""
_ELEMENTS = "the elements"
"""Takes the place of an elementwise tensor."""


def _without_elements(values: Mapping[str, object]) -> dict[str, object]:
    """Returns a copy of the state of a parameter with `_ELEMENTS` in the place of elementwise tensors."""

    def copied(_: Path, leaf: object) -> object:
        return _ELEMENTS if _is_elementwise(leaf) else leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    without: dict[str, object] = map_leaves(dict(values), copied)
    return without


def _is_elementwise(value: object) -> TypeGuard[torch.Tensor]:
    """Whether this has values for the elements of a parameter, and not one value for the whole parameter."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _is_of_names(rule: str) -> bool:
    """Whether the text of a rule is that of one that changes names only."""
    return rule.startswith(_NAMES_ONLY)


_NAMES_ONLY = ("Rename(", "Prefix(", "Reached(", "Rewrapped(")
