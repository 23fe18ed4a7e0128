"""Optimizers whose parameters get another dtype or device, or memory for the first time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from modelstate.errors import OptionError, PlacementError

Placed = Mapping[torch.Tensor, tuple[torch.dtype, torch.device]]
"""Dtype and device of parameters."""
NewState = tuple[dict[str, Any], str, Any]
"""The state of one parameter, a name in it, and the new value."""


def check_optimizers(optimizers: Iterable[Any], model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers, if that is what they are, and of this model. Raises `OptionError`."""
    checked = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    for optimizer in checked:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptionError("not an optimizer", expected="torch.optim.Optimizer", found=type(optimizer).__name__)
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if params.isdisjoint(map(id, model.parameters())):
            raise OptionError("an optimizer of another model", where=type(optimizer).__name__)
    return checked


def placed(optimizers: Iterable[torch.optim.Optimizer]) -> Placed:
    """Where the parameters of optimizers are, and in which dtype."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {param: (param.dtype, param.device) for group in groups for param in group["params"]}


def following_state(
    optimizers: Sequence[torch.optim.Optimizer],
    finals: Mapping[torch.Tensor, torch.Tensor],
    before: Placed,
    spend: Callable[[int], None] = lambda _: None,
) -> list[NewState]:
    """What has to change in the optimizers' state when parameters, which were as `before` says, become `finals`.

    State on a parameter's device goes where it goes, and state of its dtype (Adam's moments, the directions of LBFGS)
    gets its new dtype, at any depth of lists and dicts. Counters and other scalars keep their dtype; `step` moves only
    where the optimizer is capturable or fused and wants it beside the parameter. State that was made on meta is made
    again, by a new optimizer of the same class and options. All new tensors are made here, so that nothing can fail
    when they are put in place; `spend` hears of the bytes of each before. Raises `PlacementError`.
    """
    found: list[NewState] = []
    for optimizer in optimizers:
        on_meta = [param for param in finals if _is_on_meta(optimizer.state.get(param, {}))]
        found += _made_again(optimizer, on_meta, finals)
        for group in optimizer.param_groups:
            beside = bool(group.get("capturable") or group.get("fused"))
            for param in group["params"]:
                if param in finals:
                    state = optimizer.state.get(param, {})
                    for key, old in state.items():
                        new = (
                            old
                            if key == "step" and not beside
                            else _following(key, old, param, finals[param], before[param], spend)
                        )
                        if new is not old:
                            found.append((state, key, new))
    return found


def _following(
    key: str,
    value: Any,
    param: torch.Tensor,
    final: torch.Tensor,
    before: tuple[torch.dtype, torch.device],
    spend: Callable[[int], None],
) -> Any:
    """What a value in a parameter's state becomes; the value itself where that is what it is already."""
    if isinstance(value, torch.Tensor):
        if value.is_meta or final.is_meta:
            return value
        scalar = key in _SCALARS or (value.dim() == 0 and param.dim() > 0)
        casts = value.dtype == before[0] and final.is_floating_point() and not scalar
        device, dtype = final.device if value.device == before[1] else value.device, final.dtype
        if not casts:
            dtype = value.dtype
        if (device, dtype) != (value.device, value.dtype):
            spend(value.numel() * dtype.itemsize)
        return value.to(device, dtype)
    if type(value) in (list, tuple):
        items = [_following(key, item, param, final, before, spend) for item in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if type(value) is dict:
        made = {name: _following(key, item, param, final, before, spend) for name, item in value.items()}
        return made if any(made[name] is not value[name] for name in value) else value
    return value


_SCALARS = ("step", "eta", "mu", "mu_product")
"""What torch's optimizers keep as one number for a parameter, in a dtype of its own."""


def _is_on_meta(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in state.values())


def _made_again(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], finals: Mapping[torch.Tensor, torch.Tensor]
) -> list[NewState]:
    if not params:
        return []
    wanted = set(params)
    twins = {param: nn.Parameter(finals[param].detach(), requires_grad=param.requires_grad) for param in params}
    groups = [
        {**group, "params": [twins[param] for param in group["params"] if param in wanted]}
        for group in optimizer.param_groups
    ]
    build: Any = type(optimizer)
    try:
        twin: torch.optim.Optimizer = build([group for group in groups if group["params"]])
    except Exception as error:
        raise PlacementError(
            "the optimizer's state was made on meta and cannot be made again; nothing has been changed",
            where=type(optimizer).__name__,
            found=error,
            remedy="build the optimizer after the load",
        ) from error
    return [
        (optimizer.state[param], key, twin.state[twins[param]][key])
        for param in params
        for key, old in optimizer.state[param].items()
        if isinstance(old, torch.Tensor) and old.is_meta and key in twin.state[twins[param]]
    ]
