"""The state of optimizers whose parameters change dtype or device, or get memory for the first time."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from modelstate.errors import OptionError, PlacementError
from modelstate.formats.tree import leaf_paths, map_leaves
from modelstate.torch_compat.modules import own_parameters
from modelstate.torch_compat.private import optimizers_were_made, use_count
from modelstate.transaction.references import objects_of

Place = tuple[torch.dtype, torch.device]
Placed = Mapping[torch.Tensor, Place]
"""Dtype and device of parameters."""
Path = tuple[object, ...]
"""The keys and positions that lead to a tensor in the state of a parameter."""
NewState = tuple[dict[str, object], str, object]
"""The state of one parameter, a name in it, and the new value."""


def check_optimizers(optimizers: Iterable[Any], model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the optimizers as a tuple. Raises `OptionError` unless each has a parameter of the model."""
    checked = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    for optimizer in checked:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptionError("not an optimizer", expected="torch.optim.Optimizer", found=type(optimizer).__name__)
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if params.isdisjoint(map(id, model.parameters())):
            raise OptionError("an optimizer of another model", where=type(optimizer).__name__)
    return checked


def placed(optimizers: Iterable[torch.optim.Optimizer]) -> Placed:
    """Returns dtype and device of each parameter of the optimizers."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {param: (param.dtype, param.device) for group in groups for param in group["params"]}


def other_optimizers(
    modules: Iterable[nn.Module], passed: Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that have state for parameters of the modules and were not passed.

    torch keeps no list of optimizers, so this searches all objects of the process, which takes some 50 ms. It does so
    only where a parameter has more references than those of the modules and of the optimizers that were passed.
    """
    modules = list(modules)
    if not optimizers_were_made() or not _referred_to_elsewhere(modules, passed):
        return []
    params = {id(param) for module in modules for param in own_parameters(module).values()}
    found = objects_of(lambda cls: issubclass(cls, torch.optim.Optimizer))
    others = [optimizer for optimizer in found if all(optimizer is not other for other in passed)]
    return [optimizer for optimizer in others if any(id(param) in params for param in optimizer.state)]


