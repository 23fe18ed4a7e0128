"""Checks before anything serves: the layout, dtype and values of new weights, and the mode of a target."""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import LiveTargetError, WeightsError
from modelstate.planning.plan import Step
from modelstate.problems import Problem, WrongDtype
from modelstate.serve.state_names import runtime_state
from modelstate.spec import StoredComposite, StoredTensor
from modelstate.torch_compat.modules import has_forward_hooks
from modelstate.torch_compat.plain import is_plain, remedies_for
from modelstate.torch_compat.private import arguments_of_node, payload_of, storage_of

Kind = tuple[torch.layout, type] | None
"""The layout and class of a tensor; None for plain strided tensors."""
_LISTED = 8
_LISTED_MODULES = 4
_EXACT = "give the weights as the program has them, or swap with exact=False, which copies and converts what it can"


def check_layout(part: Checkpoint, slots: Mapping[str, torch.Tensor | None], where: str) -> None:
    """Requires contiguous tensors, or the strides of the slot, and a storage for each tensor.

    A compiled library reads weights by pointer, and would read views of a flat buffer and transposed views incorrectly.
    The check is the same for every kind of target, so that a source fits all of them or none. Raises
    `WeightsError`.
    """
    strided: list[tuple[str, str]] = []
    shared: list[tuple[str, str]] = []
    for name, spec in part.items():
        stored = spec.stored
        if isinstance(stored, torch.Tensor):
            if stored.layout is not torch.strided or len(payload_of(stored)) > 1:
                continue
            is_contiguous, storage_bytes = stored.is_contiguous(), storage_of(stored).nbytes() if stored.numel() else 0
        elif isinstance(stored, StoredTensor):
            is_contiguous, storage_bytes = stored.is_contiguous, stored.storage.nbytes if stored.nbytes else 0
        else:
            continue
        slot = slots.get(name)
        as_slot = slot is not None and slot.layout is torch.strided and tuple(slot.stride()) == spec.stride
        if not is_contiguous and not as_slot:
            strided.append((name, f"stride {spec.stride} of shape {spec.shape}"))
        if storage_bytes and storage_bytes != spec.nbytes:
            shared.append((name, f"{spec.nbytes:,} bytes of a storage of {storage_bytes:,}"))
    if strided:
        raise _error("elements of weights lie in another order", strided, where, "contiguous tensors")
    if shared:
        what = "weights are parts of a larger storage"
        raise _error(what, shared, where, "a storage for each tensor")


def kind_of(tensor: torch.Tensor) -> Kind:
    """Returns the kind of a tensor."""
    return None if is_plain(tensor) else (tensor.layout, torch.Tensor if type(tensor) is nn.Parameter else type(tensor))


def check_kinds(weights: Mapping[str, object], kinds: Mapping[str, Kind], where: str) -> None:
    """Raises `WeightsError` for sparse tensors and subclasses, except where the program has the same kind."""
    wrong = []
    for name, weight in weights.items():
        if name not in kinds:
            continue
        if isinstance(weight, StoredComposite):
            if "sparse" in weight.kind and kinds[name] is None:  # other composites may be made of plain tensors
                wrong.append((name, weight.kind))
        elif isinstance(weight, torch.Tensor) and kind_of(weight) not in (None, kinds[name]):
            wrong.append((name, f"{type(weight).__name__}, {weight.layout}"))
    if wrong:
        what = "weights are another kind of tensor than the program's: sparse, or of a class of their own"
        special = remedies_for(weights[name] for name, _ in wrong)
        remedy = "; ".join(special) or "give plain tensors: weight.to_dense(), weight.as_subclass(torch.Tensor)"
        raise _error(what, wrong, where, "the kind that the program has", remedy)


def check_casts(steps: Iterable[Step], where: str) -> None:
    """Raises `WeightsError` where a step casts, or would cast, a weight."""
    cast = [(step.name, step.cast) for step in steps if step.cast]
    if cast:
        what = "weights have another dtype than the program"
        raise _error(what, cast, where, "the dtype of the program")


def dtype_error(problems: Sequence[Problem], where: str) -> WeightsError | None:
    """Returns the error for a plan whose only problems are lossy casts; None for any other plan."""
    wrong = [problem for problem in problems if isinstance(problem, WrongDtype)]
    if not wrong or len(wrong) < len(problems):
        return None
    found = [(problem.name, f"{problem.found}, which would have to be cast to {problem.expected}") for problem in wrong]
    remedy = "give the weights as the program has them, or cast them: rules=[modelstate.rules.Cast(name, dtype)]"
    what = "weights have another dtype than the program"
    return _error(what, found, where, "the dtype of the program", remedy)


