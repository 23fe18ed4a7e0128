"""Serves packages of AOTInductor: each version uses a loaded copy of the compiled library."""

from __future__ import annotations

import math
import operator
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import nn

from modelstate.errors import DamagedFileError, ExportError, LiveTargetError, code_errors
from modelstate.io import system
from modelstate.serve.meta_clone import runtime_state, state_module
from modelstate.serve.program_file import Manifest, ProgramFile, ProgramInput, ProgramInputs
from modelstate.serve.targets import Program, Target, Weights, input_error
from modelstate.text_format import listed
from modelstate.torch_compat.private import (
    aoti_embedded_constants,
    aoti_loader,
    aoti_metadata,
    condition_names,
    flatten,
    input_conditions,
    keyword_order,
    structure_of,
    unflatten,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_INSTRUCTIONS = {
    "AVX2": ("avx2", "fma"),
    "AVX512": ("avx512f", "avx512dq", "avx512vl", "avx512bw", "fma"),
    "AVX512_VNNI": ("avx512_vnni",),
    "AMX_TILE": ("amx_tile",),
}
"""What a processor needs for the kinds of vector instructions that AOTInductor has compiled for, as Linux names it."""


class AotiTarget(Target):
    """A `.pt2` package of AOTInductor.

    The manifest that `modelstate.export` writes describes every tensor. For a package from another writer only the
    names and values of the library's constants are known. The compiler may have inlined tensors there; these are
    noticed only where a checkpoint contains them.
    """

    kind = "aoti"
    maps_files = False

    def __init__(self, file: ProgramFile) -> None:
        manifest = file.manifest
        _check_machine(file)
        self._copy, self._model = file.copied_library(), file.model
        self.name = file.path
        runner = self._load()
        self._call = _Call(runner, manifest, file.path)
        values = _values(file, runner)
        if manifest is not None:
            state, self._hidden = _state_of_manifest(manifest, values)
        else:
            # Constants that are neither parameters nor buffers, or that AOTInductor has changed.
            constants = "_tensor_constant", "lifted_tensor_", "_frozen_param"
            state = {name: value for name, value in values.items() if not name.startswith(constants)}
            self._hidden = {}
            self.has_all_names = False
        self._fixed_values = {
            name: values[name] for name in runner.names if name not in state and name not in self._hidden
        }
        self.fixed = tuple(self._fixed_values)
        super().__init__(file.path, state_module(state), None if manifest is None else manifest.names)
        self._idle = [runner]
        """Runners that no version uses, with their memory. A library cannot be unloaded completely."""
        self._next: _Runner | None = None
        """The runner whose memory the weights of the next version are read into."""
        self.first = self._program(state)

    def free(self, retired: Weights) -> Weights:
        memory = {name: tensor for name, tensor in self._next_runner().memory.items() if name not in self._hidden}
        addresses = ({name: tensor.data_ptr() for name, tensor in of.items()} for of in (memory, retired.tensors))
        return retired if operator.eq(*addresses) else Weights(memory)

    def program(self, filled: nn.Module) -> Program:
        return self._program(runtime_state(filled))

    def _program(self, state: Mapping[str, torch.Tensor]) -> Program:
        """Returns a version whose runner has copies of these weights. Raises `LiveTargetError`."""
        runner, self._next = self._next_runner(), None
        tensors = runner.filled({**state, **self._hidden}, self._fixed_values)

        def request(*args: object, **named: object) -> object:
            inputs = self._call.inputs(args, named)
            with torch.set_grad_enabled(False), runner.lock:
                outputs = runner.library.boxed_run(inputs)
            return unflatten(outputs, self._call.out_spec)

        # The garbage collector may call this at any moment, in any thread.
        weakref.finalize(request, self._idle.append, runner).atexit = False
        return Program(state_module(tensors, meta=False, hidden=self._hidden), request)

    def _next_runner(self) -> _Runner:
        if self._next is None:
            self._next = self._idle.pop() if self._idle else self._load()
        return self._next

    def _load(self) -> _Runner:
        return _Runner(f"/dev/fd/{self._copy.fileno()}", self._model, self.name)


class _Runner:
    """A loaded library with memory for its constants, which the library uses and does not copy.

    A tensor with other sizes or strides would make the library read out of bounds. The memory is made once, with those
    of the package's own constants, and every version is copied into it.
    """

    def __init__(self, path: str, model: str, where: str) -> None:
        with _loading(where):
            self.library = aoti_loader(path, model)
            self.names: tuple[str, ...] = tuple(self.library.get_constant_fqns())
            self.call_spec: tuple[str, str] = tuple(self.library.get_call_spec())
        self.memory: dict[str, torch.Tensor] = {}
        # Python code of the model may release the GIL while it runs. Another request that enters the library then
        # waits there while it holds the GIL.
        self.lock = threading.Lock()

    def filled(self, values: Mapping[str, torch.Tensor], fixed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies values into the memory of the library. Returns that memory by name, with the ties of the values."""
        with torch.inference_mode(False), torch.no_grad():
            if not self.memory:
                allocated = {id(value): _like(value) for value in values.values()}
                self.memory = {name: allocated[id(value)] for name, value in values.items()}
                constants = {name: self.memory.get(name, fixed.get(name)) for name in self.names}
                if constants:
                    # Without a copy: the library uses this memory.
                    self.library.load_constants(constants, False, True, True)
            pairs = {id(value): (self.memory[name], value.detach()) for name, value in values.items()}
            for memory, value in pairs.values():
                if memory.data_ptr() != value.data_ptr():  # the weights have been read into this memory
                    memory.detach().copy_(value)
        return dict(self.memory)


def _loading(where: str) -> AbstractContextManager[None]:
    remedy = "compile it for this machine and this version of torch"
    return code_errors(LiveTargetError, "the package cannot be loaded", where=where, remedy=remedy)


def _like(value: torch.Tensor) -> torch.Tensor:
    memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return nn.Parameter(memory, requires_grad=False) if isinstance(value, nn.Parameter) else memory


_FUNCTIONS: dict[str, object] = {
    "math": math,
    "inf": math.inf,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "FloorDiv": operator.floordiv,
}


def inputs_of(program: ExportedProgram, written: Sequence[str]) -> ProgramInputs:
    """Describes the inputs of a program for its manifest. Raises `ExportError` for numbers.

    `written` has the names of inputs that the program writes to.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values: list[ProgramInput] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind.name != "USER_INPUT":
            continue
        name = spec.arg.name
        value = nodes[name].meta.get("val") if name in nodes else None
        if isinstance(value, torch.SymInt):
            raise ExportError(
                "AOTInductor does not take numbers that change from request to request",
                found=name,
                remedy="give them as tensors, or export with kind='exported'",
            )
        if not isinstance(value, torch.Tensor):
            values.append(ProgramInput(name))
            continue
        strides, order = value.stride(), list(range(value.dim()))
        if not value.is_contiguous() and all(isinstance(step, int) for step in strides):
            order.sort(key=strides.__getitem__, reverse=True)
        dtype = str(value.dtype).removeprefix("torch.")
        values.append(ProgramInput(name, dtype, str(value.device), tuple(order), name in written))
    return ProgramInputs(tuple(values), tuple(input_conditions(program, compiled=True)))


class _Call:
    """The call convention of the library: the structure of its inputs and outputs, and checks of the inputs."""

    def __init__(self, runner: _Runner, manifest: Manifest | None, where: str) -> None:
        self._where = where
        self._accepted: list[object] | None = None
        """The signature of the last tensors that were accepted as they are, without containers around them."""
        inputs = None if manifest is None else manifest.inputs
        self._values = None if inputs is None else inputs.values
        conditions = () if inputs is None else inputs.conditions
        self._conditions = [(text, compile(text.strip(), "<condition>", "eval")) for text in conditions]
        usual = {"args", "size", "shape", "stride", "math", *_FUNCTIONS, *dir(math)}
        self._is_usual = all(usual.issuperset(code.co_names) for _, code in self._conditions)
        """Whether all conditions are about the sizes and strides of the inputs."""
        self._functions = {**_FUNCTIONS, **({} if self._is_usual else condition_names())}
        with code_errors(
            DamagedFileError,
            "the description of the inputs in the file has classes that are not registered, or is damaged",
            where=where,
            remedy="import the modules that register the classes of the inputs, or export the program again",
        ):
            self._in_spec, self.out_spec = map(structure_of, runner.call_spec)

    def inputs(self, args: tuple[object, ...], named: dict[str, object]) -> list[torch.Tensor]:
        """Returns the tensors of a call in the library's order. Raises `ProgramInputError`."""
        passed = [*args, *named.values()]
        kinds = [
            (each.shape, each.stride(), each.dtype, each.device)
            if type(each) is torch.Tensor and each.layout is torch.strided and not (each.is_neg() or each.is_conj())
            else None
            for each in passed
        ]
        signature: list[object] = [*named, *kinds]
        if signature == self._accepted:
            return passed  # type: ignore[return-value]
        order = keyword_order(self._in_spec)
        in_order = list(named) == order
        if not in_order and named.keys() == set(order):
            named = {name: named[name] for name in order}
        leaves, spec = flatten((args, named))
        if spec != self._in_spec:
            raise input_error(self._where, "the arguments have another structure", self._in_spec, spec)
        if self._values is not None:  # else the package does not describe its inputs
            leaves = [self._checked(*pair) for pair in zip(self._values, leaves, strict=True)]
            for text, code in self._conditions:
                if not eval(code, self._functions, {"args": leaves}):
                    what = "the inputs have other sizes or values than the library is for"
                    shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                    raise input_error(self._where, what, text, shapes)
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._is_usual and in_order and None not in signature and [*map(id, inputs)] == [*map(id, passed)]:
            self._accepted = signature
        return inputs

    def _checked(self, each: ProgramInput, leaf: object) -> object:
        """Checks an input. Returns a tensor in the order of strides of the export, which the library assumes."""
        if not isinstance(leaf, torch.Tensor) and not each.dtype:
            return leaf  # its value is among the conditions
        expected = f"{each.dtype}, {each.device}, {len(each.order)} dimensions" if each.dtype else "no tensor"
        found = type(leaf).__name__
        if isinstance(leaf, torch.Tensor):
            found = f"{str(leaf.dtype).removeprefix('torch.')}, {leaf.device}, {leaf.dim()} dimensions"
            found += "" if leaf.layout is torch.strided else f", {leaf.layout}"
        if not isinstance(leaf, torch.Tensor) or found != expected:
            raise input_error(self._where, f"{each.name} is of another kind", expected, found)
        if leaf.permute(each.order).is_contiguous() and not (leaf.is_neg() or leaf.is_conj()):
            return leaf
        if each.is_written:
            raise input_error(
                self._where,
                f"the program writes to {each.name}, whose memory order differs from that of the export",
                f"dimensions {list(each.order)} from the farthest apart to the nearest, without gaps",
                f"shape {list(leaf.shape)}, stride {list(leaf.stride())}",
            )
        inverse = sorted(range(leaf.dim()), key=each.order.__getitem__)
        return leaf.permute(each.order).contiguous().resolve_conj().resolve_neg().permute(inverse)


def _values(file: ProgramFile, runner: _Runner) -> dict[str, torch.Tensor]:
    """Returns the value of each constant of the library. Raises `LiveTargetError` where the package lacks some."""
    values = file.weights()
    if values is None:
        with tempfile.TemporaryDirectory() as folder:
            values = aoti_embedded_constants(file.library(folder))
    if lacking := [name for name in runner.names if name not in values]:
        what = "the package has no weights, and a call of it would end the process"
        found = f"none for {listed(lacking, 8)}"
        remedy = "write it with modelstate.export(module, args, path, kind='aoti'), or with its constants"
        if computed := [name for name in lacking if name.startswith("_FOLDED_CONST_")]:
            # By runtime constant folding. The library would not compute them again for another version.
            what = "the package computes constants of its weights when it is first called, and keeps them"
            found, folding = listed(computed, 8), "aot_inductor.use_runtime_constant_folding"
            remedy = f"compile it without {folding}, or with modelstate.export(module, args, path, kind='aoti')"
        raise LiveTargetError(what, where=file.path, found=found, remedy=remedy)
    return values


def _state_of_manifest(
    manifest: Manifest, values: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the state, with the ties of the module, and the hidden buffers."""
    groups = {entry.alias: values[entry.name] for entry in reversed(manifest.tensors) if entry.name in values}
    state: dict[str, torch.Tensor] = {}
    hidden: dict[str, torch.Tensor] = {}
    for entry in manifest.tensors:
        value = groups.get(entry.alias)
        if value is None and entry.role == "hidden":
            continue
        if value is None:  # the program does not use the tensor, so the package does not contain it
            value = torch.empty_strided(entry.shape, entry.stride, dtype=entry.torch_dtype, device="cpu").zero_()
        if entry.role == "parameter" and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        groups[entry.alias] = value
        (hidden if entry.role == "hidden" else state)[entry.name] = value
    return state, hidden


def _check_machine(file: ProgramFile) -> None:
    """Raises `LiveTargetError` for a package for another device than the CPU, or for another CPU."""
    with _loading(file.path):
        metadata = aoti_metadata(file.path, file.model)
    device = metadata.get("AOTI_DEVICE_KEY", "cpu")
    if device != "cpu":
        what, remedy = "the package is for a device that is not served", "serve the exported program, or the module"
        raise LiveTargetError(what, where=file.path, expected="cpu", found=device, remedy=remedy)
    needed = [flag for kind in metadata.get("AOTI_CPU_ISA", "").split() for flag in _INSTRUCTIONS.get(kind, ())]
    flags = system.processor_flags()
    if flags and not flags.issuperset(needed):
        raise LiveTargetError(
            "the package has instructions that this processor lacks, and a call of it would end the process",
            where=file.path,
            expected=listed(flag for flag in dict.fromkeys(needed) if flag not in flags),
            found="a processor without them",
            remedy="compile the package on this machine, or serve the exported program",
        )
