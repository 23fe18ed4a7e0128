"""The kinds of programs that `Live` serves: their interface, modules (eager and compiled), and exported programs.

A `Target` makes the programs, one for each version; requests call a `Program`. `aoti.py` has packages of AOTInductor.
"""

from __future__ import annotations

import copy
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Set
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from torch import nn
from torch.fx import GraphModule

from modelstate.errors import LiveTargetError, ProgramInputError
from modelstate.problems import REAL
from modelstate.process import cached_attribute
from modelstate.rules.rule import Rule
from modelstate.serve.meta_clone import (
    buffers_of,
    check_captured_references,
    meta_clone,
    runtime_state,
    state_module,
)
from modelstate.serve.state_names import NameMap, view_key
from modelstate.serve.weights import Weights, buffer_digests
from modelstate.text_format import listed
from modelstate.torch_compat.modules import (
    compiled_like,
    compiled_module,
    has_compiled_call,
    own_buffers,
    own_modules,
    own_parameters,
    unwrapped,
)
from modelstate.torch_compat.plain import is_fake, is_sharded
from modelstate.torch_compat.private import arguments_of_node, check_inputs_by, storage_owners

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node


class Program:
    """One version of a target: the callable that answers requests, and the module tree that has its tensors.

    Args:
        module: The weights and all buffers, under their runtime names.
        call: Answers a request. It keeps the tensors of the version alive.
        has_methods: Whether requests may call methods of the module.
    """

    __slots__ = ("__weakref__", "call", "has_methods", "module", "weights")

    def __init__(self, module: nn.Module, call: Callable[..., object], *, has_methods: bool = False) -> None:
        self.module, self.call, self.has_methods = module, call, has_methods
        self.weights = Weights(buffers=buffer_digests(module))
        """What a later version may use: of the target as it was given, no tensor."""

    def __call__(self, *args: object, **named: object) -> object:
        """Answers a request. A canary gets the program, and calls it."""
        return self.call(*args, **named)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weights and buffers."""
        return [*self.module.parameters(), *self.module.buffers()]


class Target(ABC):
    """A kind of program that can be served. Requests call programs, and nothing of the target.

    Args:
        name: The name in reports and errors: a class, or the path of a file.
        skeleton: A module without memory that has the weights and buffers of a version under their runtime names.
        names: Which other names checkpoints may have: those of a map, or those that a module without memory saves. Its
            loading code then reads the checkpoint. For a module that is served this is the skeleton itself.
    """

    kind: str
    """ "eager", "compiled", "exported" or "aoti"."""
    fixed: tuple[str, ...] = ()
    """Tensors outside of the state, as far as they are known. Only loading code of a module changes them in a swap."""
    maps_files: bool = True
    """Whether the weights of a version may be maps of a file."""
    unexpected_error: Callable[[list[str]], Exception] | None = None
    """Makes a more precise error than the plan's for names that the target does not have; None for the plan's own."""
    _first: Program | None

    def __init__(self, name: str, skeleton: nn.Module, names: NameMap | nn.Module | None) -> None:
        self.name, self.skeleton, self._names = name, skeleton, names

    def take_first(self) -> Program:
        """Returns version 1, the target in its own memory, once, so that no other reference keeps that memory."""
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

    def read_plan(self, names: Collection[str]) -> tuple[nn.Module, tuple[Rule, ...], bool]:
        """Returns how a checkpoint with these names is read.

        A module without memory, whose copy gets the values; rules that rename the entries for that module; and
        whether these have runtime names, which the module's state-dict hooks would not accept.
        """
        if not isinstance(self._names, nn.Module):
            return self.skeleton, () if self._names is None else (self._names,), False
        saved, runtime = self.names, self.runtime_names
        if self._names is self.skeleton:
            are_runtime = not (runtime - saved).isdisjoint(names) and (saved - runtime).isdisjoint(names)
            return self.skeleton, (), are_runtime
        # The module's loading code is for the names that it saves. The program's own names do not need it.
        are_runtime = set(names) <= runtime and not set(names) <= saved
        return self.skeleton if are_runtime else self._names, (), False

    def free(self, retired: Weights) -> Weights:
        """Returns those of the weights that were retired last whose memory nothing uses."""
        kinds = {name: _kind(tensor) for name, tensor in runtime_state(self.skeleton).items() if tensor.is_meta}
        return replace(
            retired,
            tensors={
                name: tensor
                for name, tensor in retired.tensors.items()
                # Not an answer, also not in another process, nor in use by a request.
                if storage_owners(tensor) == 1
                and not tensor.untyped_storage().is_shared()
                and kinds.get(name) == _kind(tensor)
            },
        )

    @abstractmethod
    def program(self, filled: nn.Module) -> Program:
        """Returns a new version with the weights of a filled skeleton. It shares no tensor that a request may write."""


def _kind(tensor: torch.Tensor) -> object:
    return tensor.shape, tensor.stride(), tensor.dtype


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
        _check_servable(original, name)
        skeleton = meta_clone(original)
        self.fixed = check_captured_references(original, skeleton)
        check_mode(original, training)  # last, since `eval()` alone corrects it
        super().__init__(name, skeleton, skeleton)
        # A compilation of the skeleton: one of the module itself would keep the memory of version 1 alive.
        self._compiled = None if compiled is None else compiled_like(module, skeleton)
        self._first = Program(original, module, has_methods=True)

    def program(self, filled: nn.Module) -> Program:
        call = filled if self._compiled is None else compiled_like(self._compiled, filled)
        return Program(filled, call, has_methods=True)


def _check_servable(module: nn.Module, name: str) -> None:
    """Raises `LiveTargetError` where a second version is not possible, or would not answer with its own weights."""
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
    if isinstance(module, torch.jit.ScriptModule) and not hasattr(module, "training"):
        raise LiveTargetError(
            "a frozen TorchScript module has its weights as constants in its code",
            where=name,
            remedy="serve the module as it is before torch.jit.freeze or torch.jit.optimize_for_inference",
        )
    for path, part in module.named_modules():
        where = f"{name}.{path}" if path else name
        hook = getattr(part, "_hf_hook", None)
        if has_compiled_call(part) or compiled_module(part) is not None:
            raise LiveTargetError(
                "a part of the module is compiled in place, and a copy of it would not be",
                where=where,
                remedy="compile the whole: Live(torch.compile(module))",
            )
        if any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,))):
            raise LiveTargetError(
                "the weights are offloaded: hooks of accelerate put those of the first version into every version",
                where=where,
                remedy="accelerate.hooks.remove_hook_from_module(module, recurse=True), which brings the weights back",
            )
        if getattr(part, "merged_adapters", None):
            raise LiveTargetError(
                "an adapter is merged into its weights, so the layer would ignore the adapter of a checkpoint",
                where=where,
                remedy="module.unmerge_adapter(), to swap adapters; module = module.merge_and_unload(), to have none",
            )


class ExportedTarget(Target):
    """A `torch.export.ExportedProgram`.

    A version is a copy of `program.module()`: its modules have tables of tensors of their own, and share everything
    else, such as the graph. The guards of `torch.export` check the inputs of each call.

    Args:
        program: The exported program.
        names: A map from the names of eager checkpoints, or the module that was exported.
        name: The target's name in reports and errors.

    Raises:
        LiveTargetError: the program has no values, or `names` is of another module.
    """

    kind = "exported"

    def __init__(
        self, program: ExportedProgram, names: NameMap | nn.Module | None, name: str = "ExportedProgram"
    ) -> None:
        # A program that was saved and loaded has two tensor objects with one storage for a tied tensor.
        first: dict[object, torch.Tensor] = {}
        state = {name: first.setdefault(view_key(tensor), tensor) for name, tensor in program.state_dict.items()}
        check_names(state, names, name)
        lifted = {spec.target: spec.kind.name for spec in program.graph_signature.input_specs}
        self.fixed = tuple(key for key in program.constants if lifted.get(key, "BUFFER") != "BUFFER")
        # On meta: a reference to the tensors would keep the memory of version 1 alive.
        super().__init__(name, state_module(state), meta_clone(names) if isinstance(names, nn.Module) else names)
        module: nn.Module = program.module()
        what, expected = "the program was not exported for these inputs", "inputs for which its guards hold"
        check_inputs_by(module, lambda error: input_error(name, what, expected, f"{type(error).__name__}: {error}"))
        hidden = {key: value for key, value in buffers_of(module).items() if key not in state}
        everything = {**hidden, **{key: program.constants[key] for key in self.fixed}, **state}
        on_meta = [key for key, value in everything.items() if isinstance(value, torch.Tensor) and value.is_meta]
        if on_meta:
            raise LiveTargetError(
                "the program was exported on the meta device, so it can answer no request",
                where=name,
                found=f"on meta: {listed(on_meta, 8)}",
                remedy="give the module values before the export: modelstate.load(model, source)",
            )
        self._first = _program(module, {**state, **hidden})
        # Copies: requests may change the buffers of version 1.
        self._hidden = copy.deepcopy(hidden)
        self._module = _with_tensors(module, {**runtime_state(self.skeleton), **self._hidden})
        for part in module.modules():  # its graph refers to it, which would keep the memory of version 1 alive
            own_parameters(part).clear()
            own_buffers(part).clear()

    def program(self, filled: nn.Module) -> Program:
        return _program(self._module, {**runtime_state(filled), **copy.deepcopy(self._hidden)})


def _program(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Program:
    version = _with_tensors(module, tensors)
    return Program(version, version)


def _with_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> nn.Module:
    """Returns a shallow copy of a module tree with other parameters and buffers, by name."""
    copied = object.__new__(type(module))
    vars(copied).update(vars(module))
    tables: dict[str, object] = {
        "_parameters": {key: tensors.get(prefix + key, value) for key, value in own_parameters(module).items()},
        "_buffers": {key: tensors.get(prefix + key, value) for key, value in own_buffers(module).items()},
        "_modules": {
            key: None if part is None else _with_tensors(part, tensors, f"{prefix}{key}.")
            for key, part in own_modules(module).items()
        },
    }
    vars(copied).update(tables)
    return copied


def input_error(where: str, what: str, expected: object, found: object) -> ProgramInputError:
    """Returns the error for inputs that a program was not exported for."""
    remedy = "give inputs like those of the export, or export with dynamic_shapes= that allow these"
    return ProgramInputError(what, where=where, expected=expected, found=found, remedy=remedy)


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


# The mode of a target.


def check_mode(module: nn.Module, training: object) -> None:
    """Raises `LiveTargetError` where a submodule is in training mode and its code reads the mode."""
    if training:
        return
    parts = [
        f"{path or 'the module itself'}, a {type(part).__name__}"
        for path, part in module.named_modules()
        if part.training and _reads_mode(part)
    ]
    if parts:
        # The module of an exported program has this mode always, and an `eval` that raises.
        is_exported = isinstance(module, GraphModule) and "eval" in vars(module)
        remedy = "serve the ExportedProgram itself" if is_exported else "call module.eval() first"
        raise _mode_error(type(module).__name__, parts, f"{remedy}; training=True takes the module as it is")


def check_graph_mode(program: ExportedProgram, training: object, where: str) -> None:
    """Raises `LiveTargetError` for an exported program with operators in training mode."""
    if training:
        return
    parts = [node.name for node in program.graph.nodes if node.op == "call_function" and _trains(node)]
    if parts:
        raise _mode_error(where, parts, "export module.eval(); training=True takes the program as it is")


def _mode_error(where: str, parts: list[str], remedy: str) -> LiveTargetError:
    return LiveTargetError(
        "the target is in training mode, and a part of it computes something else then",
        where=where,
        expected="eval mode",
        found=f"training mode in {listed(parts, 4)}",
        remedy=remedy,
    )


def _reads_mode(module: nn.Module) -> bool:
    """Whether code of the module's class, or a function among its attributes, refers to the name `training`."""
    if isinstance(module, torch.jit.ScriptModule):  # a trace has the mode as a constant
        return any(word in str(getattr(module, "code", "")) for word in ("training", "dropout", "batch_norm"))
    bases = [base for base in type(module).__mro__ if base not in nn.Module.__mro__]
    members = [value for base in bases for value in vars(base).values()] + [*vars(module).values()]
    members = [value.fget if isinstance(value, property) else getattr(value, "__func__", value) for value in members]
    return any(isinstance(value, types.FunctionType) and _refers_to_mode(value.__code__) for value in members)


def _refers_to_mode(code: types.CodeType) -> bool:
    inner = [value for value in code.co_consts if isinstance(value, types.CodeType)]
    return "training" in (*code.co_names, *code.co_consts) or any(map(_refers_to_mode, inner))


def _trains(node: Node) -> bool:
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
