"""Saves and restores an optimizer whose class has a `state_dict` in a layout of its own: whole, by its own methods.

Such an optimizer wraps another one, as Lookahead does, or keeps attributes beside the state of the parameters. Its
state is in the order of the parameters. The names of the parameters are saved beside it, so that a model with other
parameters, or with another order, is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from modelstate.errors import OptimizerStateError
from modelstate.formats.tree import deep_copy, leaf_paths, same_value
from modelstate.objects.optimizer_values import (
    CLASS,
    Recorded,
    group_options,
    in_memory_orders,
    memory_orders,
)
from modelstate.objects.parts import class_name, is_same_class
from modelstate.rules.optimizer import changed_values
from modelstate.rules.rule import Rule
from modelstate.rules.schema import renaming
from modelstate.torch_compat.values import is_uninitialised
from modelstate.transaction.transaction import Transaction

DTYPES = "dtypes"
"""The key of the dtypes of the parameters in a saved state."""
ORDERS = "memory_orders"
"""The key of the result of `modelstate.objects.optimizer_values.memory_orders` in a saved state."""
_NAMES, _STATE, _NOTE = "param_names", "state_dict", "note"
_KEYS = {_NOTE, CLASS, _NAMES, DTYPES, ORDERS, _STATE}
_Optimizer = torch.optim.Optimizer


def is_whole(state: object) -> bool:
    """Whether a saved state is a result of `whole_state`."""
    return isinstance(state, Mapping) and state.keys() == _KEYS


def is_saved_whole(optimizer: _Optimizer) -> bool:
    """Whether the class of an optimizer returns another state than the one that is kept for each parameter.

    Raises:
        OptimizerStateError: It does, and has no `load_state_dict` that takes it.
    """
    if type(optimizer).state_dict is _Optimizer.state_dict:
        return False
    own = optimizer.state_dict()
    params = {param: index for index, param in enumerate(_params(optimizer))}
    live = {params.get(key, key): values for key, values in optimizer.state.items()}
    if isinstance(own, Mapping) and own.keys() == {"state", "param_groups"}:
        groups = [group_options(group) for group in own["param_groups"]]
        if same_value(own["state"], live) and same_value(groups, [*map(group_options, optimizer.param_groups)]):
            return False
    if type(optimizer).load_state_dict is _Optimizer.load_state_dict:
        raise OptimizerStateError(
            "the class of the optimizer has a state_dict in a layout of its own, and no load_state_dict for it",
            where=type(optimizer).__qualname__,
            remedy="define load_state_dict in the class",
        )
    return True


def whole_state(optimizer: _Optimizer, names: Mapping[torch.Tensor, Sequence[str]]) -> dict[str, object]:
    """Returns the optimizer's own state with the names and dtypes of its parameters.

    Args:
        optimizer: The optimizer.
        names: All names of each parameter; the first one is saved.
    """
    state = optimizer.state_dict()
    return {
        _NOTE: _note(optimizer),
        CLASS: class_name(type(optimizer)),
        _NAMES: [[names[param][0] for param in group["params"]] for group in optimizer.param_groups],
        DTYPES: {names[param][0]: str(param.dtype) for param in _params(optimizer)},
        ORDERS: memory_orders(state),
        _STATE: state,
    }


def _note(optimizer: _Optimizer) -> str:
    return f"not by name: what {type(optimizer).__name__}.state_dict returns, by positions of parameters"


class WholePlan(msgspec.Struct, frozen=True, eq=False):
    """The plan of restoring an optimizer whole. Made by `plan_whole`."""

    optimizer: _Optimizer
    state: Mapping[str, Any]
    """The result of `whole_state`."""
    keeps: Callable[[str], bool]
    """Whether the optimizer keeps its own value of the option of a name."""
    problems: list[str]
    """A line of text for each thing that does not fit."""
    remedies: list[str]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        return _note(self.optimizer)

    def load(self, transaction: Transaction) -> list[Recorded]:
        """Loads the state by the optimizer's own `load_state_dict`, and compares what the optimizer has then.

        Torch's own `load_state_dict` casts tensors to the dtypes of the parameters. They get their saved dtypes again,
        unless the parameters have other dtypes than the saved ones.

        Raises:
            OptimizerStateError: The optimizer does not have the state afterwards.
        """
        optimizer, state = self.optimizer, self.state
        kept = [
            (each, [{key: group[key] for key in group if self.keeps(str(key))} for group in each.param_groups])
            for each in _optimizers_within(optimizer)
        ]
        saved = in_memory_orders(state[_STATE], state[ORDERS])
        with transaction.model_code():
            optimizer.load_state_dict(deep_copy(saved))
            live = dict(leaf_paths(optimizer.state_dict()))
        if [*state[DTYPES].values()] == [str(param.dtype) for param in _params(optimizer)]:
            for path, value in leaf_paths(saved):
                own = live.get(path)
                if (
                    isinstance(own, torch.Tensor)
                    and isinstance(value, torch.Tensor)
                    and own.shape == value.shape
                    and own.dtype != value.dtype
                ):
                    transaction.save_metadata(own)
                    own.data = value.detach().to(own.device, copy=True)
                if not same_value(own, value):
                    raise OptimizerStateError(
                        "the optimizer's load_state_dict does not give it the state that its state_dict returned; "
                        "nothing has been changed",
                        where=type(optimizer).__name__,
                        found=f"another value of {'.'.join(map(str, path))}",
                        remedy="mend load_state_dict in the class of the optimizer",
                    )
        for each, of_groups in kept:
            for group, options in zip(each.param_groups, of_groups, strict=False):
                group.update(group_options(options))
        return []


def plan_whole(
    optimizer: _Optimizer,
    names: Mapping[torch.Tensor, Sequence[str]],
    state: Mapping[str, Any],
    rules: Sequence[Rule],
    keeps: Callable[[str], bool],
    start_anew: str,
) -> WholePlan:
    """Compares the class and the parameters of a saved state with those of the optimizer, and changes nothing.

    Args:
        optimizer: The optimizer.
        names: All names of each of its parameters.
        state: The result of `whole_state`.
        rules: The rules of the names.
        keeps: Whether the optimizer keeps its own value of the option of this name.
        start_anew: How to begin without the saved state, for errors.
    """
    problems = changed_values(rules, (name for of_group in state[_NAMES] for name in of_group))
    if not is_same_class(state[CLASS], type(optimizer)):
        problems.insert(0, f"the state is of {state[CLASS]}, the optimizer is {class_name(type(optimizer))}")
    renamed = renaming(rules)
    groups = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
    saved = [[renamed(name) for name in of_group] for of_group in state[_NAMES]]
    if [*map(len, saved)] != [*map(len, groups)]:
        problems.append(f"groups of {[*map(len, saved)]} parameters, the optimizer has {[*map(len, groups)]}")
    else:
        problems += [
            f"{name}: the optimizer has {own[0]} in its place"
            for group, of_group in zip(groups, saved, strict=True)
            for own, name in zip(group, of_group, strict=True)
            if name not in own
        ]
    remedies = [
        "build the optimizer that was saved: the same class over the same parameters in the same order",
        f"to begin without its state: {start_anew}",
    ]
    return WholePlan(optimizer, state, keeps, problems, remedies)


def _optimizers_within(optimizer: _Optimizer) -> list[_Optimizer]:
    """Returns the optimizer and those that it holds in its attributes, at any depth."""
    optimizers: list[_Optimizer] = [optimizer]
    for each in optimizers:
        leaves = [leaf for _, leaf in leaf_paths(dict(vars(each))) if isinstance(leaf, _Optimizer)]
        optimizers += [leaf for leaf in leaves if all(leaf is not other for other in optimizers)]
    return optimizers


def hidden_attributes(optimizer: _Optimizer) -> list[str]:
    """Returns the attributes with state that torch's own `state_dict` of the optimizer leaves out.

    That is another optimizer, whose state is not this one's, or containers with a tensor for each parameter.
    """
    if type(optimizer).state_dict is not _Optimizer.state_dict:
        return []
    params = _params(optimizer)
    shapes = Counter(param.shape for param in params if not is_uninitialised(param))
    hidden = []
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults") or not isinstance(value, _Optimizer | dict | list | tuple):
            continue
        leaves = [leaf for _, leaf in leaf_paths(value)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf not in params]
        in_attribute = Counter(tensor.shape for tensor in tensors if not is_uninitialised(tensor))
        has_optimizer = any(isinstance(leaf, _Optimizer) and leaf.state is not optimizer.state for leaf in leaves)
        if has_optimizer or (shapes and shapes <= in_attribute):
            hidden.append(name)
    return hidden


def _params(optimizer: _Optimizer) -> dict[torch.Tensor, None]:
    return {param: None for group in optimizer.param_groups for param in group["params"]}
