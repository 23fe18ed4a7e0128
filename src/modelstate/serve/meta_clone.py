"""Copies of modules without memory, their state by runtime names, and a check of what a copy refers to.

`copy.deepcopy` does not copy functions. An object that a function captures, in its closure, defaults, attributes or
globals, is the original also when the copy calls the function. A tensor that is not part of the state is copied as it
is, so a copied view of a weight becomes a separate tensor that no swap changes.
"""

from __future__ import annotations

import copy
import copyreg
import dis
import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from modelstate.checkpoint.open import Source
from modelstate.errors import LiveTargetError, code_errors
from modelstate.loading.load import load
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Schema
from modelstate.spec import contiguous_stride
from modelstate.text_format import listed
from modelstate.torch_compat.modules import (
    computed_attributes,
    module_tables,
    modules_of,
    non_persistent_buffers,
    own_buffers,
    own_parameters,
    submodule_at,
    tensors_of,
    unwrapped,
)
from modelstate.torch_compat.plain import is_dense, is_plain
from modelstate.torch_compat.private import payload_of, slots_of_class, storage_id, storage_of
from modelstate.transaction.slots import sharing, slots_of

if TYPE_CHECKING:
    import numpy.typing as npt


def meta_clone(module: nn.Module, memory: Mapping[int, torch.Tensor] = MappingProxyType({})) -> nn.Module:
    """Returns a deep copy whose parameters and persistent buffers are on meta, tied as in the module.

    A tensor whose id is in `memory` has that memory instead.

    Weights of tensor subclasses are copied in full, since only their class knows how to copy them. So are buffers that
    are not persistent: no checkpoint has their values.

    Raises:
        LiveTargetError: The module cannot be copied.
    """
    modules = modules_of(module)
    tensors = {id(tensor): tensor for tensor in tensors_of(modules)}  # `memo` has their ids, so they must stay alive
    memo: dict[int, object] = {}
    in_state = set(map(id, runtime_state(module).values()))
    for key, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise LiveTargetError(
                "a module that has not run yet has parameters without a shape",
                where=type(module).__name__,
                remedy="run it once before it is served",
            )
        if key in memory:
            memo[key] = _with_memory(tensor, memory[key])
        elif key in in_state and is_plain(tensor) and not tensor.is_nested and not tensor.is_quantized:
            memo[key] = _on_meta(tensor)
    for submodule in modules:
        for name in computed_attributes(submodule):
            value = vars(submodule).get(name)
            if isinstance(value, torch.Tensor):  # with a graph, it could not be copied
                memo[id(value)] = value.detach()
    with code_errors(
        LiveTargetError,
        "the module cannot be copied, so it cannot have a second version",
        where=type(module).__name__,
        remedy="define __deepcopy__ on the class in the message above, or remove the attribute from the module",
    ):
        # Most attributes of a module are empty tables of hooks: `deepcopy` takes longer than the copy of one.
        attributes = [value for submodule in modules for value in vars(submodule).values()]
        memo.update({id(table): type(table)() for table in attributes if type(table) in _TABLES and not table})
        if not all(map(_has_usual_copies, {type(submodule) for submodule in modules})):
            return copy.deepcopy(module, memo)
        # The submodules exist before their attributes are copied, so the depth of the nesting does not matter.
        clones = [type(submodule).__new__(type(submodule)) for submodule in modules]
        memo.update(zip(map(id, modules), clones, strict=True))
        for submodule, clone in zip(reversed(modules), reversed(clones), strict=True):
            attributes_of_clone = {name: copy.deepcopy(value, memo) for name, value in vars(submodule).items()}
            clone.__setstate__(attributes_of_clone)  # type: ignore[no-untyped-call]
        return clones[0]


_TABLES = frozenset([dict, OrderedDict, set])
"""The classes of a module's tables of hooks, and of its set of non-persistent buffers."""
_COPYING = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__getattr__")
_CUSTOM_COPYING = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
"""The methods by which `deepcopy` copies a module, with the one that could answer for others."""


