"""Applies rules for parameters to the state of an optimizer, which has values for each element of a parameter."""

from collections.abc import Iterable, Mapping

import torch

from modelstate.errors import RuleError
from modelstate.problems import BadRule, Problem, explain
from modelstate.rules.expression import values_of
from modelstate.rules.names import Fill
from modelstate.rules.rule import Entries, Entry, Rule, Value, unscoped
from modelstate.rules.schema import apply_rules, in_memory
from modelstate.rules.tensors import Apply, Cast

State = Mapping[str, Mapping[str, object]]
"""From the name of a parameter to what the optimizer keeps for it: "exp_avg", "step", ..."""


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
    problems: list[Problem] = [
        BadRule(
            name,
            repr(rule),
            "it computes with values" + isinstance(inner, Apply) * ": moves=True says that it only moves elements",
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

    result: dict[str, dict[str, object]] = {}
    sources: dict[str, tuple[str, ...]] = {}
    for key, entries in _elementwise_entries(state).items():
        for name, entry in apply(entries).items():
            problems += _shape_problems(state, name, entry)
            if entry.tensor is not None:
                result.setdefault(name, {})[key] = values_of(entry.tensor, in_memory)
            sources[name] = entry.sources
    bare = [name for name, values in state.items() if not any(map(_is_elementwise, values.values()))]
    for name, entry in apply({name: Entry(Value(None), (name,)) for name in bare}).items():
        sources[name] = entry.sources
    for name, origins in sources.items():
        problems += _carry_over_scalars(state, name, origins, result.setdefault(name, {}))
    if problems:
        raise RuleError(f"the rules cannot be applied to the optimizer; nothing has been changed\n{explain(problems)}")
    return result, sources


def _elementwise_entries(state: State) -> dict[str, dict[str, Entry]]:
    """Returns the elementwise tensors as entries, by key and by the name of the parameter."""
    entries: dict[str, dict[str, Entry]] = {}
    for name, values in state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and _is_elementwise(value):
                entries.setdefault(key, {})[name] = Entry(value.detach(), (name,))
    return entries


def _is_elementwise(value: object) -> bool:
    """Whether this has values for the elements of a parameter, and not one value for the whole parameter."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _shape_problems(state: State, name: str, entry: Entry) -> list[Problem]:
    """Refuses rules that change tensors for an optimizer that keeps sums over rows or columns of a parameter."""
    if all(rule.startswith(_NAMES_ONLY) for rule in entry.rules):
        return []
    shapes = {
        tuple(value.shape)
        for source in entry.sources
        for value in state[source].values()
        if isinstance(value, torch.Tensor) and _is_elementwise(value)
    }
    dims = {len(shape) for shape in shapes}
    whole = tuple(max(sizes) for sizes in zip(*shapes, strict=True)) if len(dims) == 1 else ()
    if len(dims) > 1 or any(1 in shape and shape != whole for shape in shapes):
        return [BadRule(name, entry.rules[-1], f"the optimizer has several shapes for it: {sorted(shapes)}")]
    return []


_NAMES_ONLY = ("Rename(", "Prefix(", "Reached(", "Rewrapped(")


def _carry_over_scalars(state: State, name: str, sources: tuple[str, ...], result: dict[str, object]) -> list[Problem]:
    """Copies the values for whole parameters, which must be equal in all sources."""
    keys = (key for source in sources for key in state[source] if not _is_elementwise(state[source][key]))
    for key in dict.fromkeys(keys):
        first, *others = [state[source].get(key) for source in sources]
        for other in others:
            if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
                is_equal = first.dtype == other.dtype and torch.equal(first, other)
            else:
                is_equal = type(first) is type(other) and bool(first == other)
            if not is_equal:
                return [BadRule(name, key, f"it differs between {', '.join(sources)}")]
        result[key] = first.clone() if isinstance(first, torch.Tensor) else first
    return []
