"""Training mode: a program that serves must not drop out values or collect statistics, unless that is meant."""

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from modelstate.errors import LiveTargetError

_LISTED = 4
_FORWARD = ("forward", "__call__")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def check_mode(module: nn.Module, training: object) -> None:
    """Raises `LiveTargetError` where a module is in training mode and would compute something else in eval mode.

    A module counts where its code cannot be read, or where that code, its hooks or the functions that they call have
    the name `training` in them. So plain layers of torch, as `Linear`, may be in either mode.
    """
    if training:
        return
    known: dict[type, bool] = {}
    found = [
        path or "the module itself"
        for path, one in module.named_modules()
        if one.training and (_mode_matters(type(one), known) or any(map(_reads_mode, _of_instance(one))))
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


def _mode_matters(kind: type, known: dict[type, bool]) -> bool:
    """Whether the methods of a class below `nn.Module` read the mode."""
    if kind not in known:
        bases = [base for base in kind.__mro__ if base not in (nn.Module, *nn.Module.__mro__)]
        methods = [getattr(value, "__func__", value) for base in bases for value in vars(base).values()]
        properties = [value.fget for value in methods if isinstance(value, property)]
        code = [value for value in (*methods, *properties) if isinstance(value, types.FunctionType)]
        forward = getattr(kind, "forward", None)
        known[kind] = not isinstance(forward, types.FunctionType) or any(map(_reads_mode, code))
    return known[kind]


def _of_instance(module: nn.Module) -> Iterator[Any]:
    """What is called with an instance beside the methods of its class: its hooks, and a `forward` of its own."""
    yield from (vars(module)[name] for name in _FORWARD if name in vars(module))
    for name in _HOOKS:
        yield from vars(module)[name].values()


def _reads_mode(called: Any) -> bool:
    """Whether a function, or one that it calls or wraps, names `training`. What has no code is taken to."""
    waiting, seen = [called], set[int]()
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__func__", function)
        if isinstance(function, functools.partial):
            function = function.func
        if not isinstance(function, types.FunctionType):
            # An object that is a hook, as those of pruning.
            bases = [base for base in type(function).__mro__ if "__call__" in vars(base)]
            function = vars(bases[0])["__call__"] if bases else None
            if not isinstance(function, types.FunctionType):
                return True
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        names, constants = _names_in(function.__code__)
        if "training" in names or "training" in constants:
            return True
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        others = [*cells, *(function.__globals__.get(name) for name in names)]
        waiting += [one for one in others if isinstance(one, types.FunctionType) and not _is_of_torch(one)]
    return False


def _names_in(code: types.CodeType) -> tuple[set[str], set[object]]:
    """The names and constants in code, and in the functions within it."""
    names, constants = set(code.co_names), set[object](code.co_consts)
    for inner in [value for value in code.co_consts if isinstance(value, types.CodeType)]:
        more = _names_in(inner)
        names |= more[0]
        constants |= more[1]
    return names, constants


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False  # nothing has been put into it yet


def _is_of_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


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
