"""The values in the state of an optimizer: which of them can be restored, and copies of them for live parameters."""

import inspect
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn

from modelstate.codec.codec import encode
from modelstate.errors import keep_interrupt
from modelstate.formats.tree import deep_copy, map_leaves, same_value
from modelstate.objects.optimizer_class import Group
from modelstate.planning.sharded import ShardedSlot, sharded_slot
from modelstate.rules.expression import Read, values_of
from modelstate.torch_compat.plain import is_sharded
from modelstate.torch_compat.sharding import dtensor_like, local_tensor
from modelstate.transaction.optimizers import follows_dtype

Values = Mapping[str, object]
"""The state of one parameter, such as "exp_avg" and "step"; values can be nested in containers."""
Path = tuple[object, ...]
"""The keys and positions that lead to a value in it."""


def same_state(first: Values, second: Values) -> bool:
    """Whether two names of a tied parameter have the same state, on this rank."""

    def local(value: object) -> object:
        return local_tensor(value) if isinstance(value, torch.Tensor) and is_sharded(value) else value

    is_same = first.keys() == second.keys()
    return first is second or (is_same and all(same_value(local(first[key]), local(second[key])) for key in first))


def is_torchs(cls: type) -> bool:
    return cls.__module__.startswith("torch.optim")


class StateLayout:
    """The state that an optimizer keeps, or would keep, for each of its parameters."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, matched: Iterable[tuple[dict[str, object], dict[str, object]]]
    ) -> None:
        self.group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
        self.is_of_torch = is_torchs(type(optimizer))
        self._optimizer = optimizer
        self._new_options = {id(group): options for group, options in matched}
        """The options that each group is going to have, by the id of the group."""
        self._trials: dict[tuple[int, int], Values | None] = {}
        self._steps: dict[tuple[object, ...], bool] = {}

    def values_of(self, param: torch.Tensor) -> Values | None:
        """Returns what the state of a parameter would be with the new options, else what it is; None for unknown."""
        if isinstance(self._optimizer, torch.optim.LBFGS):
            return None  # its names depend on the steps that were taken: `al` is added by the second direction
        group = self.group_of[param]
        key = id(group), param.dim()
        if key not in self._trials:
            self._trials[key] = _trial_state(self._optimizer, self.options_of(param), param.dim())
        trial = self._trials[key]
        return (self._optimizer.state.get(param) or None) if trial is None else trial

    def steps_with(self, values: Values, param: torch.Tensor) -> bool:
        """Whether an optimizer of torch's takes a step with tensors in the dtypes of the values; true for others."""
        dtypes = {key: value.dtype for key, value in values.items() if isinstance(value, torch.Tensor) and value.dim()}
        group = self.group_of[param]
        key = id(group), param.dim(), param.dtype, *sorted((name, str(dtype)) for name, dtype in dtypes.items())
        if key not in self._steps:
            trial = _trial(self._optimizer, self.options_of(param), param.dim(), param.dtype)
            self._steps[key] = trial is None or _steps_with(*trial, dtypes)
        return self._steps[key]

    def options_of(self, param: torch.Tensor) -> dict[str, object]:
        """Returns the options that the group of a parameter is going to have."""
        group = self.group_of[param]
        return {**group, **self._new_options.get(id(group), {})}


def _trial_state(optimizer: torch.optim.Optimizer, options: Mapping[str, object], dims: int) -> Values | None:
    """Returns the state of a small parameter after a step of an optimizer of torch's; None where it cannot step."""
    trial = _trial(optimizer, options, dims, torch.float32)
    return None if trial is None else dict(trial[0].state.get(trial[1], {}))


