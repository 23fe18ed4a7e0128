"""Modules of torch from the inside: their tables of tensors, the hooks of their state dicts, and replaced methods."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from itertools import chain
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from modelstate.errors import ModelCodeError, OptionError, code_errors
from modelstate.forks import fork_safe_lock
from modelstate.torch_compat.private import stock_apply
from modelstate.torch_compat.sharding import is_hook_of_fsdp


def state_dict_of(module: torch.nn.Module, *, keep_vars: bool = False) -> Any:
    """Returns `module.state_dict(keep_vars=keep_vars)`, which is a dict unless the module's own code returns another
    object. Raises `ModelCodeError` where that code raises.
    """
    with code_errors(ModelCodeError, "the module's own state_dict raised", where=type(module).__qualname__):
        return module.state_dict(keep_vars=keep_vars)


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The module's own dict of its parameters, without those of its submodules; None is a parameter without a value."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own dict of its buffers, without those of its submodules; None is a buffer without a value."""
    return module._buffers


def own_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The module's own dict of its direct submodules; None is a submodule that was assigned None."""
    return module._modules


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """The names of the module's own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set


class ModuleTables(NamedTuple):
    """A module under one of its names, and its own tensors. None is a tensor without a value."""

    prefix: str
    """The prefix of the names of its tensors: "encoder.0."; empty for the root."""
    module: torch.nn.Module
    parameters: Mapping[str, torch.nn.Parameter | None]
    buffers: Mapping[str, torch.Tensor | None]


def module_tables(root: torch.nn.Module) -> list[ModuleTables]:
    """Returns every module under each of its names, in the order of `state_dict`.

    Raises `OptionError` where a module contains itself, and so has names without end.
    """
    found: list[ModuleTables] = []
    stack: list[tuple[str, torch.nn.Module, tuple[tuple[str, torch.nn.Module], ...]]] = [("", root, ())]
    while stack:
        prefix, module, above = stack.pop()
        # The constructor of a named tuple takes twice as long.
        found.append(tuple.__new__(ModuleTables, (prefix, module, module._parameters, module._buffers)))
        if modules := module._modules:
            if outer := [name for name, each in above if each is module]:
                name = prefix.removesuffix(".")
                raise OptionError(
                    "a module contains itself, so its tensors have names without end",
                    where=name,
                    expected="a tree of modules",
                    found=f"{name} is {outer[0].removesuffix('.') or 'the model itself'}",
                    remedy=f"do not register it: set {name.rpartition('.')[2]} to a tuple with the module",
                )
            path = (*above, (prefix, module))
            children = [(f"{prefix}{name}.", child, path) for name, child in modules.items() if child is not None]
            stack.extend(reversed(children))
    return found


def modules_of(root: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns every module once."""
    found: dict[int, torch.nn.Module] = {}
    stack: list[torch.nn.Module | None] = [root]
    while stack:
        module = stack.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            stack.extend(module._modules.values())
    return list(found.values())