def _has_usual_copies(cls: type[nn.Module]) -> bool:
    """Whether `deepcopy` makes an empty module of this class, and gives copies of the attributes to it."""
    is_usual = all(getattr(cls, each, None) is getattr(nn.Module, each, None) for each in _COPYING + _CUSTOM_COPYING)
    return is_usual and cls not in copyreg.dispatch_table and not slots_of_class(cls)


def state_module(state: Mapping[str, torch.Tensor], *, meta: bool = True, hidden: Container[str] = ()) -> nn.Module:
    """Returns a bare module with the tensors of a state under their names.

    Args:
        state: Tensors by dotted name; a tensor under several names stays tied.
        meta: Puts plain tensors on the meta device; False registers the tensors themselves.
        hidden: The names of buffers that are not persistent.
    """
    root, registered = nn.Module(), dict[int, torch.Tensor]()
    for name, tensor in state.items():
        *path, last = name.split(".")
        owner = submodule_at(root, path)
        value = registered.setdefault(id(tensor), _on_meta(tensor) if meta and is_plain(tensor) else tensor)
        if isinstance(value, nn.Parameter):
            own_parameters(owner)[last] = value
        else:
            own_buffers(owner)[last] = value
            if name in hidden:
                non_persistent_buffers(owner).add(last)
    return root


def runtime_state(
    model: nn.Module, source: Source | None = None, *, rules: Rule | Iterable[Rule] | Schema = ()
) -> dict[str, torch.Tensor]:
    """Returns the parameters and persistent buffers of a model, by their paths in the model tree that runs.

    The result has the names, order and tensors of `torch.export.export(model, ...).state_dict`, independently of
    state-dict hooks. A tied tensor has an entry for each of its names.

    With a source, the result is the state that the model would have with that checkpoint. The model's own loading
    code reads it into new memory, and the model itself does not change. So a checkpoint with the names of
    `state_dict()` gets the names of the exported program, also where hooks split or fuse tensors.

    Args:
        model: The model, or a wrapper of `torch.compile` or `DataParallel` around it.
        source: As for `modelstate.load`; None for the present state.
        rules: As for `modelstate.load`.

    Returns:
        The tensors by name. Without a source they are the model's own.

    Raises:
        PlanError: The source does not fit; `modelstate.load` lists its other errors.
        LiveTargetError: With a source, the model cannot be copied.

    Examples:
        >>> state = modelstate.serve.runtime_state(model)
        >>> state.keys() == torch.export.export(model, (x,)).state_dict.keys()
        True
    """
    model = unwrapped(model)
    if source is not None:
        model = meta_clone(model)
        load(model, source, rules=rules, map=False)
    parameters, buffers = dict[str, torch.Tensor | None](), dict[str, torch.Tensor | None]()
    for prefix, module, own, others in module_tables(model):
        parameters.update((prefix + name, parameter) for name, parameter in own.items())
        hidden = non_persistent_buffers(module) if others else ()
        buffers.update((prefix + name, buffer) for name, buffer in others.items() if name not in hidden)
    return {name: tensor for name, tensor in (parameters | buffers).items() if tensor is not None}


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns all buffers by name, also those that are None. A tied one has an entry for each of its names."""
    tables = module_tables(module)
    return {f"{prefix}{name}": buffer for prefix, _, _, buffers in tables for name, buffer in buffers.items()}


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    # Not `empty_like`: for meta it imports sympy, which takes seconds in a process that answers requests.
    is_kept = tensor.is_contiguous() or is_dense(tensor)
    stride = tensor.stride() if is_kept else contiguous_stride(tensor.shape)
    return _with_memory(tensor, torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta"))


def _with_memory(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Returns a parameter or buffer as `tensor` is, with its attributes, and with other memory."""
    memory = memory.detach()
    clone: torch.Tensor = nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory
    if is_plain(tensor):  # the attributes of a wrapper subclass are its payload
        clone.__dict__.update(tensor.__dict__)
    return clone


