"""The kinds of programs that `Live` serves: their interface, modules (eager and compiled), and exported programs.

A `Target` makes the programs, one for each version; requests call a `Program`. `aoti.py` has packages of AOTInductor.
"""

from __future__ import annotations

import copy
import inspect
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash
from msgspec.structs import replace
from torch import nn
from torch.fx import GraphModule

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import LiveTargetError, ProgramInputError
from modelstate.problems import REAL
from modelstate.process import cached_attribute
from modelstate.rules.rule import Rule
from modelstate.serve.meta_clone import buffers_of, check_captured_references, meta_clone, runtime_state, state_module
from modelstate.serve.state_names import NameMap, view_key
from modelstate.spec import Combined, Stored, StoredTensor
from modelstate.text_format import listed
from modelstate.torch_compat.modules import (
    compiled_like,
    compiled_module,
    has_compiled_call,
    modules_of,
    own_buffers,
    own_modules,
    own_parameters,
    tensors_of,
    unwrapped,
)
from modelstate.torch_compat.plain import has_its_memory, in_a_row, is_fake, is_plain, is_sharded, why_not_plain
from modelstate.torch_compat.private import arguments_of_node, check_inputs_by, storage_owners

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node


def buffer_digest(buffer: torch.Tensor | None) -> object:
    """Returns a digest of the values. The number of writes does not suffice: batch norm writes past it."""
    if buffer is None:
        return None
    if not is_plain(buffer) or buffer.is_meta or buffer.is_quantized:
        return id(buffer)
    return buffer.shape, xxhash.xxh3_128_digest(in_a_row(buffer).view(torch.uint8).numpy().data)


class Weights(msgspec.Struct, eq=False):
    """The weights of a version that are plain tensors of the CPU, by their runtime names.

    Attributes:
        tensors: They share the memory of the version.
        maps: The addresses of those that are maps of a file, into which nothing is read.
        buffers: A digest of the values of each buffer, as it was when the version was made.
        checkpoint: The files that they were read from.
        names: The names there of weights that were read as they are. Empty once other values are read into the
            memory.
    """

    tensors: Mapping[str, torch.Tensor] = {}
    maps: Set[int] = frozenset()
    buffers: Mapping[str, object] = {}
    checkpoint: Checkpoint | None = None
    names: dict[str, str] = {}

    def digest(self, name: str) -> str:
        """Returns the digest of what was read into a weight; empty where it is not known, or a buffer has changed."""
        tensor, saved = self.tensors.get(name), self.names.get(name)
        if tensor is None or saved is None or self.checkpoint is None:
            return ""
        stored = self.checkpoint.stored(saved)
        is_unchanged = name not in self.buffers or self.buffers[name] == buffer_digest(tensor)
        return "".join(self.checkpoint.digests_of(stored)[-1:]) if is_unchanged and fits(tensor, stored) else ""


def fits(tensor: torch.Tensor, stored: Stored) -> bool:
    """Whether a tensor has the elements of a stored one in their order, or could have them."""
    if isinstance(stored, torch.Tensor):
        is_whole = is_plain(stored) and not stored.is_meta and has_its_memory(stored)
    elif isinstance(stored, Combined):
        is_whole = stored.is_read_in_blocks
    else:
        is_whole = isinstance(stored, StoredTensor) and stored.is_contiguous
    kind = stored.dtype, torch.Size(stored.shape)
    return is_whole and is_plain(tensor) and tensor.is_contiguous() and (tensor.dtype, tensor.shape) == kind