def _referred_to_elsewhere(modules: list[nn.Module], passed: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether something besides the modules and the optimizers refers to a parameter of the modules."""
    params = [param for module in modules for param in own_parameters(module).values() if param is not None]
    known = Counter(map(id, params))
    attributes = (value for module in modules for value in vars(module).values())
    # Recurrent modules have lists of their parameters.
    known.update(id(item) for value in attributes if isinstance(value, list | tuple) for item in value)
    for optimizer in passed:
        known.update(id(param) for group in optimizer.param_groups for param in group["params"])
        known.update(map(id, optimizer.state))
    once = {id(param): param for param in params}
    del params
    by_the_loop = max(sys.getrefcount(value) for value in {"": object()}.values())
    # An autograd graph has one reference to the object.
    return any(
        sys.getrefcount(param) > by_the_loop + known[id(param)] + (use_count(param) > 1) for param in once.values()
    )


def left_behind(
    optimizers: Iterable[torch.optim.Optimizer], finals: Mapping[torch.Tensor, torch.Tensor], before: Placed
) -> tuple[str, ...]:
    """Returns a line for each optimizer that was not passed and whose state no longer fits its parameters."""
    counts = {each: len({id(state) for state, *_ in _changes(each, finals, before)}) for each in optimizers}
    return tuple(
        f"the state of {type(optimizer).__name__} for {count} of these parameters, which was not passed"
        for optimizer, count in counts.items()
        if count
    )


def following_state(
    optimizers: Sequence[torch.optim.Optimizer],
    finals: Mapping[torch.Tensor, torch.Tensor],
    before: Placed,
    spend: Callable[[int], None] = lambda _: None,
) -> list[NewState]:
    """Returns the new state of optimizers for parameters that change, and changes nothing itself.

    State on the device of its parameter moves with it, and state in the dtype of its parameter (Adam's moments, the
    directions of LBFGS) gets the new dtype, at any depth of containers. Counters and other scalars keep their
    dtype; `step` moves only for an optimizer that is capturable or fused. State on meta is initialised by a new
    optimizer of the same class and options.

    Args:
        optimizers: The optimizers.
        finals: For each parameter that changes, a tensor of the new dtype and device.
        before: Dtype and device of the parameters before the change.
        spend: Called with the bytes of each new tensor before it is allocated.

    Raises:
        PlacementError: The state on meta cannot be initialised; or an optimizer keeps tensors under other keys than
            parameters that may have to follow.
    """
    found: list[NewState] = []
    new_tensors: dict[int, torch.Tensor] = {}
    """The new tensors by the ids of the old ones: a tensor that several parameters share stays one."""

    def converted(places: Mapping[Path, Place], path: Path, leaf: torch.Tensor) -> object:
        if path not in places:
            return leaf
        dtype, device = places[path]
        known = new_tensors.get(id(leaf))
        if known is None or (known.dtype, known.device) != (dtype, device):
            spend(leaf.numel() * dtype.itemsize)
            known = new_tensors[id(leaf)] = leaf.to(device, dtype)
        return known

    for optimizer in optimizers:
        _check_other_state(optimizer, finals, before)
        found += _initialised_state(optimizer, finals)
        for state, key, places in _changes(optimizer, finals, before):
            found.append((state, key, map_leaves(state[key], partial(converted, places), (key,))))
    return found


def _changes(
    optimizer: torch.optim.Optimizer, finals: Mapping[torch.Tensor, torch.Tensor], before: Placed
) -> Iterator[tuple[dict[str, object], str, dict[Path, Place]]]:
    """Yields the values in the states of parameters that have to follow: state, name, and the new places of tensors."""
    for group in optimizer.param_groups:
        step_follows = bool(group.get("capturable") or group.get("fused"))
        for param in group["params"]:
            state = optimizer.state.get(param, {}) if param in finals else {}
            for key, value in state.items():
                places = {
                    path: place
                    for path, leaf in leaf_paths({key: value})
                    if isinstance(leaf, torch.Tensor)
                    and (place := _followed(path, leaf, param, finals[param], before[param]))
                    != (leaf.dtype, leaf.device)
                }
                if places and (key != "step" or step_follows):
                    yield state, key, places


def _check_other_state(
    optimizer: torch.optim.Optimizer, finals: Mapping[torch.Tensor, torch.Tensor], before: Placed
) -> None:
    """Raises for floating-point tensors under other keys than parameters, in a dtype or on a device that changes."""
    params = {param for group in optimizer.param_groups for param in group["params"]}
    changed = [(before[param], (finals[param].dtype, finals[param].device)) for param in params & finals.keys()]
    dtypes = {old[0] for old, new in changed if old[0] != new[0]}
    devices = {old[1] for old, new in changed if old[1] != new[1]}
    others = {key: values for key, values in optimizer.state.items() if key not in params}
    tensors = [(path[0], leaf) for path, leaf in leaf_paths(others) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    keys = {
        str(key)
        for key, tensor in tensors
        if tensor.is_floating_point() and (tensor.dtype in dtypes or tensor.device in devices)
    }
    if keys:
        raise PlacementError(
            "the optimizer keeps tensors for several parameters together, which cannot follow the parameters; nothing "
            "has been changed",
            where=type(optimizer).__name__,
            found=f"state under {', '.join(sorted(keys))}",
            remedy="build the optimizer after the conversion",
        )


def _followed(path: Path, value: torch.Tensor, param: torch.Tensor, final: torch.Tensor, before: Place) -> Place:
    """Returns the new dtype and device of a tensor in the state of a parameter."""
    if value.is_meta or final.is_meta:
        return value.dtype, value.device
    casts = follows_dtype(path, value, param, before[0]) and final.is_complex() == value.is_complex()
    return final.dtype if casts else value.dtype, final.device if value.device == before[1] else value.device


def follows_dtype(path: Path, value: torch.Tensor, param: torch.Tensor, before: torch.dtype | None) -> bool:
    """Whether a tensor in the state of a parameter follows the dtype of the parameter, which was `before`.

    Args:
        path: The keys and positions that lead to the tensor.
        value: The tensor.
        param: The parameter.
        before: The dtype that the parameter had with this state; None where that is unknown.
    """
    is_scalar = path[-1] == "step" or (value.dim() == 0 and (param.dim() > 0 or path[-1] in _SCALARS))
    return value.dtype == before and (value.is_floating_point() or value.is_complex()) and not is_scalar


_SCALARS = ("eta", "mu", "mu_product")
"""State of torch's optimizers, beside `step`, that is one number in a dtype that does not depend on its parameter."""


def _initialised_state(optimizer: torch.optim.Optimizer, finals: Mapping[torch.Tensor, torch.Tensor]) -> list[NewState]:
    """Returns new values for the state that is on meta."""
    params = [
        param
        for param in finals
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in optimizer.state.get(param, {}).values())
    ]
    if not params:
        return []
    wanted = set(params)
    twins = {param: nn.Parameter(finals[param].detach(), requires_grad=param.requires_grad) for param in params}
    groups = [
        {**group, "params": [twins[param] for param in group["params"] if param in wanted]}
        for group in optimizer.param_groups
    ]
    build = type(optimizer)
    defaults = optimizer.defaults  # a constructor may make state by its arguments, and not by the options of a group
    try:
        arguments = {key: defaults[key] for key in inspect.signature(build).parameters if key in defaults}
        twin: torch.optim.Optimizer = build([group for group in groups if group["params"]], **arguments)
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
