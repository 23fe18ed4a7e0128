"""The kinds of programs that `Live` serves: their interface, modules, and what they have in common.

A `Target` makes the programs, one for each version; requests call a `Program`. Exported programs are in `exported.py`,
packages of AOTInductor in `aoti.py`.
"""

import types
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
import xxhash
from torch import nn
from torch.fx import GraphModule

from modelstate.errors import LiveTargetError
from modelstate.problems import REAL
from modelstate.process import cached_attribute
from modelstate.rules.rule import Rule
from modelstate.serve.meta_clone import check_captured_references, meta_clone, runtime_state
from modelstate.serve.state_names import NameMap
from modelstate.text_format import listed
from modelstate.torch_compat.modules import (
    compiled_like,
    compiled_module,
    has_compiled_call,
    has_forward_hooks,
    module_tables,
    non_persistent_buffers,
    own_buffers,
    unwrapped,
)
from modelstate.torch_compat.plain import in_a_row, is_fake, is_plain, is_sharded
from modelstate.torch_compat.private import arguments_of_node

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node


class Program(ABC):
    """One version of a target with its weights: the callable that answers requests.

    A swap in place changes the weights of a program; a swap beside it makes another program.

    Args:
        weights_module: the module whose parameters and buffers are the weights; loading into it changes the program.
        hidden: the other tensors that a request may change, by name.
    """

    __slots__ = ("__weakref__", "_hidden", "weights_module")
    answers_alias_weights = True
    """Whether an answer may be a weight, a view of one, or refer to one for its gradient."""

    def __init__(self, weights_module: nn.Module, hidden: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        self.weights_module, self._hidden = weights_module, hidden

    @property
    def module(self) -> nn.Module | None:
        """The module whose methods a request may call; None for a program without methods."""
        return None

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """All tensors that a request may change, by name. A tied one has an entry for each of its names."""
        tables = module_tables(self.weights_module)
        own = ((f"{prefix}{name}", buffer) for prefix, _, _, buffers in tables for name, buffer in buffers.items())
        return {**{name: buffer for name, buffer in own if buffer is not None}, **self._hidden}

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The weights, and all tensors that a request may change."""
        yield from self.weights_module.parameters()
        yield from self.buffers.values()

    @abstractmethod
    def __call__(self, *args: object, **named: object) -> object:
        """Answers a request."""


def on_gpu(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that are on GPUs."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [tensor for tensor in tensors if tensor.is_cuda] if is_used else []


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Waits for all work that is queued on the GPUs of these tensors, on any stream.

    A request on a GPU ends when its work is queued, and requests may use streams of their own.
    """
    for device in {tensor.device for tensor in on_gpu(tensors)}:
        torch.cuda.synchronize(device)


class ReadPlan(NamedTuple):
    """How a target reads a checkpoint with certain names."""

    skeleton: nn.Module
    """A module without memory, into which the checkpoint is loaded."""
    rules: tuple[Rule, ...] = ()
    """Rules that rename the entries of the checkpoint for the skeleton."""
    without_hooks: bool = False
    """Whether the names are runtime names, which the skeleton's state-dict hooks would not accept."""


class Target(ABC):
    """A kind of program that can be served. Requests call programs, and nothing of the target.

    Args:
        name: the name in reports and errors: a class, or the path of a file.
        skeleton: a module without memory that has the weights and buffers of a version under their runtime names.
        names: which other names checkpoints may have: those of a map, or those that a module without memory saves. Its
            loading code then reads the checkpoint. For a module that is served this is the skeleton itself.
    """

    kind: str
    """ "eager", "compiled", "exported" or "aoti"."""
    fixed: tuple[str, ...] = ()
    """Tensors outside of the state, as far as they are known. Only loading code of a module changes them in a swap."""
    hidden: Mapping[str, torch.Tensor]
    """Buffers that no checkpoint contains, with the values of a new version. Read-only."""
    unexpected_error: Callable[[list[str]], Exception] | None = None
    """Makes a more precise error than the plan's for names that the target does not have; None for the plan's own."""
    _first: Program | None

    def __init__(self, name: str, skeleton: nn.Module, names: NameMap | nn.Module | None) -> None:
        self.name, self.skeleton, self._names = name, skeleton, names

    def first(self) -> Program:
        """Version 1: the target in its own memory. Returned once, so that no other reference keeps that memory."""
        first, self._first = self._first, None
        assert first is not None
        return first

    @cached_attribute
    def names(self) -> Set[str]:
        """The names that a checkpoint of the target has."""
        if isinstance(self._names, nn.Module):
            return self._names.state_dict().keys()
        return self.runtime_names if self._names is None else self._names.runtime.keys()

    @cached_attribute
    def runtime_names(self) -> Set[str]:
        """The names of the weights and persistent buffers in the module tree that runs."""
        return runtime_state(self.skeleton).keys()

    def read_plan(self, names: Collection[str]) -> ReadPlan:
        """How a checkpoint with these names is read."""
        if not isinstance(self._names, nn.Module):
            return ReadPlan(meta_clone(self.skeleton), () if self._names is None else (self._names,))
        saved, runtime = self.names, self.runtime_names
        if self._names is self.skeleton:
            are_runtime = not (runtime - saved).isdisjoint(names) and (saved - runtime).isdisjoint(names)
            return ReadPlan(meta_clone(self.skeleton), without_hooks=are_runtime)
        # The module's loading code is for the names that it saves. The program's own names do not need it.
        return ReadPlan(meta_clone(self.skeleton if set(names) <= runtime else self._names))

    @abstractmethod
    def program(self, filled: nn.Module) -> Program:
        """A new version with the weights of a filled skeleton. It shares no tensor that a request may change."""


class ModuleTarget(Target):
    """An eager module, or the result of `torch.compile`.

    A version of a compiled module is another instance under the same compilation. The compiled code is reused without
    recompilation, since strides, `requires_grad` and ties are the same in every version.
    """

    def __init__(self, module: nn.Module, training: bool) -> None:
        # `DataParallel` on several devices computes something else than the module inside it.
        if len(getattr(module, "device_ids", None) or ()) < 2:
            module = unwrapped(module, keep_compiled=True)
        compiled = compiled_module(module)
        original = module if compiled is None else compiled
        self.kind = "eager" if compiled is None else "compiled"
        name = type(original).__name__
        for path, submodule in original.named_modules():
            if has_compiled_call(submodule) or compiled_module(submodule) is not None:
                raise LiveTargetError(
                    "a part of the module is compiled in place, and a copy of it would not be",
                    where=f"{name}.{path}" if path else name,
                    remedy="compile the whole: Live(torch.compile(module))",
                )
        _check_tensors(original, name)
        _check_weights_are_read(original, name)
        skeleton = meta_clone(original)
        self.fixed = check_captured_references(original, skeleton)
        check_mode(original, training)  # last, since `eval()` alone corrects it
        super().__init__(name, skeleton, skeleton)
        all_buffers = skeleton.named_buffers(remove_duplicate=False)
        self.hidden = {name: buffer for name, buffer in all_buffers if not buffer.is_meta}
        # A compilation of the skeleton: one of the module itself would keep the memory of version 1 alive.
        self._compiled = None if compiled is None else compiled_like(module, skeleton)
        self._first = ModuleProgram(original, module)

    def program(self, filled: nn.Module) -> "ModuleProgram":
        return ModuleProgram(filled, filled if self._compiled is None else compiled_like(self._compiled, filled))


class ModuleProgram(Program):
    """One version of a module: an instance, and the callable that runs it, eager or compiled."""

    __slots__ = ("_call",)

    def __init__(self, weights_module: nn.Module, call: Callable[..., object]) -> None:
        super().__init__(weights_module)
        self._call = call

    @property
    def module(self) -> nn.Module:
        return self.weights_module

    def __call__(self, *args: object, **named: object) -> object:
        return self._call(*args, **named)


def _check_tensors(module: nn.Module, name: str) -> None:
    """Raises `LiveTargetError` for tensors that a second version could not have: fake tensors and shards."""
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_sharded(tensor):
            raise LiveTargetError(
                "a module with DTensors (of FSDP2 or tensor parallelism) cannot be served in versions",
                where=f"{name}.{path}",
                found="a DTensor: this process may hold only a shard",
                remedy="serve the module as it is before fully_shard or distribute_tensor, with a whole checkpoint",
            )
        if is_fake(tensor):
            raise LiveTargetError(
                "a module with fake tensors cannot be served", where=f"{name}.{path}", found="a FakeTensor", remedy=REAL
            )


def _check_weights_are_read(module: nn.Module, name: str) -> None:
    """Raises `LiveTargetError` for modules that answer with something else than the weights in their state."""
    if isinstance(module, torch.jit.ScriptModule) and not hasattr(module, "training"):
        raise LiveTargetError(
            "a frozen TorchScript module has its weights as constants in its code",
            where=name,
            remedy="serve the module as it is before torch.jit.freeze or torch.jit.optimize_for_inference",
        )
    for path, part in module.named_modules():
        hook = getattr(part, "_hf_hook", None)
        if any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,))):
            raise LiveTargetError(
                "the weights are offloaded: hooks of accelerate put those of the first version into every version",
                where=f"{name}.{path}",
                remedy="accelerate.hooks.remove_hook_from_module(module, recurse=True), which brings the weights back",
            )
        if getattr(part, "merged_adapters", None):
            raise LiveTargetError(
                "an adapter is merged into its weights, so the layer would ignore the adapter of a checkpoint",
                where=f"{name}.{path}",
                remedy="module.unmerge_adapter(), to swap adapters; module = module.merge_and_unload(), to have none",
            )