def _trial(
    optimizer: torch.optim.Optimizer, options: Mapping[str, object], dims: int, dtype: torch.dtype
) -> tuple[torch.optim.Optimizer, nn.Parameter] | None:
    """Returns an optimizer of the same class of torch's, after a step, and its parameter; None where it cannot step."""
    build: Any = type(optimizer)
    if not is_torchs(build):
        return None
    arguments = {key: options[key] for key in inspect.signature(build).parameters if key in options and key != "params"}
    if "capturable" in arguments:
        arguments["capturable"] = False  # the trial runs on the CPU
    try:
        param = nn.Parameter(torch.zeros([2] * dims, dtype=dtype, device="cpu"))
        param.grad = torch.ones_like(param)
        trial: torch.optim.Optimizer = build([param], **arguments)
        trial.step()
    except Exception as error:  # it needs a closure, sparse gradients, another device or dtype
        keep_interrupt(error)
        return None
    return trial, param


def _steps_with(trial: torch.optim.Optimizer, param: nn.Parameter, dtypes: Mapping[str, torch.dtype]) -> bool:
    state = trial.state[param]
    state.update(
        {key: state[key].to(dtype) for key, dtype in dtypes.items() if isinstance(state.get(key), torch.Tensor)}
    )
    try:
        trial.step()
    except RuntimeError:  # its operations do not take several dtypes
        return False
    return True


def value_problems(
    name: str,
    values: Values,
    param: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    expected: Values | None,
    may_add: bool,
) -> list[str]:
    """Returns a line for each saved value of a parameter that does not fit; `expected` is the state that it keeps.

    With `may_add`, the state is of the same class, and may have more than that.
    """
    known = {} if expected is None else expected
    unknown = [] if expected is None or may_add else [str(key) for key in values if key not in expected]
    problems = [f"{name}: the optimizer does not keep the saved {', '.join(unknown)}"] if unknown else []
    problems += [f"{name}: {key} is lacking" for key in known if key not in values]
    for key, value in values.items():
        reasons = _unfit(key, value, param, optimizer)
        if not reasons and key in known and (unlike := _unlike(value, known[key])):
            reasons = [f"{key} {unlike}"]
        problems += [f"{name}: {reason}" for reason in reasons[:1]]
    return problems


