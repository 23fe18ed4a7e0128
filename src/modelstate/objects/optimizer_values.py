"""The values in the state of an optimizer: which of them can be restored, and copies of them for live parameters.

An optimizer whose class has a `state_dict` in a layout of its own is saved and restored whole, by its own methods. Such
an optimizer wraps another one, as Lookahead does, or keeps attributes beside the state of the parameters. Its state is
in the order of the parameters. The names of the parameters are saved beside it, so that a model with other parameters,
or with another order, is refused.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import msgspec
import torch
from torch import nn

from modelstate.codec.codec import encode
from modelstate.errors import OptimizerStateError, OptionError, code_errors, keep_interrupt
from modelstate.formats.tree import deep_copy, leaf_paths, map_leaves, same_value
from modelstate.objects.parts import class_name, is_same_class, start_anew
from modelstate.planning.matching import Patterns
from modelstate.planning.transforms import ShardedSlot, sharded_slot
from modelstate.rules.expression import Read, values_of
from modelstate.rules.optimizer import changed_values
from modelstate.rules.rule import Rule
from modelstate.rules.schema import renaming
from modelstate.spec import is_uninitialised
from modelstate.torch_compat.plain import is_sharded
from modelstate.torch_compat.sharding import dtensor_like, local_tensor
from modelstate.transaction.optimizers import follows_dtype
from modelstate.transaction.transaction import Transaction

CLASS = "class"
"""The key of the class in a saved state."""
DTYPES = "dtypes"
"""The key of the dtypes of the parameters in a saved state."""
ORDERS = "memory_orders"
"""The key of the result of `memory_orders` in a saved state."""
_NAMES, _STATE, _NOTE = "param_names", "state_dict", "note"
_KEYS = {_NOTE, CLASS, _NAMES, DTYPES, ORDERS, _STATE}
_Optimizer = torch.optim.Optimizer
Group = Mapping[str, Any]
"""A parameter group: "params", and options by name."""
Values = Mapping[str, object]
"""The state of one parameter, such as "exp_avg" and "step"; values can be nested in containers."""
Path = tuple[object, ...]
"""The keys and positions that lead to a value in it."""
Copies = dict[tuple[object, ...], torch.Tensor]
"""Copies of tensors of saved state. For a parameter, a copy is found by the `identity` of the tensor, its dtype, the
parameter (None where it may be shared), its device, and whether it is a step; elsewhere by the first three."""
PlacedState = Callable[[Copies], dict[str, object]]
"""Returns a copy of the state of a parameter."""
_Live = dict[Any, Any]
"""The state of an optimizer or of one of its parameters, or a group."""
Replaced = tuple[_Live, _Live]
"""A copy of one of these from before a restore, and the dict that has other values now."""


def group_options(group: Group) -> dict[str, object]:
    """Returns the options of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, list[str]]:
    """Returns all names that the model has for each parameter of the optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError("not an optimizer", expected="torch.optim.Optimizer", found=type(optimizer).__name__)
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = sum(param not in names for param in params)
    if foreign:
        raise OptimizerStateError(
            "the optimizer has parameters that the model has not, so they have no names",
            where=type(optimizer).__name__,
            found=f"{foreign} of {len(params)}",
            remedy='give the module that holds them; among objects, add the module that holds them: {"model": ...}',
        )
    return {param: names[param] for param in params}


def same_state(first: Values, second: Values) -> bool:
    """Whether two names of a tied parameter have the same state, on this rank."""

    def local(value: object) -> object:
        return local_tensor(value) if isinstance(value, torch.Tensor) and is_sharded(value) else value

    is_same = first.keys() == second.keys()
    return first is second or (is_same and all(same_value(local(first[key]), local(second[key])) for key in first))


def is_torchs(cls: type) -> bool:
    return cls.__module__.startswith("torch.optim")


class OptimizerOptions(msgspec.Struct, frozen=True, eq=False):
    """What an optimizer keeps when its state is loaded, and what may be missing."""

    keep_options: Sequence[str]
    allow_missing: Patterns
    allow_unexpected: Patterns
    path: str = ""
    """The path of the optimizer, with which names begin in the patterns; empty where they do not."""
    initialised: Container[str] = ()
    """The parameters that have new values, and so need no state."""

    def named(self, name: object) -> str:
        """Returns a name as the patterns have it."""
        return f"{self.path}.{name}" if self.path else str(name)

    def keeps(self, option: object) -> bool:
        """Whether the optimizer keeps its own value of an option."""
        names = (self.path, self.named(option))
        return any(fnmatchcase(name, pattern) for name in names if name for pattern in self.keep_options)

    def may_miss(self, param: str) -> bool:
        """Whether the state of a parameter may be missing."""
        return param in self.initialised or self.allow_missing.allow(self.named(param))

    def may_exceed(self, name: str) -> bool:
        """Whether saved state may belong to no parameter."""
        return self.allow_unexpected.allow(self.named(name))


class OptimizerPlan(msgspec.Struct, frozen=True, eq=False):
    """The plan of loading the state of an optimizer. Made by `NamedState.plan`, and by `plan_whole`."""

    load: Callable[[Transaction], list[Replaced]]
    """Loads the state, and registers the undo. Returns what is for `into_recorded_memory` when all else has succeeded.

    Call it only where there are no problems. Raises `OptimizerStateError` for a value that the optimizer does not take.
    """
    problems: list[str]
    """A line of text for each thing that does not fit."""
    remedies: list[str]
    """The remedies for all but the names of parameters."""
    note: str
    """Set where the state is not by name, or is of another class, and is loaded all the same."""
    missing: Sequence[str] = ()
    """Names of parameters that lack saved state, and may not."""
    unexpected: Sequence[str] = ()
    """Saved names that the optimizer does not have, and may not be there."""


def trial_state(build: Any, dims: int, options: Mapping[str, object]) -> Values | None:
    """Returns what an optimizer of torch keeps for a parameter whose sizes are all 2, after a step.

    None where the class is not of torch, or cannot make a step; and for LBFGS, whose names depend on the steps.
    """
    if not is_torchs(build) or build is torch.optim.LBFGS:
        return None
    options = {**options, "capturable": False}  # the trial runs on the CPU
    arguments = {key: options[key] for key in inspect.signature(build).parameters if key in options and key != "params"}
    try:
        param = nn.Parameter(torch.zeros([2] * dims, device="cpu"))
        grad = torch.ones_like(param)
        param.grad = grad.to_sparse() if build is torch.optim.SparseAdam else grad
        trial: torch.optim.Optimizer = build([param], **arguments)
        trial.step()
    except Exception as error:
        keep_interrupt(error)
        return None
    return cast(Values, trial.state.get(param, {}))


def expected_state(optimizer: torch.optim.Optimizer, param: torch.Tensor, trial: Values | None) -> Values | None:
    """Returns what the optimizer keeps for a parameter, by a `trial_state` or by its present state; None for unknown.

    In a trial, a size of 1 stands for one value for a whole row or column.
    """
    if trial is None:
        return None if isinstance(optimizer, torch.optim.LBFGS) else optimizer.state.get(param) or None
    return {
        key: torch.empty(
            [1 if small == 1 else size for small, size in zip(value.shape, param.shape, strict=True)],
            dtype=value.dtype,
            device="meta",
        )
        if isinstance(value, torch.Tensor) and value.dim() == param.dim()
        else value
        for key, value in trial.items()
    }


def value_problems(name: str, values: Values, param: torch.Tensor, expected: Values | None, may_add: bool) -> list[str]:
    """Returns a line for each saved value of a parameter that does not fit; `expected` is the state that it keeps.

    With `may_add`, the state is of the same class, and may have more than that.
    """
    known = {} if expected is None else expected
    unknown = [] if expected is None or may_add else [str(key) for key in values if key not in expected]
    problems = [f"{name}: the optimizer does not keep the saved {', '.join(unknown)}"] if unknown else []
    problems += [f"{name}: {key} is lacking" for key in known if key not in values]
    for key, value in values.items():
        for path, leaf in leaf_paths({key: value}):
            if why := why_not_restored(leaf) or _unfit(leaf, param, known.get(key) if len(path) == 1 else None):
                problems.append(f"{name}: {place(path)} {why}")
                break
    return problems


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
        encode(leaf, leaf={}.__getitem__)  # raises for a tensor
    except Exception:  # `encode` may also run the code of a user's class
        return (
            f"is {type(leaf).__name__}, which is not restored into an optimizer: only tensors and plain values are, in "
            "dicts, lists, tuples and deques"
        )
    return ""


def memory_orders(tree: object, params: Mapping[object, torch.Tensor] = MappingProxyType({})) -> list[list[object]]:
    """Returns `[path, dims]` for each tensor whose dims have another order in memory than the usual one.

    Files have no strides, and a product with a transposed matrix is rounded otherwise than one with a copy of it.

    Args:
        tree: nested containers.
        params: parameters by the first keys of the paths. A tensor with the strides of its parameter gets those that
            the parameter has then: fused optimizers go through both in the order of their memory.
    """
    orders: list[list[object]] = []
    for path, leaf in leaf_paths(tree):
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_contiguous():
            continue
        param, strides = params.get(path[0]), leaf.stride()
        dims = sorted(range(leaf.dim()), key=lambda dim: -strides[dim])
        follows = param is not None and (leaf.shape, strides) == (param.shape, param.stride())
        if not follows and leaf.permute(dims).is_contiguous():
            orders.append([list(path), dims])
    return orders


def in_memory_orders(tree: object, orders: object) -> Any:
    """Returns a tree whose tensors lie in memory as they did, by the result of `memory_orders`."""
    dims_of = {tuple(path): dims for path, dims in orders} if isinstance(orders, list) else {}

    def order(path: Path, leaf: object) -> Any:
        dims = dims_of.get(path)
        if dims is None or not isinstance(leaf, torch.Tensor) or sorted(dims) != list(range(leaf.dim())):
            return leaf
        return leaf.permute(dims).contiguous().permute([dims.index(dim) for dim in range(leaf.dim())])

    return map_leaves(tree, order) if dims_of else tree


def _unfit(value: object, param: torch.Tensor, expected: object) -> str:
    """Returns why a value cannot be state of a parameter, where the optimizer has `expected`; empty where it can.

    A number and a tensor of one element are alike.
    """
    if isinstance(value, torch.Tensor):
        if is_sharded(value) or (is_sharded(param) and value.dim()):
            return _unfit_for_shard(value, param)
        if value.is_meta:
            return "has no values that could be copied: it is on meta"
    if value is None or expected is None or (is_number(value) and is_number(expected)):
        return ""
    if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
        if value.shape != expected.shape:
            return f"has the shape {list(value.shape)}, where the optimizer has {list(expected.shape)}"
        is_inexact = value.is_floating_point() or (value.is_complex() and param.is_complex())
        fits = is_inexact == (expected.is_floating_point() or expected.is_complex())
        return "" if fits else f"is {value.dtype}, where the optimizer has {expected.dtype}"
    if isinstance(value, torch.Tensor) != isinstance(expected, torch.Tensor):
        return f"is {type(value).__name__}, where the optimizer has {type(expected).__name__}"
    return ""


def _unfit_for_shard(value: torch.Tensor, param: torch.Tensor) -> str:
    """Returns why a rank cannot take its part of a value for a DTensor; empty where it can."""
    if not is_sharded(param):
        return "is a DTensor, and the parameter is not"
    if value.shape != param.shape:
        return (
            f"has the shape {list(value.shape)}, the parameter {list(param.shape)}: other values than one for each "
            "element are not split over the ranks of a DTensor"
        )
    slot = sharded_slot("", param, value, None)
    return "" if isinstance(slot, ShardedSlot) else f"cannot be split over the ranks: {slot.kind.title}"


@torch.inference_mode(False)  # a tensor made in that mode could never be updated
def placed_state(
    optimizer: torch.optim.Optimizer,
    param: torch.Tensor,
    values: Values,
    saved_dtype: str | None,
    options: Mapping[str, object],
    expected: Values | None,
    copies: Copies,
) -> dict[str, object]:
    """Returns a copy of the state of a parameter on the device, and in the dtype, that the optimizer needs.

    A tensor that several parameters share stays one tensor. Optimizers of torch share none: there it is a tensor that
    the state has been given for several parameters.

    Args:
        optimizer: The optimizer.
        param: The parameter.
        values: Its saved state.
        saved_dtype: The dtype that the parameter had when its state was saved, if it is known.
        options: The options that the group of the parameter is going to have.
        expected: What the optimizer keeps, as `expected_state` returns it.
        copies: Gets the copy of each tensor.
    """
    is_of_torch = is_torchs(type(optimizer))
    casts = saved_dtype is None and is_of_torch  # as torch's own load_state_dict does
    step_on_device = bool(options.get("capturable") or options.get("fused"))

    def copied(path: Path, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return deepcopy(leaf)
        had_it = leaf.is_floating_point() if casts else str(leaf.dtype) == saved_dtype
        follows = had_it and follows_dtype(path, leaf, param, leaf.dtype)
        dtype = param.dtype if follows and param.is_complex() == leaf.is_complex() else leaf.dtype
        of_param = param if is_of_torch else None
        key = identity(leaf), dtype, of_param, param.device, path == ("step",)
        if key not in copies:
            copies[key] = _copied(path, leaf, param, dtype, step_on_device)
            copies.setdefault(key[:3], copies[key])
        return copies[key]

    placed: dict[str, object] = map_leaves(dict(values), copied)
    step = placed.get("step")
    if isinstance((expected or {}).get("step"), torch.Tensor) and isinstance(step, int | float):
        device = param.device if step_on_device else "cpu"
        placed["step"] = torch.tensor(float(step), device=device)  # torch keeps it as a tensor since 1.12
    return placed


def placed_options(options: Mapping[str, object], group: Group, copies: Copies) -> dict[str, object]:
    """Returns copies of options for a group, or of state under other keys than parameters for that of an optimizer.

    A tensor gets the device of the one that it replaces; without one, that of the first parameter, since files have no
    devices. A tensor that `placed_state` has copied for a parameter, in its own dtype, stays one tensor.
    """
    shared: dict[int, torch.Tensor] = {}
    for _, leaf in leaf_paths(dict(options)):
        if isinstance(leaf, torch.Tensor) and (made := copies.get((identity(leaf), leaf.dtype, None))) is not None:
            shared[id(leaf)] = made
    placed: dict[str, object] = deep_copy(dict(options), shared)
    for key, value in placed.items():
        live = next(iter(group.get("params", ())), None) if key not in group else group[key]
        if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
            placed[key] = value.to(live.device)
    return placed


def load_values(
    optimizer: torch.optim.Optimizer,
    states: Mapping[torch.Tensor, PlacedState],
    other: Mapping[str, object],
    options: Iterable[tuple[_Live, Mapping[str, object]]],
    transaction: Transaction,
) -> list[Replaced]:
    """Gives an optimizer copies of a saved state, as `OptimizerPlan.load` does.

    Args:
        optimizer: the optimizer.
        states: returns a copy of the saved state of each parameter that has some, and adds it to the copies.
        other: the saved state under other keys than parameters.
        options: groups of the optimizer, each with the saved options that it gets.
        transaction: gets the undo.
    """
    what = "a value of the state cannot be copied; nothing has been changed"
    with code_errors(OptimizerStateError, what, where=type(optimizer).__name__):
        copies: Copies = {}
        new_state = {param: placed(copies) for param, placed in states.items()}
        new_other = placed_options(other, cast(Group, optimizer.state), copies)
        new_options = [(group, placed_options(of_group, group, copies)) for group, of_group in options]
    changed: list[_Live] = [optimizer.state, *optimizer.param_groups]
    before = [dict(values) for values in changed]

    def put_back() -> None:
        for values, old in zip(changed, before, strict=True):
            values.clear()
            values.update(old)

    transaction.register_undo(put_back)
    optimizer.state.clear()
    changed[0].update(new_state)
    changed[0].update(new_other)
    for group, of_group in new_options:
        group.update(of_group)
    of_params = [(before[0].get(param, {}), values) for param, values in new_state.items()]
    return [*of_params, *zip(before, changed, strict=True)]


def address(tensor: torch.Tensor) -> int:
    """Returns the address of the memory of a plain tensor; 0 for one without memory of its own."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.data_ptr() if is_plain else 0


