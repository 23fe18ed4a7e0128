"""`Initialisers`: initial values for tensors of a model, computed by the model's own code on a copy of its modules.

The constructor of a module calls `reset_parameters`. A model of Hugging Face then calls its `_init_weights(module)` for
every module, children first. This module makes the same calls on a copy of the module that owns the tensor, and of the
modules above it that initialise their children. Only the requested tensors have memory in the copy, so the model is not
changed and no large copy is allocated.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.errors import ModelCodeError, keep_interrupt
from modelstate.torch_compat.modules import own_buffers, own_modules, own_parameters
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


class Initialisers:
    """Finds the initialisers of the tensors of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[str, _Copies] = {}

    def find(self, name: str) -> Initialiser | None:
        """Returns the initialiser of a tensor; None if no method of its modules writes the whole tensor.

        The methods are called on a copy without memory. The model and the random generator of the CPU do not change.
        """
        path, _, attribute = name.rpartition(".")
        chain = list(_chain(self._model, path))
        tensor = _own_tensors(chain[-1][1]).get(attribute)
        if tensor is None or is_lazy(tensor) or not (is_plain(tensor) or is_sharded(tensor)):
            return None
        initialising = [place for place in chain if _own_method(place[1]) or _initialises_children(place[1])]
        if not initialising:
            return None
        top_path, top = initialising[0]
        copies = self._copies.setdefault(top_path, _Copies(top, top_path))
        within = name[len(top_path) + 1 :] if top_path else name
        how = copies.methods_for(within)
        return Initialiser(how, partial(copies.value, within)) if how else None


class _Copies:
    """Copies of a module that initialises tensors below it."""

    def __init__(self, top: nn.Module, path: str) -> None:
        self._top, self._path = top, path
        self._tried: dict[str, dict[str, str]] = {}
        self._trial: nn.Module | None = None
        self._wanted: dict[str, None] = {}
        self._values: dict[str, torch.Tensor] = {}
        self._has_run = False

    def methods_for(self, name: str) -> str:
        """The methods that write a tensor; empty if they do not write the whole tensor."""
        owner = name.rpartition(".")[0]
        if owner not in self._tried:
            self._tried[owner] = self._try(owner)
        how = self._tried[owner].get(name, "")
        if how:
            self._wanted[name] = None
        return how

    def value(self, name: str) -> torch.Tensor:
        """Returns the value of a tensor. The first call computes all requested values, in the constructor's order."""
        if name not in self._values:
            self._values |= self._make([name] if self._has_run else self._wanted)
            self._has_run = True
        return self._values.pop(name)

    def _try(self, owner: str) -> dict[str, str]:
        """Runs the methods for one module on meta. Returns the methods by the names of the tensors that they write."""
        try:
            trial = self._trial = self._copied(()) if self._trial is None else self._trial
            tensors = _own_tensors(dict(_chain(trial, owner))[owner])
            before = {attribute: (storage_id(tensor), max(tensor.numel(), 1)) for attribute, tensor in tensors.items()}
            filled: Counter[int] = Counter()
            writers: dict[int, dict[str, None]] = {}
            with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
                for label, call in _calls(trial, {owner}):
                    with recorded_fills() as written:
                        call()
                    filled.update(written)
                    for storage in written:
                        writers.setdefault(storage, {})[label] = None
        except Exception as error:  # code that reads values or cannot be copied; its writes are unknown
            keep_interrupt(error)
            return {}
        prefix = f"{owner}." if owner else ""
        whole = {attribute: storage for attribute, (storage, count) in before.items() if filled[storage] >= count}
        return {prefix + attribute: ", ".join(writers[storage]) for attribute, storage in whole.items()}

    def _make(self, wanted: Iterable[str]) -> dict[str, torch.Tensor]:
        """Computes the requested values in one run of the methods."""
        names, label = list(wanted), "a copy of the module"
        owners = {name.rpartition(".")[0] for name in names}
        try:
            module_copy = self._copied(names)
            with torch.inference_mode(False), torch.no_grad():
                for label, call in _calls(module_copy, owners):  # noqa: B007  (for the error)
                    call()
            values = {name: _at(module_copy, name).detach() for name in names}
        except Exception as error:
            raise self._failed(names[0], f"{label}: {type(error).__name__}: {error}") from error
        for name, tensor in values.items():
            original = _at(self._top, name)
            if (tensor.shape, tensor.dtype) != (original.shape, original.dtype) or tensor.is_meta:
                found = f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
                raise self._failed(name, f"{self.methods_for(name)} made {found}")
            if tensor.dtype in _CAN_BE_NAN and bool(tensor.isnan().any()):
                raise self._failed(name, f"{self.methods_for(name)} did not write all elements, or wrote NaN")
        return values

    def _failed(self, name: str, why: str) -> ModelCodeError:
        whole = f"{self._path}.{name}" if self._path else name
        return ModelCodeError(
            "the model's own initialisation did not compute a value; nothing has been changed",
            where=whole,
            found=why,
            remedy=f"pass the value: rules=[modelstate.rules.Fill({whole!r}, value)]",
        )

    @torch.inference_mode(False)
    def _copied(self, wanted: Iterable[str]) -> nn.Module:
        """Returns a copy in which the requested tensors are filled with NaN, and all others are on meta."""
        real = {id(_at(self._top, name)) for name in wanted}
        memo: dict[int, object] = {}
        for module in self._top.modules():
            for tensor in _own_tensors(module).values():
                if not is_lazy(tensor) and id(tensor) not in memo:
                    memo[id(tensor)] = _empty(tensor, id(tensor) in real)
        return without_fsdp(self._top, memo)


def _empty(tensor: torch.Tensor, with_memory: bool) -> torch.Tensor:
    if not with_memory:
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    elif is_sharded(tensor):  # whole, and on the CPU, whose random generator the ranks of a load share
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    else:
        fresh = torch.empty_like(tensor, device="cpu" if tensor.is_meta else tensor.device, requires_grad=False)
    if with_memory and fresh.dtype in _CAN_BE_NAN:
        fresh.fill_(float("nan"))
    return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh


def _calls(top: nn.Module, owners: set[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields the calls that initialise some modules, with their names, in the order of the constructor of `top`."""
    modules = {path: module for owner in owners for path, module in _chain(top, owner)}
    ordered = list(_children_first(top, "", modules))
    for path in ordered:
        if name := _own_method(modules[path]):
            yield f"{type(modules[path]).__name__}.{name}", getattr(modules[path], name)
    for path in ordered:
        above = [module for _, module in _chain(top, path) if _initialises_children(module)]
        if above:
            method = getattr(above[-1], _INITIALISES_CHILDREN)
            yield f"{type(above[-1]).__name__}.{_INITIALISES_CHILDREN}", partial(method, modules[path])


def _chain(root: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules from the root to a path, with their paths."""
    yield "", root
    at, module = "", root
    for name in path.split(".") if path else ():
        child = own_modules(module)[name]
        assert child is not None
        at, module = f"{at}.{name}" if at else name, child
        yield at, module


def _children_first(module: nn.Module, path: str, wanted: dict[str, nn.Module]) -> Iterator[str]:
    for name in own_modules(module):
        below = f"{path}.{name}" if path else name
        if below in wanted:
            yield from _children_first(wanted[below], below, wanted)
    yield path


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module itself."""
    own = {**own_parameters(module), **own_buffers(module)}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _at(root: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    tensor: torch.Tensor = getattr(dict(_chain(root, path))[path], attribute)
    return tensor


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