def check_names(state: Collection[str], names: NameMap | nn.Module | None, where: str) -> None:
    """Raises `LiveTargetError` where `names` belongs to another module than the one that was exported."""
    if names is None:
        return
    expected = runtime_state(names) if isinstance(names, nn.Module) else names.eager
    if set(expected) != set(state):
        differing = sorted(set(expected) ^ set(state))
        raise LiveTargetError(
            "names= belongs to another module than the program",
            where=where,
            expected="the module that was exported, or NameMap.of(module)",
            found=f"names that only one of them has: {listed(differing, 8)}",
        )


# Buffers that requests change.


BufferDigests = dict[str, object]
"""A digest of the values of each buffer, by name."""


def buffer_digests(program: Program) -> BufferDigests:
    """Returns digests of the present buffers, for a later `modified_buffers`."""
    return {name: _digest(buffer) for name, buffer in program.buffers.items()}


def modified_buffers(program: Program, since: BufferDigests) -> dict[str, torch.Tensor | None]:
    """Returns the buffers that requests have changed, and None for buffers that they have set to None.

    Waits for what is queued on the GPUs of the buffers.
    """
    present = program.buffers
    settle(present.values())
    modified: dict[str, torch.Tensor | None] = {
        name: buffer for name, buffer in present.items() if since.get(name) != _digest(buffer)
    }
    if not since:
        return modified
    for prefix, _, _, buffers in module_tables(program.weights_module):
        names = [f"{prefix}{last}" for last, buffer in buffers.items() if buffer is None]
        modified.update({name: None for name in names if name in since})
    return modified


