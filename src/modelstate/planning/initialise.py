"""First values for tensors of a model, made by the model's own initialisation on a copy of its modules.

A constructor calls `reset_parameters` of each module as it makes it, and a model of Hugging Face then calls
`_init_weights(module)` of the model for every module, children first. The same calls are made here, on a copy: of the
module that owns the tensor, and of those above it that initialise what is below them. In the copy only the wanted
tensors have memory, so nothing of the model is touched and nothing large is made.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.errors import ModelCodeError
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import own_buffers, own_modules, own_parameters, recorded_fills, storage_id

_METHODS = ("reset_parameters", "_reset_parameters", "_init_weights")
_OF_OTHERS = "_init_weights"
_CAN_BE_NAN = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


@dataclass(frozen=True, slots=True)
class Initialiser:
    """What makes the first value of a tensor."""

    how: str
    """The methods that do: "Linear.reset_parameters"."""
    make: Callable[[], torch.Tensor]
    """Makes the value, anew by each call. Raises `ModelCodeError`."""


class Initialisers:
    """Finds what initialises the tensors of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[str, _Copies] = {}
        self._found: dict[str, Initialiser | None] = {}

    def find(self, name: str) -> Initialiser | None:
        """The initialiser of the tensor of this name; None where no method of its modules writes all of it.

        The methods are called on a copy without memory. The model and the random generator of the CPU are left alone.
        """
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> Initialiser | None:
        path, _, attribute = name.rpartition(".")
        chain = list(_chain(self._model, path))
        tensor = _own(chain[-1][1], attribute)
        if tensor is None or is_lazy(tensor) or not is_plain(tensor):
            return None
        initialising = [(above, module) for above, module in chain if _own_method(module) or _takes_others(module)]
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
        """The methods that write the tensor of this name; empty where they do not write all of it."""
        owner = name.rpartition(".")[0]
        if owner not in self._tried:
            self._tried[owner] = self._try(owner)
        how = self._tried[owner].get(name, "")
        if how:
            self._wanted[name] = None
        return how

    def value(self, name: str) -> torch.Tensor:
        """The value of a tensor; those of all that are wanted are made at once, as the constructor makes them."""
        if name not in self._values:
            self._values |= self._make([name] if self._has_run else self._wanted)
            self._has_run = True
        return self._values.pop(name)

    def _try(self, owner: str) -> dict[str, str]:
        """What the methods write of the tensors of one module, found out without memory."""
        try:
            twin = self._trial = self._copied(()) if self._trial is None else self._trial
            module = dict(_chain(twin, owner))[owner]
            before = {
                attribute: (tensor, storage_id(tensor))
                for attribute, tensor in (*own_parameters(module).items(), *own_buffers(module).items())
                if tensor is not None
            }
            filled: dict[int, int] = {}
            writers: dict[int, list[str]] = {}
            with torch.random.fork_rng(devices=[]):
                for label, call in _calls(twin, {owner}):
                    with recorded_fills() as written:
                        call()
                    for storage, count in written.items():
                        filled[storage] = filled.get(storage, 0) + count
                        writers.setdefault(storage, []).append(label)
        except Exception:  # code that reads values, or cannot be copied: nothing is known of what it writes
            return {}
        found: dict[str, str] = {}
        for attribute, (tensor, storage) in before.items():
            if filled.get(storage, 0) >= max(tensor.numel(), 1):
                found[f"{owner}.{attribute}" if owner else attribute] = ", ".join(dict.fromkeys(writers[storage]))
        return found

    def _make(self, wanted: Iterable[str]) -> dict[str, torch.Tensor]:
        """The values of the wanted tensors, all of which one run of the methods makes."""
        names = list(wanted)
        label = "a copy of the module"
        try:
            twin = self._copied(names)
            for label, call in _calls(twin, {name.rpartition(".")[0] for name in names}):  # noqa: B007  (for the error)
                call()
            made = {name: _at(twin, name).detach() for name in names}
        except Exception as error:
            raise self._failed(names[0], f"{label}: {type(error).__name__}: {error}") from error
        for name, tensor in made.items():
            true = _at(self._top, name)
            if (tensor.shape, tensor.dtype) != (true.shape, true.dtype) or tensor.is_meta:
                found = f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
                raise self._failed(name, f"{self.methods_for(name)} made {found}")
            if tensor.dtype in _CAN_BE_NAN and bool(tensor.isnan().any()):
                raise self._failed(name, f"{self.methods_for(name)} left elements as they were, or made NaN")
        return made

    def _failed(self, name: str, why: str) -> ModelCodeError:
        whole = f"{self._path}.{name}" if self._path else name
        return ModelCodeError(
            "the model's own initialisation did not make a value; nothing has been changed",
            where=whole,
            found=why,
            remedy=f"give the value: rules=[modelstate.rules.Fill({whole!r}, value)]",
        )

    @torch.inference_mode(False)
    def _copied(self, wanted: Iterable[str]) -> nn.Module:
        """A copy in which the wanted tensors have memory, full of NaN, and all others have none."""
        real = {id(_at(self._top, name)) for name in wanted}
        memo: dict[int, object] = {}
        for module in self._top.modules():
            for tensor in (*own_parameters(module).values(), *own_buffers(module).values()):
                if tensor is not None and not is_lazy(tensor) and id(tensor) not in memo:
                    memo[id(tensor)] = _empty(tensor, id(tensor) in real)
        return copy.deepcopy(self._top, memo)


def _empty(tensor: torch.Tensor, with_memory: bool) -> torch.Tensor:
    if with_memory:
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        fresh = torch.empty_like(tensor, device=device, requires_grad=False)
        if fresh.dtype in _CAN_BE_NAN:
            fresh.fill_(float("nan"))
    else:
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh


def _calls(top: nn.Module, owners: set[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The calls that initialise some modules, as the constructor of `top` makes them, each with its name."""
    modules: dict[str, nn.Module] = {}
    for owner in owners:
        modules.update(_chain(top, owner))
    order = {path: turn for turn, path in enumerate(_children_first(top, "", modules))}
    ordered = sorted(modules, key=order.__getitem__)
    for path in ordered:
        if name := _own_method(modules[path]):
            yield _named(modules[path], name), partial(_call, getattr(modules[path], name))
    for path in ordered:
        above = [module for _, module in _chain(top, path) if _takes_others(module)]
        if above:
            method = getattr(above[-1], _OF_OTHERS)
            yield _named(above[-1], _OF_OTHERS), partial(_call, method, modules[path])


@torch.inference_mode(False)
@torch.no_grad()
def _call(method: Callable[..., object], *arguments: object) -> None:
    method(*arguments)


def _named(module: nn.Module, method: str) -> str:
    return f"{type(module).__name__}.{method}"


def _chain(root: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules from the root to the one at a path, with their paths."""
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


def _own(module: nn.Module, attribute: str) -> torch.Tensor | None:
    found = own_parameters(module).get(attribute)
    return own_buffers(module).get(attribute) if found is None else found


def _at(root: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    found: torch.Tensor = getattr(dict(_chain(root, path))[path], attribute)
    return found


def _own_method(module: nn.Module) -> str:
    """The method by which a module initialises its own tensors, without arguments; empty where it has none."""
    return next((name for name in _METHODS if _can_be_called(getattr(module, name, None))), "")


def _takes_others(module: nn.Module) -> bool:
    """Whether a module initialises those below it, as the models of Hugging Face do."""
    method = getattr(module, _OF_OTHERS, None)
    return not _can_be_called(method) and _can_be_called(method, module)


def _can_be_called(method: Any, *arguments: object) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True
