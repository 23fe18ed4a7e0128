"""Rules and the state of an optimizer, which has something for each element of a parameter."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from modelstate.errors import RuleError
from modelstate.problems import BadRule, Problem, explain
from modelstate.rules.expression import values_of
from modelstate.rules.rule import Entries, Entry, Rule, Value, unscoped
from modelstate.rules.schema import apply_rules, in_memory
from modelstate.rules.tensors import Apply, Cast
from modelstate.rules.values import Fill

State = Mapping[str, Mapping[str, Any]]
"""From the name of a parameter to what the optimizer has for it: "exp_avg", "step", ..."""


def apply_to_optimizer(
    rules: Iterable[Rule], state: State
) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[str, ...]]]:
    """What rules for the parameters make of an optimizer's state by their names, and of which names each is made.

    What has a value for each element of its parameter (moments, sums) is cut, joined and moved as the parameter is;
    what is one for all elements (`step`) must be equal in parameters that are joined. A rule that computes with values
    is refused, for what it does to a parameter says nothing of its moments: all `Apply` without `moves=True`. A new
    parameter has no state, and a `Cast` is left to the optimizer. Raises `RuleError` with all that is wrong.
    """
    kept = [rule for rule in rules if not isinstance(unscoped(rule), Fill | Cast)]
    problems: list[Problem] = [
        BadRule(name, repr(rule), "it computes with values: moves=True says that it only moves elements")
        for rule in kept
        if isinstance(it := unscoped(rule), Apply) and not it.moves
        for name in state
        if rule.rename(name) is not None
    ]
    made: dict[str, dict[str, Any]] = {}
    sources: dict[str, tuple[str, ...]] = {}
    for key, entries in _for_each(state).items():
        for name, entry in _apply(kept, entries, problems).items():
            problems += _shape_problems(state, name, entry)
            if entry.tensor is not None:
                made.setdefault(name, {})[key] = values_of(entry.tensor, in_memory)
            sources[name] = entry.sources
    bare = [name for name, values in state.items() if not any(map(_is_for_each, values.values()))]
    for name, entry in _apply(kept, {name: Entry(Value(None), (name,)) for name in bare}, problems).items():
        sources[name] = entry.sources
    for name, origin in sources.items():
        problems += _carry_for_all(state, name, origin, made.setdefault(name, {}))
    if problems:
        raise RuleError(f"the rules cannot be applied to the optimizer; nothing has been changed\n{explain(problems)}")
    return made, sources


def _for_each(state: State) -> dict[str, Entries]:
    """What has a value for each element, by its key and the name of the parameter."""
    found: dict[str, Entries] = {}
    for name, values in state.items():
        for key, value in values.items():
            if _is_for_each(value):
                found.setdefault(key, {})[name] = Entry(value.detach(), (name,))
    return found


def _apply(rules: Iterable[Rule], entries: Entries, problems: list[Problem]) -> Entries:
    """Rules that match nothing are no problem here: an optimizer need not have state for every parameter."""
    applied = apply_rules(rules, entries, in_memory)
    problems += applied.problems
    return applied.entries


def _is_for_each(value: object) -> bool:
    """Whether this is a value for each element, and not one for all."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _shape_problems(state: State, name: str, entry: Entry) -> list[Problem]:
    """An optimizer that keeps sums over rows or columns is moved by names only."""
    if all(rule.startswith(_NAMES_ONLY) for rule in entry.rules):
        return []
    shapes = {tuple(value.shape) for one in entry.sources for value in state[one].values() if _is_for_each(value)}
    dims = {len(shape) for shape in shapes}
    whole = tuple(max(sizes) for sizes in zip(*shapes, strict=True)) if len(dims) == 1 else ()
    if len(dims) > 1 or any(1 in shape and shape != whole for shape in shapes):
        return [BadRule(name, entry.rules[-1], f"the optimizer has several shapes for it: {sorted(shapes)}")]
    return []


_NAMES_ONLY = ("Rename(", "Prefix(", "Reached(", "Rewrapped(")


def _carry_for_all(state: State, name: str, sources: tuple[str, ...], made: dict[str, Any]) -> list[Problem]:
    for key in dict.fromkeys(
        key for source in sources for key in state[source] if not _is_for_each(state[source][key])
    ):
        values = [state[source].get(key) for source in sources]
        if not all(_equal(value, values[0]) for value in values):
            return [BadRule(name, key, f"it differs between {', '.join(sources)}")]
        made[key] = values[0].clone() if isinstance(values[0], torch.Tensor) else values[0]
    return []


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
