"""Checks of new weights, and of the training mode of a module, before they serve."""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import (
    LiveTargetError,
    NonFiniteWeightError,
    WeightDtypeError,
    WeightKindError,
    WeightsError,
    WeightStorageError,
    WeightStrideError,
)
from modelstate.planning.plan import Step
from modelstate.problems import Problem, WrongDtype
from modelstate.serve.state_names import runtime_state
from modelstate.spec import StoredComposite, StoredTensor
from modelstate.torch_compat.plain import is_plain, remedies_for
from modelstate.torch_compat.private import payload_of, storage_of

_LISTED = 8
Kind = tuple[torch.layout, type] | None
_EXACT = "give the weights as the program has them, or swap with exact=False, which copies and converts what it can"


def check_layout(part: Checkpoint, slots: Mapping[str, torch.Tensor | None], where: str) -> None:
    """Elements in their own order, or in that of the slot, and in storages of their own.

    Views of a flat buffer and transposed views are what a loader by pointers takes wrong; one source has to be right
    for every kind of target. Raises `WeightStrideError` and `WeightStorageError`.
    """
    strided: list[tuple[str, str]] = []
    shared: list[tuple[str, str]] = []
    for name, spec in part.items():
        stored = spec.stored
        if isinstance(stored, torch.Tensor):
            if stored.layout is not torch.strided or len(payload_of(stored)) > 1:
                continue
            in_order, own = stored.is_contiguous(), storage_of(stored).nbytes() if stored.numel() else 0
        elif isinstance(stored, StoredTensor):
            in_order, own = stored.is_contiguous, stored.storage.nbytes if stored.nbytes else 0
        else:
            continue
        slot = slots.get(name)
        same = slot is not None and slot.layout is torch.strided and tuple(slot.stride()) == spec.stride
        if not in_order and not same:
            strided.append((name, f"stride {spec.stride} of shape {spec.shape}"))
        if own and own != spec.nbytes:
            shared.append((name, f"{spec.nbytes:,} bytes of a storage of {own:,}"))
    if strided:
        raise _error(
            WeightStrideError, "elements of weights lie in another order", strided, where, "contiguous tensors"
        )
    if shared:
        what = "weights are parts of a larger storage"
        raise _error(WeightStorageError, what, shared, where, "a storage for each tensor")


def kind_of(tensor: torch.Tensor) -> Kind:
    """None of a plain strided tensor; the layout and the class of any other."""
    return None if is_plain(tensor) else (tensor.layout, torch.Tensor if type(tensor) is nn.Parameter else type(tensor))


def check_kinds(found: Mapping[str, object], kinds: Mapping[str, Kind], where: str) -> None:
    """Raises `WeightKindError` for sparse tensors and subclasses, except where the program has the same."""
    wrong = []
    for name, one in found.items():
        if name not in kinds:
            continue
        if isinstance(one, StoredComposite):
            if "sparse" in one.kind and kinds[name] is None:  # what others are made of may be plain
                wrong.append((name, one.kind))
        elif isinstance(one, torch.Tensor) and kind_of(one) not in (None, kinds[name]):
            wrong.append((name, f"{type(one).__name__}, {one.layout}"))
    if wrong:
        what = "weights are another kind of tensor than the program's: sparse, or of a class of their own"
        special = remedies_for(found[name] for name, _ in wrong)
        remedy = "; ".join(special) or "give plain tensors: weight.to_dense(), weight.as_subclass(torch.Tensor)"
        raise _error(WeightKindError, what, wrong, where, "the kind that the program has", remedy)


def check_casts(steps: Iterable[Step], where: str) -> None:
    """Raises `WeightDtypeError` for weights that are, or would be, cast."""
    cast = [(step.name, step.cast) for step in steps if step.cast]
    if cast:
        what = "weights have another dtype than the program"
        raise _error(WeightDtypeError, what, cast, where, "the dtype of the program")


def dtype_error(problems: Sequence[Problem], where: str) -> WeightDtypeError | None:
    """The error for a plan that has no other problem than dtypes that cannot be cast without loss."""
    wrong = [one for one in problems if isinstance(one, WrongDtype)]
    if not wrong or len(wrong) < len(problems):
        return None
    found = [(one.name, f"{one.found}, which would have to be cast to {one.expected}") for one in wrong]
    remedy = "give the weights as the program has them, or cast them: rules=[modelstate.rules.Cast(name, dtype)]"
    what = "weights have another dtype than the program"
    error = _error(WeightDtypeError, what, found, where, "the dtype of the program", remedy)
    assert isinstance(error, WeightDtypeError)
    return error


