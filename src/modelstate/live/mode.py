"""Training mode: a served program must not apply dropout or collect statistics, unless the caller asks for it."""

import types
from typing import Any

from torch import nn

from modelstate.errors import LiveTargetError

_LISTED = 4


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
    more = f", and {len(found) - _LISTED} more" if found[_LISTED:] else ""
    raise LiveTargetError(
        "this is in training mode: dropout would be active, and requests would change statistics",
        where=where,
        expected="eval mode",
        found=f"training mode in {', '.join(found[:_LISTED])}{more}",
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