class Program:
    """One version of a target: the callable that answers requests, and the module tree that has its tensors.

    Args:
        module: The weights and all buffers, under their runtime names.
        call: Answers a request. It keeps the tensors of the version alive.
        has_methods: Whether requests may call methods of the module.
    """

    __slots__ = ("__weakref__", "call", "has_methods", "id", "module", "source", "time", "weights")

    def __init__(self, module: nn.Module, call: Callable[..., object], *, has_methods: bool = False) -> None:
        self.module, self.call, self.has_methods = module, call, has_methods
        self.id, self.source, self.time = 0, "", time.time()
        """The id is 0 until it serves, and that of a target with weights on meta."""
        self.weights = Weights(buffers={name: buffer_digest(buffer) for name, buffer in buffers_of(module).items()})
        """What a later version may use: of the target as it was given, no tensor."""

    def __call__(self, *args: object, **named: object) -> object:
        """Answers a request. A canary gets the program, and calls it."""
        return self.call(*args, **named)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weights and buffers."""
        return tensors_of(modules_of(self.module))


class Target(ABC):
    """A kind of program that can be served. Requests call programs, and nothing of the target.

    Args:
        name: The name in reports and errors: a class, or the path of a file.
        skeleton: A module without memory that has the weights and buffers of a version under their runtime names.
        names: Which other names checkpoints may have: those of a map, or those that a module without memory saves. Its
            loading code then reads the checkpoint. For a module that is served this is the skeleton itself.

    Attributes:
        kind: "eager", "compiled", "exported" or "aoti".
        fixed: Tensors outside of the state, as far as they are known. Only loading code of a module changes them in
            a swap.
        maps_files: Whether the weights of a version may be maps of a file.
        has_all_names: Whether the names are known of all weights, also of those that a compiler has made constants
            of.
        first: Version 1, the target in its own memory, until it is taken.
    """

    kind: str
    fixed: tuple[str, ...] = ()
    maps_files: bool = True
    has_all_names: bool = True
    first: Program

    def __init__(self, name: str, skeleton: nn.Module, names: NameMap | nn.Module | None) -> None:
        self.name, self.skeleton, self._names = name, skeleton, names

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
        are_runtime = not (runtime - saved).isdisjoint(names) and (saved - runtime).isdisjoint(names)
        if self._names is self.skeleton:
            return self.skeleton, (), are_runtime
        # The module's loading code is for the names that it saves. The program's own names do not need it.
        return self.skeleton if are_runtime else self._names, (), False

    def free(self, retired: Weights) -> Weights:
        """Returns those of the weights that were retired last whose memory nothing uses."""
        slots = {name: slot for name, slot in runtime_state(self.skeleton).items() if slot.is_meta}
        free = {
            name: tensor
            for name, tensor in retired.tensors.items()
            # Not an answer, also not in another process, nor in use by a request.
            if storage_owners(tensor) == 1 and not tensor.untyped_storage().is_shared()
            if name in slots and fits(slots[name], tensor) and tensor.is_contiguous()
        }
        return replace(retired, tensors=free)

    @abstractmethod
    def program(self, filled: nn.Module) -> Program:
        """Returns a new version with the weights of a filled skeleton. It shares no tensor that a request may write."""


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
        for path, what, remedy in _obstacles(original):
            raise LiveTargetError(what, where=f"{name}.{path}" if path else name, remedy=remedy)
        skeleton = meta_clone(original)
        self.fixed = check_captured_references(original, skeleton)
        check_mode(original, training, name)  # last, since `eval()` alone corrects it
        super().__init__(name, skeleton, skeleton)
        # A compilation of the skeleton: one of the module itself would keep the memory of version 1 alive.
        self._compiled = None if compiled is None else compiled_like(module, skeleton)
        self.first = Program(original, module, has_methods=True)

    def program(self, filled: nn.Module) -> Program:
        call = filled if self._compiled is None else compiled_like(self._compiled, filled)
        return Program(filled, call, has_methods=True)


def _obstacles(module: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yields why a second version is not possible, or would not answer with its own weights.

    Each is the path of a module or a tensor, what is wrong there, and the remedy.
    """
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_fake(tensor) or is_sharded(tensor):
            remedy = REAL if is_fake(tensor) else "serve the module as it is before fully_shard or distribute_tensor"
            yield path, f"the module cannot be served in versions: it has {why_not_plain(tensor)}", remedy
    if isinstance(module, torch.jit.ScriptModule) and not hasattr(module, "training"):
        what = "a frozen TorchScript module has its weights as constants in its code"
        yield "", what, "serve the module as it is before torch.jit.freeze or torch.jit.optimize_for_inference"
    for path, part in module.named_modules():
        hook = getattr(part, "_hf_hook", None)
        if has_compiled_call(part) or compiled_module(part) is not None:
            what = "a part of the module is compiled in place, and a copy of it would not be"
            yield path, what, "compile the whole: Live(torch.compile(module))"
        if any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,))):
            what = "the weights are offloaded: hooks of accelerate put those of the first version into every version"
            remedy = "accelerate.hooks.remove_hook_from_module(module, recurse=True), which brings the weights back"
            yield path, what, remedy
        if getattr(part, "merged_adapters", None):
            what = "an adapter is merged into its weights, so the layer would ignore the adapter of a checkpoint"
            call = "module.unmerge_adapter(), to swap adapters"
            yield path, what, f"{call}; module = module.merge_and_unload(), to have none"