def carry_over(buffers: Mapping[str, torch.Tensor | None], program: Program) -> tuple[str, ...]:
    """Copies the values of these buffers into a program. Returns their names.

    Names that have one tensor as their value are tied in the program too, and others are not.
    """
    if not buffers:
        return ()
    present = program.buffers
    values_of_present: defaultdict[int, set[int]] = defaultdict(set)
    for name, tensor in present.items():
        values_of_present[id(tensor)].add(id(buffers.get(name)))
    carried: dict[int, torch.Tensor | None] = {id(None): None}
    for name, value in buffers.items():
        buffer = present.get(name)
        if value is not None and id(value) not in carried:
            if buffer is not None and _fits(buffer, value) and len(values_of_present[id(buffer)]) == 1:
                _overwrite(buffer, value)
                carried[id(value)] = buffer
            else:
                carried[id(value)] = value.detach().clone()
        replacement = carried[id(value)]
        if replacement is not buffer:  # requests replace the buffer, such as a cache that grows
            path, _, last = name.rpartition(".")
            own_buffers(program.weights_module.get_submodule(path))[last] = replacement
    return tuple(buffers)


def cloned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns copies of tensors. Names of one tensor stay names of one tensor."""
    copies = {id(tensor): tensor.clone() for tensor in tensors.values()}
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def buffer_restorer(program: Program, copies: Mapping[int, torch.Tensor] | None = None) -> Callable[[], None]:
    """Returns a function that restores the present buffers: their values, and the set of buffers of each module.

    Args:
        program: the program.
        copies: copies of the buffers by `id` of the buffer; without them the buffers are copied here.
    """
    modules = list(program.weights_module.modules())
    tables = [(own_buffers(module), dict(own_buffers(module))) for module in modules]
    hidden = [(non_persistent_buffers(module), {*non_persistent_buffers(module)}) for module in modules]
    saved = [
        (buffer, buffer.detach().clone() if copies is None else copies[id(buffer)])
        for buffer in program.buffers.values()
    ]

    def restore() -> None:
        resized: dict[int, torch.Tensor] = {}
        for buffer, value in saved:
            if _fits(buffer, value):
                _overwrite(buffer, value)
            else:
                resized[id(buffer)] = value
        for table, buffers in tables:
            _set_buffers(table, {name: resized.get(id(buffer), buffer) for name, buffer in buffers.items()})
        for names, before in hidden:
            names.clear()
            names.update(before)

    return restore


def renew_buffers(module: nn.Module, skeleton: nn.Module) -> None:
    """Restores the set of buffers of a skeleton in a module whose code has replaced, added or deleted buffers.

    A buffer that has the right shape and dtype stays, whatever its values. Where the skeleton's buffer is on meta, a
    missing buffer gets uninitialized memory.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    renewed: dict[int, torch.Tensor] = {}
    owners = dict(module.named_modules(remove_duplicate=False))
    for path, wanted in skeleton.named_modules(remove_duplicate=False):
        owner = owners[path]
        table: dict[str, torch.Tensor | None] = {}
        buffers = dict(own_buffers(owner).items())
        for name, slot in own_buffers(wanted).items():
            present = buffers.get(name)
            if slot is not None and id(slot) not in renewed:
                if present is not None and _fits(present, slot):
                    renewed[id(slot)] = present
                elif slot.is_meta:
                    renewed[id(slot)] = torch.empty_strided(slot.shape, slot.stride(), dtype=slot.dtype, device=device)
                else:
                    renewed[id(slot)] = slot.detach().clone()
            table[name] = None if slot is None else renewed[id(slot)]
        _set_buffers(own_buffers(owner), table)
        non_persistent_buffers(owner).clear()
        non_persistent_buffers(owner).update(non_persistent_buffers(wanted))