def named_modules_of(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Returns the modules by all of their paths."""
    return {tables.prefix.removesuffix("."): tables.module for tables in module_tables(root)}


def tensors_of(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Returns the modules' own parameters and buffers; a tensor appears once for each of its names."""
    return [
        tensor
        for module in modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]


def needs_protocol(modules: Mapping[str, torch.nn.Module], names: Collection[object], versions: object) -> bool:
    """Whether a load makes the calls of torch's loading protocol: it may run code of the modules, or depend on them.

    Such code is hooks other than FSDP2's, and methods that override torch's own. The override of torch's BatchNorm does
    not count where it does nothing: it adds a counter that old files lack.

    Args:
        modules: The modules by the prefixes of their names, such as "encoder.0.".
        names: The names of the values.
        versions: The versions of the modules that were saved with the values; None without versions.
    """
    # The versions may contain the flag that torch's `assign=True` leaves there.
    saved_versions = versions.values() if isinstance(versions, Mapping) else () if versions is None else (None,)
    asks = any(not isinstance(saved, Mapping) or "assign_to_params_buffers" in saved for saved in saved_versions)
    if asks or not {str}.issuperset(map(type, names)):
        return True
    held = modules.values()
    tables = [table for module in held for table in (module._parameters, module._buffers, module._modules) if table]
    if "." in "".join(chain.from_iterable(table.keys() for table in tables)):
        return True
    found = [hooks for m in held for hooks in (m._load_state_dict_pre_hooks, m._load_state_dict_post_hooks) if hooks]
    if found and not all(is_hook_of_fsdp(hook) for hooks in found for hook in hooks.values()):
        return True
    stock, one_of_each = torch.nn.Module.set_extra_state, {type(module): module for module in held}
    if any(cls.set_extra_state is not stock for cls in one_of_each):
        return True
    if [module for module in held if "load_state_dict" in module.__dict__]:  # without a generator: for speed
        return True
    if any(overrides(module, "load_state_dict") for module in one_of_each.values()):
        return True
    patched = [module for module in held if "_load_from_state_dict" in module.__dict__]
    overriding = [module for module in (*one_of_each.values(), *patched) if overrides_loading(module)]
    if not all(map(_only_adds_counter, overriding)):
        return True
    counting = {type(module) for module in overriding}
    counters = (prefix for prefix, module in modules.items() if type(module) in counting) if counting else ()
    return any(f"{prefix}num_batches_tracked" not in names for prefix in counters)


def _only_adds_counter(module: torch.nn.Module) -> bool:
    """Whether `_load_from_state_dict` is that of BatchNorm, which adds `num_batches_tracked` where values lack it."""
    if getattr(module._load_from_state_dict, "__func__", None) is not _NormBase._load_from_state_dict:
        return False
    behind: Any = super(_NormBase, module)
    return not overrides_loading(behind)


def overrides_loading(module: torch.nn.Module) -> bool:
    """Whether `_load_from_state_dict` of a module is not torch's own, nor what a `MethodOverride` has put there."""
    function = getattr(module._load_from_state_dict, "__func__", None)
    return getattr(getattr(function, "__code__", None), "co_filename", "") not in _STOCK_OR_REPLACED


def overrides(module: torch.nn.Module, *names: str) -> bool:
    """Whether the class of a module, or the module itself, overrides each of these methods of torch's modules."""
    for name in names:
        method = getattr(type(module), name)
        is_stock = method is getattr(torch.nn.Module, name) and name not in module.__dict__
        if is_stock or getattr(method, "__module__", "").partition(".")[0] == "torch":
            return False
    return True


def changes_state(module: torch.nn.Module) -> bool:
    """Whether code of a module, or of one in it, takes part in its `state_dict`: an override, or a hook."""
    for inner in module.modules():
        held: Any = inner
        hooks = [*held._state_dict_hooks.values(), *held._state_dict_pre_hooks.values()]
        if overrides(inner, "state_dict") or not all(map(is_hook_of_fsdp, hooks)):
            return True
    return False


def names_not_loaded(module: torch.nn.Module, state: Mapping[str, object]) -> list[str]:
    """Returns the names of a module's own state dict that neither a tensor of it has, nor code of it could take."""
    modules = {f"{path}." if path else "": inner for path, inner in module.named_modules()}
    for inner in modules.values():
        has_override = overrides_loading(inner) and not _only_adds_counter(inner)
        if overrides(inner, "load_state_dict") or has_override or load_pre_hooks(inner) or load_post_hooks(inner):
            return []
    stock = torch.nn.Module
    getting = [prefix for prefix, inner in modules.items() if type(inner).get_extra_state is not stock.get_extra_state]
    extra = {
        f"{prefix}_extra_state": type(modules[prefix]).set_extra_state is not stock.set_extra_state
        for prefix in getting
    }
    if not changes_state(module):
        return [name for name, is_loaded in extra.items() if not is_loaded]
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    known = {name for name, _ in tensors}
    return [str(name) for name in state if name not in known and not extra.get(name)]


def load_pre_hooks(module: torch.nn.Module) -> list[Callable[..., object]]:
    """The module's own pre-hooks of `load_state_dict`, in their order, without those of FSDP2."""
    return [hook for hook in module._load_state_dict_pre_hooks.values() if not is_hook_of_fsdp(hook)]


def load_post_hooks(module: torch.nn.Module) -> list[Callable[..., object]]:
    """The module's own post-hooks of `load_state_dict`, in their order, without those of FSDP2."""
    return [hook for hook in module._load_state_dict_post_hooks.values() if not is_hook_of_fsdp(hook)]


def load_from_state_dict(owner: Any) -> Callable[..., None]:
    """The method `_load_from_state_dict` of a module, or of a `super()` of one."""
    load: Callable[..., None] = owner._load_from_state_dict
    return load


IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys
"""What `torch.nn.Module.load_state_dict` returns."""


def computed_attributes(module: torch.nn.Module) -> set[str]:
    """The attributes that pre-hooks set before each call, such as those of `weight_norm` and pruning."""
    hooks = module._forward_pre_hooks.values()
    names = [getattr(hook, attribute, None) for hook in hooks for attribute in ("name", "_tensor_name")]
    return {name for name in names if isinstance(name, str)}


def has_custom_apply(module: torch.nn.Module) -> bool:
    """Whether the class of a module, or the module itself, overrides `Module._apply`."""
    return type(module)._apply not in (torch.nn.Module._apply, stock_apply) or "_apply" in module.__dict__


def call_apply(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Calls the module's own `_apply`."""
    module._apply(function)  # type: ignore[no-untyped-call]


def is_initialised(module: torch.nn.Module) -> bool:
    """Whether `nn.Module.__init__` has been called for a module."""
    return "_buffers" in vars(module)


_TABLES = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
Hook = Callable[..., Any]


@contextmanager
def without_state_dict_hooks(module: nn.Module) -> Iterator[None]:
    """Disables all state-dict hooks of a module and its submodules within a block.

    These are the hooks that `state_dict` and `load_state_dict` call before and after their work. After the block, also
    after an exception, every hook is at its place again, in the same order. Removing a handle within the block removes
    its hook as usual; a hook that is registered within the block works at once, and stays. The hooks of a copy of the
    module that is made within the block are enabled.

    Blocks may be nested, and entered by several threads: a hook is enabled again when the last block that disabled it
    ends. Hooks belong to the module and not to a thread, so another thread's `state_dict` runs without them as well.
    Overrides of `_save_to_state_dict` and `_load_from_state_dict` are not hooks, and stay active.

    Args:
        module: The module.

    Returns:
        A context manager.

    Raises:
        Exception: Only exceptions of the block are passed on.

    Examples:
        >>> with modelstate.serve.without_state_dict_hooks(module):
        ...     state = module.state_dict()
    """
    disabled: list[tuple[dict[int, Hook], int, _DisabledHook]] = []
    try:
        with _lock:
            for table in [getattr(part, name, {}) for part in module.modules() for name in _TABLES]:
                for key, hook in table.copy().items():
                    replacement = hook if isinstance(hook, _DisabledHook) else _DisabledHook(hook)
                    replacement.blocks += 1
                    disabled.append((table, key, replacement))
                    table[key] = replacement
        yield
    finally:
        with _lock:
            for table, key, replacement in disabled:
                replacement.blocks -= 1
                present: object = table.get(key)
                if not replacement.blocks and present is replacement:
                    table[key] = replacement.hook


class _DisabledHook:
    """Replaces a hook in its table, under the same id, and does nothing when it is called.

    The table and its keys stay the same objects, since handles refer to them: a handle that is removed within the block
    removes its hook for good, and a hook that is registered within the block comes after the others.
    """

    __slots__ = ("blocks", "hook")

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.blocks = 0
        """The number of blocks, in all threads, that disable the hook."""

    def __call__(self, *args: object, **named: object) -> None:
        pass

    def __reduce__(self) -> tuple[Callable[[Hook], Hook], tuple[Hook]]:
        return _identity, (self.hook,)  # also for copies: no block would enable the hook of a copy


def _identity(hook: Hook) -> Hook:
    return hook


_lock = fork_safe_lock()


def is_cast_of_torch(fn: Callable[..., object]) -> bool:
    """Whether a function is the one that `Module.to`, `.half()` or their like pass to `_apply`.

    It only changes dtype and device; with a memory format it also changes strides, and is left out.
    """
    code = getattr(fn, "__code__", None)
    if not isinstance(code, CodeType) or code not in _codes_of_casts():
        return False
    free = dict(zip(code.co_freevars, getattr(fn, "__closure__", None) or (), strict=True))
    memory_format = free.get("convert_to_format")
    return memory_format is None or memory_format.cell_contents is None


@cache
def _codes_of_casts() -> frozenset[object]:
    methods = (nn.Module.to, nn.Module.float, nn.Module.double, nn.Module.half, nn.Module.bfloat16, nn.Module.cpu)
    consts = [const for method in methods for const in getattr(getattr(method, "__code__", None), "co_consts", ())]
    return frozenset(const for const in consts if isinstance(const, CodeType))


def compiled_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that `torch.compile` was called with, where this is what it returned."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or not isinstance(module, frames.OptimizedModule):
        return None
    found: torch.nn.Module = module._orig_mod
    return found


def unwrapped(module: torch.nn.Module, *, keep_compiled: bool = False) -> torch.nn.Module:
    """The module inside the wrappers of `torch.compile`, `DataParallel` and `DistributedDataParallel`; else itself.

    These have no state of their own, and put their name in front of every name of it. A wrapper that has hooks for its
    state dict, or state that a subclass of it has added, is a module like any other.
    """
    while True:
        inner = None if keep_compiled else compiled_module(module)
        if inner is None and isinstance(module, _PARALLEL):
            inner = module.module
        if inner is None or len(module._modules) != 1 or module._parameters or module._buffers or _has_hooks(module):
            return module
        module = inner


def broadcast_buffers(module: torch.nn.Module, ranks: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yields the buffers that DistributedDataParallel copies from the first of the ranks to all of them."""
    for inner in module.modules():
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel) and inner.broadcast_buffers:
            wrapper = inner
            if torch.distributed.get_process_group_ranks(wrapper.process_group) == list(ranks):
                named = wrapper.module.named_buffers()
                yield from (buffer for name, buffer in named if name not in wrapper.parameters_to_ignore)


_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether code runs when the state of a module itself is taken or loaded."""
    hooks = any(getattr(module, table) for table in _TABLES)
    return hooks or type(module).set_extra_state is not torch.nn.Module.set_extra_state


_MODULE_FILE = torch.nn.Module.named_parameters.__code__.co_filename
_STOCK_OR_REPLACED = (_MODULE_FILE, overrides_loading.__code__.co_filename)


def compiled_like(compiled: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
    """Another instance under the compilation of a compiled one: the same backend and options, the same code."""
    made: torch.nn.Module = type(compiled)(module, compiled.dynamo_ctx)
    return made


def has_compiled_call(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` has been called."""
    return module._compiled_call_impl is not None


# Methods of torch's classes that are replaced while something needs it. PyTorch has no extension point for three
# things: to take the writing out of the loading protocol, to build modules whose parameters have no memory, and to keep
# references when a module is converted. One mechanism does all three.


class MethodOverride:
    """A method of a class, and the function that can replace it.

    Args:
        owner: the class.
        name: the name of the method, or of a property that can only be read.
        function: called as `function(stock, *args, **kwargs)`, where `stock` is the method at the time of the import.
        over_others: whether it also replaces a method that another library has installed.
    """

    def __init__(self, owner: object, name: str, function: Callable[..., object], *, over_others: bool = True) -> None:
        self._owner, self._name, self._over_others = owner, name, over_others
        # The method of the import: a method that is installed later may call the replacement.
        stock = getattr(owner, name)

        @wraps(stock)
        def replacement(*args: object, **kwargs: object) -> object:
            return function(stock, *args, **kwargs)

        self.replacement: Callable[..., object] = replacement
        self._installed: object = replacement
        if name == "__new__":
            self._installed = staticmethod(replacement)
        elif not callable(stock):
            self._installed = property(replacement)
        self._before: object = None

    def install(self) -> None:
        """Puts the replacement in place, if it is not there already."""
        own = vars(self._owner).get(self._name)
        present = getattr(self._owner, self._name)
        is_stock = getattr(getattr(present, "__code__", None), "co_filename", "") == _MODULE_FILE
        if own is self._installed or not (self._over_others or is_stock):
            return
        self._before = own
        setattr(self._owner, self._name, self._installed)

    def remove(self) -> None:
        """Puts the previous method back, unless another library has installed its own since, which may call this."""
        if vars(self._owner).get(self._name) is not self._installed:
            return
        if self._before is None:
            delattr(self._owner, self._name)  # it is inherited
        else:
            setattr(self._owner, self._name, self._before)


class Overrides:
    """Methods that are replaced while at least one thread uses the replacements.

    Args:
        methods: the methods.
        holds: returns whether they are also replaced while no thread uses them. Call `update` when it changes.

    Examples:
        >>> overrides = Overrides(MethodOverride(torch.nn.Module, "_apply", function))
        >>> with overrides.used():
        ...     module.to(torch.bfloat16)
    """

    def __init__(self, *methods: MethodOverride, holds: Callable[[], bool] = lambda: False) -> None:
        self._methods, self._holds = methods, holds
        self._uses = 0
        self._lock = fork_safe_lock()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Replaces the methods within the block, which sees to it that the functions only act in this thread."""
        self.update(1)
        try:
            yield
        finally:
            self.update(-1)

    def update(self, uses: int = 0) -> None:
        """Installs or removes the replacements as the uses say, which change by a number, and `holds`."""
        with self._lock:
            self._uses += uses
            is_used = bool(self._uses) or self._holds()
            for method in self._methods:
                if is_used:
                    method.install()
                else:
                    method.remove()


class ModuleContainer(nn.Module):
    """Modules under dotted paths of any spelling, so that several modules are loaded as one.

    Unlike `nn.ModuleDict`, a key may be the name of a method, such as "forward". Loading code of the modules, such as
    hooks, sees the names that a load of the module alone has.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for path, module in modules.items():
            *parents, key = path.split(".")
            own_modules(submodule_at(self, parents, partial(ModuleContainer, {})))[key] = module


def submodule_at(root: nn.Module, path: Iterable[str], create: Callable[[], nn.Module] = nn.Module) -> nn.Module:
    """Returns the submodule at a path of any names, also those of methods. Modules are created where there are none."""
    for name in path:
        submodule = own_modules(root).get(name)
        if submodule is None:
            submodule = own_modules(root)[name] = create()
        root = submodule
    return root