def check_finite(new: nn.Module, serving: Callable[[], Mapping[str, torch.Tensor]], where: str) -> None:
    """Raises `WeightsError` for elements that are not finite, unless the serving ones are not finite either."""
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
        expected = "finite values wherever those that serve are finite"
        remedy = "look at the training run; check_finite=False lets them through"
        raise _error("weights are NaN or infinite", found, where, expected, remedy)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite. The sum is cheap, and finite only if every element is."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return True
    with torch.no_grad():
        plain = _comparable(tensor)
        return bool(torch.isfinite(plain.sum())) or bool(torch.isfinite(plain).all())


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _error(
    what: str,
    found: list[tuple[str, str]],
    where: str,
    expected: str,
    remedy: str = _EXACT,
) -> WeightsError:
    names = [name for name, _ in found]
    return WeightsError(what, where=where, expected=expected, found=_lines(found), remedy=remedy, names=names)


def _lines(found: list[tuple[str, str]]) -> str:
    more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return "; ".join(f"{name}: {what}" for name, what in found[:_LISTED]) + more


def check_mode(module: nn.Module, training: object) -> None:
    """Raises `LiveTargetError` where the module or one of its submodules is in training mode.

    Layers of torch that compute the same in both modes, such as `Linear`, may be in either.
    """
    if training:
        return
    found = [
        path or "the module itself"
        for path, submodule in module.named_modules()
        if submodule.training and not _is_mode_free(submodule)
    ]
    if found:
        raise _mode_error(
            type(module).__name__, found, "call module.eval() first; training=True takes the module as it is"
        )


def check_graph_mode(program: Any, training: object, where: str) -> None:
    """Raises `LiveTargetError` for an exported program with operators in training mode."""
    if training:
        return
    found = [node.name for node in program.graph.nodes if node.op == "call_function" and _trains(node)]
    if found:
        raise _mode_error(where, found, "export module.eval(); training=True takes the program as it is")


def _mode_error(where: str, found: list[str], remedy: str) -> LiveTargetError:
    more = f", and {len(found) - _LISTED_MODULES} more" if found[_LISTED_MODULES:] else ""
    return LiveTargetError(
        "this is in training mode: dropout would be active, and requests would change statistics",
        where=where,
        expected="eval mode",
        found=f"training mode in {', '.join(found[:_LISTED_MODULES])}{more}",
        remedy=remedy,
    )


def _is_mode_free(module: nn.Module) -> bool:
    """Whether a module runs only code of torch, and that code does not read the mode.

    This is so for exact classes of `torch.nn.modules` without hooks, and without a function of the user in an
    attribute such as `forward` or `activation`.
    """
    cls = type(module)
    if getattr(nn.modules, cls.__name__, None) is not cls or has_forward_hooks(module):
        return False
    if "forward" in vars(module) or not isinstance(cls.forward, types.FunctionType):
        return False
    if any(callable(value) and not _is_of_torch(value) for value in vars(module).values()):
        return False
    bases = [base for base in cls.__mro__ if base not in nn.Module.__mro__]
    members = [getattr(value, "__func__", value) for base in bases for value in vars(base).values()]
    members = [value.fget if isinstance(value, property) else value for value in members]
    functions = [value for value in members if isinstance(value, types.FunctionType)]
    return all(_is_of_torch(function) and not _reads_mode(function.__code__) for function in functions)


def _is_of_torch(value: object) -> bool:
    """Whether a value is a function or class of torch, and not a wrapper of a function, which may be the user's.

    The `__module__` of a function does not tell, since `functools.wraps` copies it.
    """
    if isinstance(value, types.FunctionType):
        name = "" if hasattr(value, "__wrapped__") else value.__globals__.get("__name__")
    else:
        name = value.__module__ if isinstance(value, (type, types.BuiltinFunctionType)) else ""
    return str(name).partition(".")[0] == "torch"


def _reads_mode(code: types.CodeType) -> bool:
    """Whether code, or a nested function, refers to the name `training`."""
    inner = [value for value in code.co_consts if isinstance(value, types.CodeType)]
    return "training" in (*code.co_names, *code.co_consts) or any(map(_reads_mode, inner))


def _trains(node: Any) -> bool:
    """Whether a node of a graph is active dropout, or normalization that updates statistics."""
    arguments = arguments_of_node(node)
    if arguments is None:
        return False
    if arguments.get("dropout_p", 0) != 0:  # of attention
        return True
    mode = arguments.get("train", arguments.get("training", arguments.get("use_input_stats")))
    if "norm" in str(node.target):
        return mode is True and arguments.get("running_mean") is not None
    has_rate = arguments.get("p", arguments.get("dropout")) != 0
    return has_rate and (mode is True or (mode is None and "native_dropout" in str(node.target)))