def _unfit(key: str, value: object, param: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns a line for each tensor or other value, in nested containers, that cannot be state of a parameter."""
    reasons: list[str] = []

    def check(path: Path, leaf: object) -> None:
        why = why_not_restored(leaf) or (
            _unfit_for_param(leaf, param, optimizer, is_nested=len(path) > 1) if isinstance(leaf, torch.Tensor) else ""
        )
        if why:
            reasons.append(f"{place(path)} {why}")

    map_leaves(value, check, (key,))
    return reasons


def place(path: Path) -> str:
    """Returns the path of a value as text."""
    return ".".join(map(str, path))


def why_not_restored(leaf: object) -> str:
    """Returns why a value in nested containers of an optimizer's state cannot be restored; empty where it can.

    Strided tensors can, and values that are encoded without a tensor. Of other objects that hold tensors, such as
    arrays and generators, a restore would make other objects than the ones that the optimizer uses.
    """
    if isinstance(leaf, torch.Tensor):
        return "" if leaf.layout is torch.strided else f"has no values that could be copied: {leaf.layout}"
    if leaf is None or type(leaf) in (bool, int, float, complex, str):
        return ""
    try:
        encode(leaf, leaf=_refuse_tensor)
    except Exception:  # `encode` may also run the code of a user's class
        return (
            f"is {type(leaf).__name__}, which is not restored into an optimizer: only tensors and plain values are, in "
            "dicts, lists, tuples and deques"
        )
    return ""


def memory_order(tensor: torch.Tensor, param: torch.Tensor | None = None) -> list[int] | None:
    """Returns the order of the dims of a tensor in memory, where it is not the usual one nor that of its parameter.

    Files have no strides, and a product with a transposed matrix is rounded otherwise than one with a copy of it.
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    if param is not None and (tensor.shape, tensor.stride()) == (param.shape, param.stride()):
        return None
    strides = tensor.stride()
    dims = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return dims if tensor.permute(dims).is_contiguous() else None


def memory_orders(tree: object) -> list[list[object]]:
    """Returns `[path, dims]` for each tensor of nested containers that has a `memory_order`."""
    orders: list[list[object]] = []

    def note(path: Path, leaf: object) -> None:
        if isinstance(leaf, torch.Tensor) and (dims := memory_order(leaf)) is not None:
            orders.append([list(path), dims])

    map_leaves(tree, note)
    return orders


def in_memory_orders(tree: Any, orders: object) -> Any:
    """Returns a tree whose tensors lie in memory as they did, by the result of `memory_orders`."""
    dims_of = {tuple(path): dims for path, dims in orders} if isinstance(orders, list) else {}

    def order(path: Path, leaf: Any) -> Any:
        dims = dims_of.get(path)
        if dims is None or not isinstance(leaf, torch.Tensor) or sorted(dims) != list(range(leaf.dim())):
            return leaf
        return leaf.permute(dims).contiguous().permute([dims.index(dim) for dim in range(leaf.dim())])

    return map_leaves(tree, order) if dims_of else tree


def _refuse_tensor(_: torch.Tensor) -> str:
    raise TypeError("a tensor in a value that is copied as a whole")


def _unfit_for_param(
    value: torch.Tensor, param: torch.Tensor, optimizer: torch.optim.Optimizer, is_nested: bool
) -> str:
    """Returns why a tensor cannot be state of a parameter; empty where it can."""
    if is_sharded(value) or (is_sharded(param) and value.dim()):
        return _unfit_for_shard(value, param)
    if value.is_meta:
        return "has no values that could be copied: it is on meta"
    if not is_torchs(type(optimizer)):
        return ""  # a foreign optimizer may keep state of any shape and dtype
    if value.is_complex() and not param.is_complex():
        return "is complex, and the parameter is not"
    if not value.dim() or is_nested or isinstance(optimizer, torch.optim.LBFGS):
        return ""
    fits = value.shape == param.shape
    if isinstance(optimizer, torch.optim.Adafactor):  # one value for each element, or for each row or column
        fits = _is_reduced(value, param)
    return "" if fits else f"has the shape {list(value.shape)}, the parameter {list(param.shape)}"


def _unfit_for_shard(value: torch.Tensor, param: torch.Tensor) -> str:
    """Returns why a rank cannot take its part of a value for a DTensor; empty where it can."""
    if not is_sharded(param):
        return "is a DTensor, and the parameter is not"
    if value.shape != param.shape:
        text = f"has the shape {list(value.shape)}, the parameter {list(param.shape)}"
        if _is_reduced(value, param):
            text += ": one value for each row or column, which is not split over the ranks of a DTensor"
        return text
    slot = sharded_slot("", param, value, None)
    return "" if isinstance(slot, ShardedSlot) else f"cannot be split over the ranks: {slot.title}"


def _is_reduced(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether each size is that of the parameter, or 1 where a value stands for a whole row or column."""
    return value.dim() == param.dim() and all(a in (1, b) for a, b in zip(value.shape, param.shape, strict=True))


def _unlike(value: object, expected: object) -> str:
    """Returns how a value differs from what the optimizer keeps; a number and a tensor of one element are alike."""
    if value is None or expected is None or (is_number(value) and is_number(expected)):
        return ""
    if isinstance(value, torch.Tensor) != isinstance(expected, torch.Tensor):
        return f"is {type(value).__name__}, where the optimizer has {type(expected).__name__}"
    if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
        if value.dim() != expected.dim():
            return f"has {value.dim()} dimensions, where the optimizer has {expected.dim()}"
        if value.is_floating_point() != expected.is_floating_point():
            return f"is {value.dtype}, where the optimizer has {expected.dtype}"
    return ""


@torch.inference_mode(False)  # a tensor made in that mode could never be updated
def placed_state(
    by_param: Mapping[torch.Tensor, Values],
    dtypes: Mapping[torch.Tensor, str],
    layout: StateLayout,
) -> dict[torch.Tensor, dict[str, object]]:
    """Returns copies of the state of each parameter on the device, and in the dtype, that the optimizer needs.

    A tensor that several parameters share stays one tensor. Optimizers of torch share none: there it is a tensor that
    the state has been given for several parameters.

    Args:
        by_param: The saved state.
        dtypes: The dtypes that the parameters had when their state was saved, as far as they are known.
        layout: What the optimizer keeps.
    """
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    return {param: _placed(values, param, dtypes.get(param), layout, copies) for param, values in by_param.items()}


def _placed(
    values: Values,
    param: torch.Tensor,
    saved_dtype: str | None,
    layout: StateLayout,
    copies: dict[tuple[object, ...], torch.Tensor],
) -> dict[str, object]:
    options = layout.options_of(param)
    casts = saved_dtype is None and not layout.steps_with(values, param)
    step_on_device = bool(options.get("capturable") or options.get("fused"))

    def copied(path: Path, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return deepcopy(leaf)
        had_it = leaf.is_floating_point() if casts else str(leaf.dtype) == saved_dtype
        follows = had_it and follows_dtype(path, leaf, param, leaf.dtype)
        dtype = param.dtype if follows and param.is_complex() == leaf.is_complex() else leaf.dtype
        of_param = param if layout.is_of_torch else None
        key = _identity(leaf), dtype, param.device, path == ("step",), of_param
        if key not in copies:
            copies[key] = _copied(path, leaf, param, dtype, step_on_device)
        return copies[key]

    placed: dict[str, object] = map_leaves(dict(values), copied)
    step = placed.get("step")
    if isinstance((layout.values_of(param) or {}).get("step"), torch.Tensor) and isinstance(step, int | float):
        device = param.device if step_on_device else "cpu"
        placed["step"] = torch.tensor(float(step), device=device)  # torch keeps it as a tensor since 1.12
    return placed


def placed_options(options: Mapping[str, object], group: Group) -> dict[str, object]:
    """Returns copies of options for a group, or of state under other keys than parameters for that of an optimizer.

    A tensor gets the device of the one that it replaces; without one, that of the first parameter, since files have no
    devices.
    """
    placed: dict[str, object] = deep_copy(dict(options))
    for key, value in placed.items():
        live = next(iter(group.get("params", ())), None) if key not in group else group[key]
        if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
            placed[key] = value.to(live.device)
    return placed


def _identity(tensor: torch.Tensor) -> object:
    """Returns what is the same for two tensors that are one in memory."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and (address := tensor.data_ptr()):
        return address, tensor.device, tensor.shape, tensor.stride(), tensor.dtype
    return id(tensor)


def _copied(
    path: Path, value: torch.Tensor, param: torch.Tensor, dtype: torch.dtype, step_on_device: bool
) -> torch.Tensor:
    """Copies a tensor to the device of its parameter. `step` stays where the optimizer keeps it."""
    if path == ("step",):
        step = value.detach().clone()
        return step.to(torch.float32).to(param.device) if step_on_device else step
    if is_sharded(param) and value.dim():
        slot = sharded_slot("", param, value, None)
        assert isinstance(slot, ShardedSlot)
        source = slot.local(value).stored
        assert source is not None
        local = values_of(source, cast(Read, torch.Tensor.detach))
        return dtensor_like(param, local.to(local_tensor(param).device, dtype, copy=True).contiguous())
    plain = type(value) is torch.Tensor and type(param.detach()) is torch.Tensor
    if plain and value.shape == param.shape and value.is_contiguous() and value.stride() != param.stride():
        return torch.empty_like(param.detach(), dtype=dtype).copy_(value.detach())  # files have no strides
    return value.detach().to(param.device, dtype, copy=True)


def is_number(value: object) -> bool:
    """Whether a value is a number, or a tensor of one element."""
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
