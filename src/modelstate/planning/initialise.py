"""`initialiser_of`: initial values for tensors of a model, computed by the model's own code on a copy of its modules.

The constructor of a module calls `reset_parameters`. A model of Hugging Face then calls its `_init_weights(module)` for
every module, children first. This module makes the same calls on a copy of the module that owns the tensor, and of the
modules above it that initialise their children. Only the requested tensors have memory in the copy, so the model is not
changed and no large copy is allocated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.errors import ModelCodeError, keep_interrupt
from modelstate.torch_compat.modules import own_buffers, own_modules, own_parameters, tensors_of
from modelstate.torch_compat.plain import is_plain, is_sharded
from modelstate.torch_compat.private import recorded_fills, storage_id
from modelstate.torch_compat.sharding import without_fsdp

_METHODS = ("reset_parameters", "_reset_parameters", "_init_weights")
_INITIALISES_CHILDREN = "_init_weights"
_CAN_BE_NAN = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


class Initialiser(msgspec.Struct, frozen=True):
    """Computes the initial value of a tensor."""

    how: str
    """The methods, such as "Linear.reset_parameters"."""
    make: Callable[[], torch.Tensor]
    """Computes a new value with each call. Raises `ModelCodeError`."""


def initialiser_of(model: nn.Module, name: str, copies: dict[str, Copies]) -> Initialiser | None:
    """Returns the initialiser of a tensor; None if no method of its modules writes the whole tensor.

    The methods are called on a copy without memory. The model and the random generator of the CPU do not change.

    Args:
        model: The model.
        name: The name of the tensor.
        copies: The copies for other tensors of the model, by the prefixes of their modules. New ones are added.
    """
    tensor = _own_tensors(model, name).get(name)
    if tensor is None or is_lazy(tensor) or not (is_plain(tensor) or is_sharded(tensor)):
        return None
    for prefix, module in _chain(model, name).items():
        if _own_method(module) or _initialises_children(module):
            of_module, within = copies.setdefault(prefix, Copies(module, prefix)), name.removeprefix(prefix)
            how = of_module.methods_for(within)
            return Initialiser(how, partial(of_module.value, within)) if how else None
    return None


class Copies:
    """Copies of a module that initialises tensors in it. The names of the tensors are those within the module."""

    def __init__(self, top: nn.Module, prefix: str) -> None:
        self._top, self._prefix = top, prefix
        self._methods: dict[str, dict[str, str]] = {}
        """The methods that write a tensor, by the prefix of its module and by its name."""
        self._trial: nn.Module | None = None
        self._requested: dict[str, None] = {}
        self._values: dict[str, torch.Tensor] = {}

    def methods_for(self, name: str) -> str:
        """The methods that write a tensor; empty if they do not write the whole tensor."""
        owner = _owner(name)
        if owner not in self._methods:
            self._methods[owner] = self._try(owner)
        if how := self._methods[owner].get(name, ""):
            self._requested[name] = None
        return how

    def value(self, name: str) -> torch.Tensor:
        """Returns the value of a tensor. The first call computes all requested values, in the constructor's order."""
        if name not in self._values:
            self._values |= self._make([*{**self._requested, name: None}])
            self._requested.clear()
        return self._values.pop(name)

    def _try(self, owner: str) -> dict[str, str]:
        """Runs the methods for one module on meta. Returns the methods by the names of the tensors that they write."""
        fills: list[tuple[str, dict[int, int]]] = []
        try:
            if self._trial is None:
                self._trial = self._copied(())
            tensors = _own_tensors(self._trial, owner)
            sizes = {name: (storage_id(tensor), max(tensor.numel(), 1)) for name, tensor in tensors.items()}
            with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
                for label, call in _calls(self._trial, {owner}):
                    with recorded_fills() as filled:
                        call()
                    fills.append((label, filled))
        except Exception as error:  # code that reads values or cannot be copied; its writes are unknown
            keep_interrupt(error)
            return {}
        methods: dict[str, str] = {}
        for name, (storage, count) in sizes.items():
            if sum(filled.get(storage, 0) for _, filled in fills) >= count:
                methods[name] = ", ".join(dict.fromkeys(label for label, filled in fills if storage in filled))
        return methods

    def _make(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Computes the requested values in one run of the methods."""
        name, label = names[0], "a copy of the module"
        try:
            module_copy = self._copied(names)
            with torch.inference_mode(False), torch.no_grad():
                for label, call in _calls(module_copy, set(map(_owner, names))):  # noqa: B007  (for the error)
                    call()
            values = {name: _own_tensors(module_copy, name)[name].detach() for name in names}
            for name, tensor in values.items():
                label, original = self.methods_for(name), _own_tensors(self._top, name)[name]
                if (tensor.shape, tensor.dtype) != (original.shape, original.dtype) or tensor.is_meta:
                    raise ValueError(f"it made {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}")
                if tensor.dtype in _CAN_BE_NAN and bool(tensor.isnan().any()):
                    raise ValueError("it did not write all elements, or wrote NaN")
        except Exception as error:
            raise ModelCodeError(
                "the model's own initialisation did not compute a value; nothing has been changed",
                where=self._prefix + name,
                found=f"{label}: {type(error).__name__}: {error}",
                remedy=f"pass the value: rules=[modelstate.rules.Fill({self._prefix + name!r}, value)]",
            ) from error
        return values

    @torch.inference_mode(False)
    def _copied(self, names: Iterable[str]) -> nn.Module:
        """Returns a copy in which the tensors of these names are filled with NaN, and all others are on meta."""
        real = {id(_own_tensors(self._top, name)[name]) for name in names}
        tensors = {id(tensor): tensor for tensor in tensors_of(self._top.modules()) if not is_lazy(tensor)}
        return without_fsdp(self._top, {key: _empty(tensor, key in real) for key, tensor in tensors.items()})


def _empty(tensor: torch.Tensor, with_memory: bool) -> torch.Tensor:
    if with_memory and not is_sharded(tensor):
        fresh = torch.empty_like(tensor, device="cpu" if tensor.is_meta else tensor.device, requires_grad=False)
    else:  # a DTensor whole, and on the CPU, whose random generator the ranks of a load share
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if with_memory else "meta")
    if with_memory and fresh.dtype in _CAN_BE_NAN:
        fresh.fill_(float("nan"))
    return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh


def _calls(top: nn.Module, owners: set[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields the calls that initialise some modules, with their names, in the order of the constructor of `top`."""
    modules = {prefix: module for owner in owners for prefix, module in _chain(top, owner).items()}
    ordered = list(_children_first("", modules))
    for prefix in ordered:
        if name := _own_method(modules[prefix]):
            yield f"{type(modules[prefix]).__name__}.{name}", getattr(modules[prefix], name)
    for prefix in ordered:
        above = [module for module in _chain(top, prefix).values() if _initialises_children(module)]
        if above:
            method = getattr(above[-1], _INITIALISES_CHILDREN)
            yield f"{type(above[-1]).__name__}.{_INITIALISES_CHILDREN}", partial(method, modules[prefix])


def _children_first(prefix: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    for name in own_modules(modules[prefix]):
        if f"{prefix}{name}." in modules:
            yield from _children_first(f"{prefix}{name}.", modules)
    yield prefix


def _owner(name: str) -> str:
    """The prefix of the module that has a tensor: "encoder.0." of "encoder.0.weight"."""
    return name[: name.rfind(".") + 1]


def _chain(root: nn.Module, name: str) -> dict[str, nn.Module]:
    """Returns the modules from the root to the one that has this name, by the prefixes of their names."""
    chain, prefix = {"": root}, ""
    for part in name.split(".")[:-1]:
        child = own_modules(chain[prefix])[part]
        assert child is not None
        prefix += f"{part}."
        chain[prefix] = child
    return chain


def _own_tensors(root: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """The parameters and buffers of the module that has this name, by their whole names."""
    owner = _owner(name)
    module = _chain(root, owner)[owner]
    own = {**own_parameters(module), **own_buffers(module)}
    return {owner + name: tensor for name, tensor in own.items() if tensor is not None}


def _own_method(module: nn.Module) -> str:
    """The method without arguments that initialises a module's own tensors; empty if there is none."""
    return next((name for name in _METHODS if _can_be_called(getattr(module, name, None))), "")


def _initialises_children(module: nn.Module) -> bool:
    """Whether a module initialises its children, as models of Hugging Face do."""
    method = getattr(module, _INITIALISES_CHILDREN, None)
    return not _can_be_called(method) and _can_be_called(method, module)


def _can_be_called(method: object, *arguments: object) -> bool:
    try:
        inspect.signature(method).bind(*arguments)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        keep_interrupt(error)
        return False
    return True