_CALLED = frozenset(
    [
        *("forward", "__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward"),
        *("load_state_dict", "_load_from_state_dict", "set_extra_state"),
        *("get_parameter", "get_buffer", "get_submodule"),
    ]
)
"""Methods of every module that requests and loads call. Libraries wrap others too, such as `to` and `extra_repr`."""
_UNUSED = {*dir(nn.Module), "_backward_hooks", "_backward_pre_hooks", "_non_persistent_buffers_set"} - _CALLED
"""Attributes of modules that neither requests nor loads use."""
_CONTAINERS = (list, tuple, set, frozenset, deque)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_CALLABLES = (types.FunctionType, functools.partial, *_METHODS)
_PARTS = ("__self__", "__func__", "func", "args", "keywords", "__defaults__", "__kwdefaults__")
"""What a method, a partial or a function calls, and what it calls that with."""


def check_captured_references(module: nn.Module, clone: nn.Module) -> tuple[str, ...]:
    """Returns the paths of the tensors and arrays of a module that are outside of its state.

    Raises `LiveTargetError` where a copy of the module would serve weights of the module itself, or have no values, or
    not preserve that tensors overlap.
    """
    slots = [slot for slot in slots_of(module).tensors if is_plain(slot.tensor) and not slot.tensor.is_meta]
    for first, second, *_ in sharing(slots, [slot.tensor for slot in slots]) if slots else ():
        raise LiveTargetError(
            "tensors of the module overlap without being tied, and a copy would not preserve that",
            where=type(module).__name__,
            found=f"{first.name} and {second.name}",
            remedy="give each tensor its own memory, or register one tensor under both names",
        )
    original = {id(part): f"module {path!r}" if path else "the module" for path, part in module.named_modules()}
    original |= {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    # Without other buffers: a deep copy keeps views of those.
    state = runtime_state(module)
    name_of_address = {address: name for name, tensor in state.items() for address in _addresses(tensor)}
    others = [
        (path, value)
        for path, value in _reachable(module, ())
        if isinstance(value, torch.Tensor | np.ndarray) and id(value) not in original
    ]
    in_state = set(map(id, state.values()))
    hidden = [(name, buffer) for name, buffer in module.named_buffers() if id(buffer) not in in_state]
    on_meta = [path for path, value in (*others, *hidden) if isinstance(value, torch.Tensor) and value.is_meta]
    references = [
        f"{path} is {original[id(value)]} of the first version"
        for path, value in _reachable(clone, original)
        if id(value) in original
    ]
    for path, value in others:
        names = [name_of_address[address] for address in _addresses(value) if address in name_of_address]
        references += [f"{path} is a view of {name}" for name in names[:1]]
    if on_meta:
        raise LiveTargetError(
            "buffers or attributes of the module are on the meta device, and no checkpoint has values for them",
            where=type(module).__name__,
            found=listed(on_meta, 4),
            remedy="build the module with `with modelstate.skeleton():`; where the constructor only allocates them, "
            "load before it is served: modelstate.load(module, source, init_missing=True)",
        )
    if references:
        raise LiveTargetError(
            "later versions would serve weights of the first one: a copy of the module still refers to them",
            where=type(module).__name__,
            found=listed(references, 4, "; "),
            remedy="patch the class, or the instance by types.MethodType; let hooks use the module that they "
            "are given; compile the whole, torch.compile(module); make a property of a view",
        )
    return tuple(path for path, _ in others)


def _addresses(value: torch.Tensor | npt.NDArray[np.generic]) -> set[int]:
    """The addresses of the memory of a tensor or an array; none for empty ones."""
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        return {value.__array_interface__["data"][0]} if value.size else set()
    parts = [part for part in payload_of(value) if not part.is_meta and storage_id(part)]
    return {storage_of(part).data_ptr() for part in parts} - {0}


def _reachable(root: nn.Module, ends: Container[int]) -> Iterator[tuple[str, object]]:
    """Yields each module, tensor and array that is reachable from a module, with its path.

    The search does not continue from objects whose ids are in `ends`.
    """
    registered = {id(module): path for path, module in root.named_modules()}
    seen: set[int] = set()
    kept: list[object] = []  # keeps the ids in `seen` valid
    waiting = deque[tuple[str, object]](root.named_modules())  # breadth first, for the shortest paths
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen or type(value) in weakref.ProxyTypes:
            continue
        seen.add(id(value))
        kept.append(value)
        if isinstance(value, torch.Tensor | nn.Module | np.ndarray):
            yield path, value
        if id(value) in ends:
            continue
        waiting.extend(_referents(registered.get(id(value), path), value))


def _referents(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields what a module, a function, a method, a container or an object of the user refers to, with its path."""
    if isinstance(value, nn.Module):
        yield from _of_module(path, value)
    elif isinstance(value, torch.Tensor):
        if is_plain(value):  # the attributes of a wrapper subclass are its payload
            yield from ((f"{path}.{name}", item) for name, item in list(vars(value).items()))
    elif isinstance(value, _CALLABLES):
        if isinstance(value, types.FunctionType):
            yield from _of_code(path, value)
        yield from ((f"{path}.{name}", getattr(value, name, None)) for name in _PARTS)
        yield from _attributes(path, value)
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", item) for key, item in list(dict.items(value)))
    elif isinstance(value, _CONTAINERS):
        kind: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))
        items = list(kind.__iter__(value))  # a subclass may override iteration, or its length
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(items))
    elif isinstance(value, weakref.ref):
        if isinstance(value(), nn.Module):
            yield f"{path}()", value()
    elif not isinstance(value, type | types.ModuleType):
        home = type(value).__module__
        if home.partition(".")[0] not in ("torch", "builtins") or home.startswith("torch.nn."):
            yield from _attributes(path, value)


def _of_module(path: str, module: nn.Module) -> Iterator[tuple[str, object]]:
    """The attributes of a module, without those that a hook sets before each call, such as that of `spectral_norm`."""
    set_by_hooks = computed_attributes(module)
    if isinstance(module, nn.RNNBase):
        set_by_hooks.add("_flat_weights")  # a copy makes the list again, and so does a call with other weights
    for name, value in list(vars(module).items()):
        if name in _UNUSED or name in set_by_hooks:
            continue
        if name in ("_modules", "_parameters", "_buffers"):
            yield from ((f"{path}.{key}" if path else key, item) for key, item in list(value.items()))
        else:
            yield f"{path}.{name}" if path else name, value


def _of_code(path: str, value: types.FunctionType) -> Iterator[tuple[str, object]]:
    """The closure of a function, and the modules, tensors and callables among its globals."""
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f"{path}: {name}", cell.cell_contents
        except ValueError:
            continue  # the cell is empty
    for name in _names(value.__code__):
        item = value.__globals__.get(name)
        is_imported = isinstance(item, types.FunctionType) and item.__globals__ is not value.__globals__
        if isinstance(item, (torch.Tensor, nn.Module, *_CALLABLES)) and not is_imported:
            yield f"{path}: {name}", item


def _names(code: types.CodeType) -> set[str]:
    """The globals that code and its nested functions read."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _attributes(path: str, value: object) -> Iterator[tuple[str, object]]:
    """The instance attributes, without `__wrapped__`: it documents what a function wraps, and is not called."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    for name, item in list(own.items()):
        if name != "__wrapped__":
            yield f"{path}.{name}", item
    for name in slots_of_class(type(value)):
        item = getattr(value, name, None)
        if item is not None:
            yield f"{path}.{name}", item
