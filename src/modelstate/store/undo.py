"""What objects other than modules were, so that a restore that fails can be undone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch

from modelstate.plan.journal import Journal
from modelstate.read.equality import same_value
from modelstate.store.loaders import load_state, own_generator, state_of
from modelstate.store.objects import GENERATOR, OPTIMIZER, STATEFUL, Target, code_of

Undo = Callable[[], None]


def take_down(targets: list[tuple[str, Target]], journal: Journal) -> None:
    """Has the journal undo what becomes of the targets, which are in the order in which they are restored.

    Raises `ObjectStateError` for an object whose state cannot be copied.
    """
    random = torch.get_rng_state()
    journal.undo(lambda: torch.set_rng_state(random))
    with torch.random.fork_rng(devices=[]):  # an object may draw a seed when it is asked for its state
        # Generators come first, before anybody draws from them, and so are undone last.
        for path, target in reversed(targets):
            if target.kind in _UNDO:
                journal.undo(_UNDO[target.kind](path, target.it))
    journal.protect(tensor for _, target in targets if target.kind == OPTIMIZER for tensor in _tensors(target.it))


def _of_optimizer(_: str, optimizer: torch.optim.Optimizer) -> Undo:
    """Loading replaces what is in these, and leaves the old tensors alone."""
    state: dict[Any, Any] = optimizer.state
    kept = [(param, values, dict(values) if isinstance(values, dict) else None) for param, values in state.items()]
    groups = [(group, dict(group)) for group in optimizer.param_groups]

    def undo() -> None:
        state.clear()
        for param, values, items in kept:
            if items is not None:
                values.clear()
                values.update(items)
            state[param] = values
        for group, options in groups:
            group.clear()
            group.update(options)

    return undo


def _of_stateful(path: str, it: Any) -> Undo:
    generator = own_generator(it)
    random = None if generator is None else generator.get_state()
    with code_of(path, "its state cannot be copied, so that a restore could not be undone; nothing has been changed"):
        kept = deepcopy(state_of(it))
    attributes = getattr(it, "__dict__", None)
    bindings = dict(attributes) if isinstance(attributes, dict) else None

    def undo() -> None:
        if isinstance(attributes, dict) and bindings is not None:
            attributes.clear()
            attributes.update(bindings)
        if generator is not None and random is not None:
            generator.set_state(random)
        with suppress(Exception):
            if same_value(state_of(it), kept):
                return  # nothing has happened to it, or it was done with its attributes
        with code_of(path, "its load_state_dict does not take what its own state_dict gave before"):
            load_state(it, kept)

    return undo


def _of_generator(_: str, generator: torch.Generator) -> Undo:
    kept = generator.get_state()

    def undo() -> None:
        generator.set_state(kept)

    return undo


_UNDO: Mapping[str, Callable[[str, Any], Undo]] = {
    OPTIMIZER: _of_optimizer,
    STATEFUL: _of_stateful,
    GENERATOR: _of_generator,
}


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    waiting: list[Any] = [*optimizer.state.values()]
    waiting += [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    while waiting:
        found = waiting.pop()
        if isinstance(found, torch.Tensor):
            yield found
        elif isinstance(found, dict):
            waiting.extend(found.values())
        elif isinstance(found, list | tuple):
            waiting.extend(found)
