"""The state of an optimizer by the names of its parameters, and back.

torch keeps it by the parameters' positions: after a parameter has been added or two have changed places, it goes to
the wrong ones, without a word where the shapes allow it. Names do not move.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from modelstate.errors import OptimizerStateError
from modelstate.place.arguments import check_model
from modelstate.place.optimizers import check_optimizers
from modelstate.plan.rules.chain import before_rules, check_rules
from modelstate.plan.rules.optimizer import apply_to_optimizer
from modelstate.plan.rules.rule import Rule
from modelstate.plan.shield import uninterrupted

_GROUPS = "param_groups"


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer by the names that the model has for its parameters.

    `{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [names], "lr": ...}]}`, as
    `torch.distributed.checkpoint` has it. The tensors are the live ones, as in `state_dict()`; a tied parameter is
    there once, under its first name. Raises `OptionError`, and `OptimizerStateError` for a parameter that is not the
    model's.
    """
    names = _names(model, optimizer)
    groups = [
        {**_options(group), "params": [names[param] for param in group["params"]]} for group in optimizer.param_groups
    ]
    state = {names[param]: dict(values) for param, values in optimizer.state.items() if param in names}
    return {"state": state, _GROUPS: groups}


def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    rules: Iterable[Rule] = (),
    allow_missing: bool = False,
) -> None:
    """Loads what `optimizer_state` gave, all or nothing, by the names of the parameters.

    `state` may also be a `state_dict()` of an optimizer that was given names (`torch.optim.Adam(model.
    named_parameters())`). `rules` are those by which the checkpoint was loaded into the model: what has a value for
    each element is cut, joined and moved with its parameter. Tensors take the dtype and device of their parameter;
    `step` stays where the optimizer keeps it. Options of a group (`lr`, ...) are taken over.

    Raises `OptimizerStateError` with everything that does not fit: names, shapes, groups; without `allow_missing`,
    also where a parameter is without state that the others have. Raises `RuleError` for the rules.
    """
    names = _names(model, optimizer)
    by_name, groups = _by_name(state)
    checked = check_rules(rules)
    sources: dict[str, tuple[str, ...]] = {name: (before_rules(checked, name),) for name in names.values()}
    if checked:
        by_name, made_of = apply_to_optimizer(checked, by_name)
        sources |= made_of
    params = {name: param for param, name in names.items()}
    wrong = [*_wrong_names(by_name, params, allow_missing), *_wrong_shapes(by_name, params, optimizer)]
    matched = _matched(groups, optimizer, {param: sources[name] for param, name in names.items()}, wrong)
    if wrong:
        more = f"\n    and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        raise OptimizerStateError(
            "the state does not fit the optimizer; nothing has been changed",
            where=type(optimizer).__name__,
            found="\n    ".join(wrong[:12]) + more,
            remedy="give the rules by which the model was loaded: rules=[...]",
        )
    made = {params[name]: _placed(values, params[name], optimizer) for name, values in by_name.items()}
    with uninterrupted():
        optimizer.state.clear()
        optimizer.state.update(made)
        for group, options in matched:
            group.update(options)


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    check_optimizers([optimizer], check_model(model))
    found: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = sum(param not in found for param in params)
    if foreign:
        raise OptimizerStateError(
            "the optimizer has parameters that the model has not, so they have no names",
            where=type(optimizer).__name__,
            found=f"{foreign} of {len(params)}",
            remedy="give the module that holds all of its parameters",
        )
    return {param: found[param] for param in params}


def _by_name(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """State and groups, by names in either case."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping) or not _are_groups(state):
        raise OptimizerStateError(
            "not the state of an optimizer",
            expected='a mapping with "state" and "param_groups", as modelstate.optimizer_state gives it',
            found=f"a mapping with {', '.join(map(repr, state))}"
            if isinstance(state, Mapping)
            else type(state).__name__,
        )
    groups = [dict(group) for group in state[_GROUPS]]
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return {str(name): dict(values) for name, values in state["state"].items()}, groups
    names: dict[int, str] = {}
    for group in groups:
        listed = group.pop("param_names", None)
        if listed is None or len(listed) != len(group["params"]):
            raise OptimizerStateError(
                "the state goes by the positions of the parameters, and nothing says their names",
                expected="names: from modelstate.optimizer_state, or of an optimizer made of named_parameters()",
                found="numbers",
                remedy="build model and optimizer as they were, load it with optimizer.load_state_dict, and take "
                "modelstate.optimizer_state(model, optimizer)",
            )
        names.update(zip(group["params"], listed, strict=True))
        group["params"] = list(listed)
    return {names[number]: dict(values) for number, values in state["state"].items() if number in names}, groups


def _are_groups(state: Mapping[str, Any]) -> bool:
    groups = state.get(_GROUPS)
    several = isinstance(groups, Sequence) and not isinstance(groups, str)
    return several and all(isinstance(g, Mapping) and isinstance(g.get("params"), Sequence) for g in groups or ())


def _wrong_names(state: Mapping[str, Any], params: Mapping[str, torch.Tensor], allow_missing: bool) -> list[str]:
    wrong = [f"{name}: the optimizer has no such parameter" for name in state if name not in params]
    if state and not allow_missing:
        wrong += [
            f"{name}: there is no state for it" for name in params if name not in state and params[name].requires_grad
        ]
    return wrong


def _wrong_shapes(
    state: Mapping[str, Any], params: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> list[str]:
    if isinstance(optimizer, torch.optim.LBFGS):
        return []  # has all parameters in one vector, under the first
    return [
        f"{name}: {key} has the shape {list(value.shape)}, the parameter {list(params[name].shape)}"
        for name, values in state.items()
        if name in params
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and value.dim() and not _fits(value.shape, params[name].shape)
    ]


def _fits(shape: torch.Size, param: torch.Size) -> bool:
    """Whether there is one value for each element, or for each row or column."""
    return len(shape) == len(param) and all(a in (1, b) for a, b in zip(shape, param, strict=True))


def _matched(
    groups: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    sources: Mapping[torch.Tensor, tuple[str, ...]],
    wrong: list[str],
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each group of the optimizer with the options that were saved for its parameters."""
    found = []
    for group in optimizer.param_groups:
        wanted = {source for param in group["params"] for source in sources[param]}
        fitting = [_options(saved) for saved in groups if wanted & set(saved["params"])]
        if any(one != fitting[0] for one in fitting):
            wrong.append(f"the group of {min(wanted)}: its parameters were in {len(fitting)} groups with other options")
        elif fitting:
            found.append((group, deepcopy(fitting[0])))
    return found


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _placed(values: Mapping[str, Any], param: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    group = next(group for group in optimizer.param_groups if any(one is param for one in group["params"]))
    beside = bool(group.get("capturable") or group.get("fused"))
    return {key: _copied(key, value, param, beside) for key, value in values.items()}


def _copied(key: str, value: Any, param: torch.Tensor, beside: bool) -> Any:
    """As torch's own loading has it: floats become what the parameter is, `step` stays unless it is wanted beside."""
    if isinstance(value, torch.Tensor):
        if key == "step":
            return value.clone().to(torch.float32).to(param.device) if beside else value.clone()
        cast = partial(value.to, copy=True)
        return cast(param.device, param.dtype) if param.is_floating_point() else cast(param.device)
    if isinstance(value, list | tuple):
        return type(value)(_copied(key, one, param, beside) for one in value)
    return deepcopy(value)