def check_finite(new: nn.Module, serving: Callable[[], Mapping[str, torch.Tensor]], where: str) -> None:
    """Raises `NonFiniteWeightError` for values that are not finite, except where those that serve are not either."""
    suspects = {name: tensor for name, tensor in runtime_state(new).items() if not _is_finite(tensor)}
    if not suspects:
        return
    before = serving()
    found = []
    for name, tensor in suspects.items():
        wrong = ~torch.isfinite(_comparable(tensor))
        old = before.get(name)
        if old is not None and old.shape == tensor.shape:
            wrong &= torch.isfinite(_comparable(old))
        count = int(wrong.sum())
        if count:
            found.append((name, f"{count} of {tensor.numel()} elements"))
    if found:
        raise NonFiniteWeightError(
            "weights are NaN or infinite",
            where=where,
            expected="finite values wherever those that serve are finite",
            found=_lines(found),
            remedy="look at the training run; check_finite=False lets them through",
            names=[name for name, _ in found],
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Cheaply where it is so: the sum is finite only if every element is."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return True
    with torch.no_grad():
        plain = _comparable(tensor)
        return bool(torch.isfinite(plain.sum())) or bool(torch.isfinite(plain).all())


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _error(
    kind: type[WeightsError],
    what: str,
    found: list[tuple[str, str]],
    where: str,
    expected: str,
    remedy: str = _EXACT,
) -> WeightsError:
    names = [name for name, _ in found]
    return kind(what, where=where, expected=expected, found=_lines(found), remedy=remedy, names=names)


def _lines(found: list[tuple[str, str]]) -> str:
    more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return "; ".join(f"{name}: {what}" for name, what in found[:_LISTED]) + more


_LISTED_MODULES = 4


def check_mode(module: nn.Module, training: object) -> None:
    """Raises `LiveTargetError` where the module or one of its submodules is in training mode.

    Layers of torch that compute the same in both modes, as `Linear`, may be in either.
    """
    if training:
        return
    found = [
        path or "the module itself" for path, one in module.named_modules() if one.training and not _is_plain_layer(one)
    ]
    if found:
        _refuse(type(module).__name__, found, "call module.eval() first; training=True takes the module as it is")


def check_graph_mode(program: Any, training: object, where: str) -> None:
    """Raises `LiveTargetError` for an exported program with operators that work as in training."""
    if training:
        return
    found = [node.name for node in program.graph.nodes if node.op == "call_function" and _trains(node)]
    if found:
        _refuse(where, found, "export module.eval(); training=True takes the program as it is")


def _refuse(where: str, found: list[str], remedy: str) -> None:
    more = f", and {len(found) - _LISTED_MODULES} more" if found[_LISTED_MODULES:] else ""
    raise LiveTargetError(
        "this is in training mode: dropout would be active, and requests would change statistics",
        where=where,
        expected="eval mode",
        found=f"training mode in {', '.join(found[:_LISTED_MODULES])}{more}",
        remedy=remedy,
    )


def _is_plain_layer(module: nn.Module) -> bool:
    """Whether a module runs code of torch alone, and that code does not read the mode.

    Only exact classes of `torch.nn.modules` count. A module with hooks, or with a function of the user in one of its
    attributes, as `forward` or `activation`, does not.
    """
    kind = type(module)
    if getattr(nn.modules, kind.__name__, None) is not kind or module._forward_hooks or module._forward_pre_hooks:
        return False
    if "forward" in vars(module) or not isinstance(kind.forward, types.FunctionType):
        return False
    if any(callable(value) and not _is_of_torch(value) for value in vars(module).values()):
        return False
    bases = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
    members = [getattr(value, "__func__", value) for base in bases for value in vars(base).values()]
    members = [value.fget if isinstance(value, property) else value for value in members]
    functions = [value for value in members if isinstance(value, types.FunctionType)]
    return all(_is_of_torch(function) and not _reads_mode(function.__code__) for function in functions)


def _is_of_torch(value: Any) -> bool:
    """Whether this is a function or class of torch, not one that wraps another (which may be the user's).

    The `__module__` of a function does not say so: `functools.wraps` copies it.
    """
    if isinstance(value, types.FunctionType):
        name = "" if hasattr(value, "__wrapped__") else value.__globals__.get("__name__")
    else:
        name = value.__module__ if isinstance(value, (type, types.BuiltinFunctionType)) else ""
    return str(name).partition(".")[0] == "torch"


def _reads_mode(code: types.CodeType) -> bool:
    """Whether code, or a function within it, has the name `training` in it."""
    inner = [value for value in code.co_consts if isinstance(value, types.CodeType)]
    return "training" in (*code.co_names, *code.co_consts) or any(map(_reads_mode, inner))


def _trains(node: Any) -> bool:
    """Whether a node of a graph is dropout that is active, or normalisation that collects statistics."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    if given.get("dropout_p", 0) != 0:  # of attention
        return True
    mode = given.get("train", given.get("training", given.get("use_input_stats")))
    if "norm" in str(node.target):
        return mode is True and given.get("running_mean") is not None
    has_rate = given.get("p", given.get("dropout")) != 0
    return has_rate and (mode is True or (mode is None and "native_dropout" in str(node.target)))
