"""Chooses the kind of target for what `Live` is given, and serves modules, compiled or not.

Exported programs are in `exported.py`, packages of AOTInductor in `aoti.py`.
"""

import os
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from modelstate.errors import LiveTargetError, OptionError
from modelstate.io.files import local_path
from modelstate.problems import REAL
from modelstate.serve.buffers import renew_buffers
from modelstate.serve.checks import check_graph_mode, check_mode
from modelstate.serve.meta_clone import check_captured_references, meta_clone
from modelstate.serve.state_names import NameMap, runtime_state
from modelstate.serve.target import Program, ReadPlan, Target
from modelstate.torch_compat.plain import is_fake, is_sharded
from modelstate.torch_compat.private import (
    compiled_like,
    compiled_module,
    exported_program_class,
    has_compiled_call,
    unwrapped,
)


def target_factory(target: object, names: NameMap | nn.Module | None, training: bool = False) -> Target:
    """Returns the target for an argument of `Live`. Raises as `Live` does."""
    if isinstance(target, str | os.PathLike):
        return target_of_file(local_path(os.fspath(target)), names, training)
    program_class = exported_program_class()
    if program_class is not None and isinstance(target, program_class):
        from modelstate.serve.exported import ExportedTarget

        check_graph_mode(target, training, "ExportedProgram")
        return ExportedTarget(target, names)
    if isinstance(target, nn.Module):
        if names is not None:
            raise OptionError("names= is for exported programs", found="a module, which has its names with it")
        return ModuleTarget(target, training)
    raise LiveTargetError(
        "this cannot be served",
        expected="a module, a compiled module, an ExportedProgram, or the path of a .pt2",
        found=f"{type(target).__module__}.{type(target).__qualname__}",
        remedy="of a function, serve the module that it calls; of a package that was loaded, give the path",
    )


def target_of_file(path: str, names: NameMap | nn.Module | None, training: bool = False) -> Target:
    """Returns the target for a `.pt2` file. Raises as `Live` does."""
    from modelstate.serve.program_file import read_program_file

    file = read_program_file(path)
    if file.kind == "aoti":
        from modelstate.serve.aoti import AotiTarget

        return AotiTarget(file, names)
    from modelstate.serve.exported import ExportedTarget

    if names is None and file.manifest is not None:
        names = file.manifest.names
    program = file.program()
    check_graph_mode(program, training, path)
    return ExportedTarget(program, names, path)


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
        self.name = type(original).__name__
        for path, submodule in original.named_modules():
            if has_compiled_call(submodule) or compiled_module(submodule) is not None:
                raise LiveTargetError(
                    "a part of the module is compiled in place, and a copy of it would not be",
                    where=f"{self.name}.{path}" if path else self.name,
                    remedy="compile the whole: Live(torch.compile(module))",
                )
        _check_tensors(original, self.name)
        self._skeleton = meta_clone(original)
        check_captured_references(original, self._skeleton)
        check_mode(original, training)  # last, since `eval()` alone corrects it
        # A compilation of the skeleton: one of the module itself would keep the memory of version 1 alive.
        self._compiled = None if compiled is None else compiled_like(module, self._skeleton)
        self._first = ModuleProgram(original, module)

    def names(self) -> Collection[str]:
        return list(self._skeleton.state_dict())

    def read_plan(self, names: Collection[str]) -> ReadPlan:
        saved, runtime = set(self._skeleton.state_dict()), set(runtime_state(self._skeleton))
        are_runtime = not (runtime - saved).isdisjoint(names) and (saved - runtime).isdisjoint(names)
        return ReadPlan(meta_clone(self._skeleton), without_hooks=are_runtime)

    def hidden(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, buffer in self._skeleton.named_buffers() if not buffer.is_meta}

    def renew(self, program: Program) -> None:
        renew_buffers(program.weights_module, self._skeleton)

    def program(self, filled: nn.Module) -> "ModuleProgram":
        return ModuleProgram(filled, filled if self._compiled is None else compiled_like(self._compiled, filled))


class ModuleProgram:
    """One version of a module: an instance, and the callable that runs it, eager or compiled."""

    __slots__ = ("_call", "weights_module")

    def __init__(self, weights_module: nn.Module, call: Callable[..., Any]) -> None:
        self.weights_module = weights_module
        self._call = call

    @property
    def module(self) -> nn.Module:
        return self.weights_module

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.weights_module.named_buffers())

    def end(self) -> None:
        pass

    def __call__(self, *args: object, **named: object) -> Any:
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