class ExportedTarget(Target):
    """A `torch.export.ExportedProgram`.

    A version is a copy of `program.module()`: its modules have tables of tensors of their own, and share everything
    else, such as the graph. The guards of `torch.export` check the inputs of each call.

    Args:
        program: The exported program.
        names: A map from the names of eager checkpoints, or the module that was exported.
        training: Whether the program may have operators in training mode.
        name: The target's name in reports and errors.

    Raises:
        LiveTargetError: the program has no values, or is in training mode, or `names` is of another module.
    """

    kind = "exported"

    def __init__(
        self, program: ExportedProgram, names: NameMap | nn.Module | None, training: bool, name: str = "ExportedProgram"
    ) -> None:
        check_mode(program, training, name)
        # A program that was saved and loaded has two tensor objects with one storage for a tied tensor.
        first: dict[object, torch.Tensor] = {}
        state = {name: first.setdefault(view_key(tensor), tensor) for name, tensor in program.state_dict.items()}
        of_names = names.eager if isinstance(names, NameMap) else state if names is None else runtime_state(names)
        if differing := sorted(of_names.keys() ^ state.keys()):
            raise LiveTargetError(
                "names= belongs to another module than the program",
                where=name,
                expected="the module that was exported, or NameMap.of(module)",
                found=f"names that only one of them has: {listed(differing, 8)}",
            )
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
        self.first = _program(module, {**state, **hidden})
        # Copies: requests may change the buffers of version 1.
        self._hidden = copy.deepcopy(hidden)
        self._module = _with_tensors(module, {**runtime_state(self.skeleton), **self._hidden})
        for part in module.modules():  # its graph refers to it, which would keep the memory of version 1 alive
            own_parameters(part).clear()
            own_buffers(part).clear()

    def program(self, filled: nn.Module) -> Program:
        return _program(self._module, {**runtime_state(filled), **copy.deepcopy(self._hidden)})


def _program(module: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> Program:
    version = _with_tensors(module, tensors)
    return Program(version, version)


def _with_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor | None], prefix: str = "") -> nn.Module:
    """Returns a shallow copy of a module tree with other parameters and buffers, by name."""
    copied = object.__new__(type(module))
    vars(copied).update(vars(module))
    for table in ("_parameters", "_buffers"):
        own = vars(module)[table]
        vars(copied)[table] = {key: tensors.get(prefix + key, value) for key, value in own.items()}
    vars(copied)["_modules"] = {
        key: None if part is None else _with_tensors(part, tensors, f"{prefix}{key}.")
        for key, part in own_modules(module).items()
    }
    return copied


def input_error(where: str, what: str, expected: object, found: object) -> ProgramInputError:
    """Returns the error for inputs that a program was not exported for."""
    remedy = "give inputs like those of the export, or export with dynamic_shapes= that allow these"
    return ProgramInputError(what, where=where, expected=expected, found=found, remedy=remedy)


# The mode of a target.


def check_mode(target: nn.Module | ExportedProgram, training: bool, where: str) -> None:
    """Raises `LiveTargetError` for training mode, where the code of a submodule reads it, or an operator has it."""
    if isinstance(target, nn.Module):
        # The module of an exported program has this mode always, and an `eval` that raises.
        is_exported = isinstance(target, GraphModule) and "eval" in vars(target)
        remedy = "serve the ExportedProgram itself" if is_exported else "call module.eval() first"
        parts = [
            f"{path or 'the module itself'}, a {type(part).__name__}"
            for path, part in target.named_modules()
            if part.training and _reads_mode(part)
        ]
    else:
        remedy = "export module.eval()"
        # Also those of parts without gradients, with autocast, or under a condition, which have graphs of their own.
        graphs = [part.graph for part in target.graph_module.modules() if isinstance(part, GraphModule)]
        parts = [node.name for graph in graphs for node in graph.nodes if node.op == "call_function" and _trains(node)]
    if parts and not training:
        raise LiveTargetError(
            "the target is in training mode, and a part of it computes something else then",
            where=where,
            expected="eval mode",
            found=f"training mode in {listed(parts, 4)}",
            remedy=f"{remedy}; training=True takes it as it is",
        )


def _reads_mode(module: nn.Module) -> bool:
    """Whether code of the module's class, or a function among its attributes, refers to the name `training`.

    Functions that decorators have wrapped are looked at, too.
    """
    if isinstance(module, torch.jit.ScriptModule):  # a trace has the mode as a constant
        return any(word in str(getattr(module, "code", "")) for word in ("training", "dropout", "batch_norm"))
    bases = [base for base in type(module).__mro__ if base not in nn.Module.__mro__]
    members = [value for base in bases for value in vars(base).values()] + [*vars(module).values()]
    members = [value.fget if isinstance(value, property) else getattr(value, "__func__", value) for value in members]
    functions = (inspect.unwrap(value, stop=_refers_to_mode) for value in members if callable(value))
    return any(map(_refers_to_mode, functions))


def _refers_to_mode(value: object) -> bool:
    """Whether a function, or its code, has the name `training`, or a function inside it has."""
    code = value.__code__ if isinstance(value, types.FunctionType) else value
    return isinstance(code, types.CodeType) and (
        "training" in (*code.co_names, *code.co_consts) or any(map(_refers_to_mode, code.co_consts))
    )


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