def identity(tensor: torch.Tensor) -> object:
    """Returns what is the same for two tensors that are one in memory."""
    at = address(tensor)
    return (at, tensor.device, tensor.shape, tensor.stride(), tensor.dtype) if at else id(tensor)


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
        _, source = slot.local_value(value)
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


# The tensors of optimizers on a GPU, whose addresses a CUDA graph of a training step may have recorded. A restore makes
# new tensors, so that it can be undone. When nothing can fail any more, their values go to the tensors before.


def into_recorded_memory(replaced: Iterable[Replaced]) -> None:
    """Copies new values to the tensors on a GPU that were there before, and puts these in their place again.

    A tensor that was there under several names, as the learning rate of several groups, is left out if it cannot have
    the new values of all of them.
    """
    by_memory = defaultdict[tuple[torch.device, int], list[tuple[_Live, object, torch.Tensor]]](list)
    for before, values in replaced:
        for key, new in values.items():
            old = before.get(key)
            if (
                type(new) is torch.Tensor
                and type(old) is torch.Tensor
                and new is not old
                and old.is_cuda
                and not old.is_inference()
                and (old.shape, old.stride(), old.dtype, old.device) == (new.shape, new.stride(), new.dtype, new.device)
            ):
                by_memory[old.device, old.data_ptr()].append((values, key, old))
    with torch.inference_mode(False), torch.no_grad():
        for entries in by_memory.values():
            first, *others = (values[key] for values, key, _ in entries)
            if all(new.dtype == first.dtype and torch.equal(new, first) for new in others):
                entries[0][2].copy_(first)
                for values, key, old in entries:
                    values[key] = old