def _set_buffers(table: dict[str, torch.Tensor | None], wanted: Mapping[str, torch.Tensor | None]) -> None:
    """Makes a module's table of buffers equal to another. An equal one is not written, which TorchScript forbids."""
    present = dict(table.items())
    if list(present) != list(wanted) or any(present[name] is not buffer for name, buffer in wanted.items()):
        table.clear()
        table.update(wanted)


def _fits(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the value can be copied into the tensor without conversion."""
    return (tensor.shape, tensor.dtype, tensor.layout) == (value.shape, value.dtype, value.layout)


def _overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copies into a tensor, which a request in inference mode may have created."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.detach().copy_(value)


def _digest(buffer: torch.Tensor) -> object:
    """A digest of the values. Autograd's version counter does not suffice: batch norm writes past it."""
    if not is_plain(buffer) or buffer.is_meta or buffer.is_quantized:
        return id(buffer)
    return buffer.shape, xxhash.xxh3_128_digest(in_a_row(buffer).view(torch.uint8).numpy().data)


# The mode of a target.


_LISTED_MODULES = 4


def check_mode(module: nn.Module, training: object) -> None:
    """Raises `LiveTargetError` where the module or one of its submodules is in training mode.

    Layers of torch that compute the same in both modes, such as `Linear`, may be in either.
    """
    if training:
        return
    found = [
        f"submodule {path}" if path else "the module itself"
        for path, submodule in module.named_modules()
        if submodule.training and not _is_mode_free(submodule)
    ]
    if found:
        # The module of an exported program has this mode always, and an `eval` that raises.
        is_exported = isinstance(module, GraphModule) and "eval" in vars(module)
        remedy = "serve the ExportedProgram itself" if is_exported else "call module.eval() first"
        raise _mode_error(type(module).__name__, found, f"{remedy}; training=True takes the module as it is")


def check_graph_mode(program: "ExportedProgram", training: object, where: str) -> None:
    """Raises `LiveTargetError` for an exported program with operators in training mode."""
    if training:
        return
    found = [node.name for node in program.graph.nodes if node.op == "call_function" and _trains(node)]
    if found:
        raise _mode_error(where, found, "export module.eval(); training=True takes the program as it is")


def _mode_error(where: str, found: list[str], remedy: str) -> LiveTargetError:
    return LiveTargetError(
        "the target is in training mode: dropout would be active, and requests would change statistics",
        where=where,
        expected="eval mode",
        found=f"training mode in {listed(found, _LISTED_MODULES)}",
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


def _trains(node: "Node") -> bool:
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