# Optimizers that are saved whole.


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


def plan_whole(
    optimizer: _Optimizer,
    names: Mapping[torch.Tensor, Sequence[str]],
    state: Mapping[str, Any],
    rules: Sequence[Rule],
    options: OptimizerOptions,
) -> OptimizerPlan:
    """Compares the class and the parameters of a saved state with those of the optimizer, and changes nothing.

    Args:
        optimizer: The optimizer.
        names: All names of each of its parameters.
        state: The result of `whole_state`.
        rules: The rules of the names.
        options: What the optimizer keeps.
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
        f"to begin without its state: {start_anew(options.path)}",
    ]
    return OptimizerPlan(partial(_load_whole, optimizer, state, options.keeps), problems, remedies, _note(optimizer))


def _load_whole(
    optimizer: _Optimizer, state: Mapping[str, Any], keeps: Callable[[object], bool], transaction: Transaction
) -> list[Replaced]:
    """Loads a state by the optimizer's own `load_state_dict`, and compares what the optimizer has then.

    Torch's own `load_state_dict` casts tensors to the dtypes of the parameters. They get their saved dtypes again,
    unless the parameters have other dtypes than the saved ones.
    """
    within: list[_Optimizer] = [optimizer]  # with those that it holds in its attributes, at any depth
    for each in within:
        leaves = [leaf for _, leaf in leaf_paths(dict(vars(each))) if isinstance(leaf, _Optimizer)]
        within += [leaf for leaf in leaves if all(leaf is not other for other in within)]
    kept = [
        (each, [{key: group[key] for key in group if keeps(key)} for group in each.param_groups]) for each in within
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
