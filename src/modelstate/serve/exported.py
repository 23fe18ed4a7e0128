"""Serves exported programs: each version is a shallow copy of the module that torch makes of the program."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from modelstate.errors import LiveTargetError, ProgramInputError
from modelstate.serve.buffers import buffers_of
from modelstate.serve.meta_clone import meta_clone, runtime_state, state_module
from modelstate.serve.state_names import NameMap, view_key
from modelstate.serve.targets import Program, Target, check_names
from modelstate.text_format import listed
from modelstate.torch_compat.modules import own_buffers, own_modules, own_parameters
from modelstate.torch_compat.private import check_inputs_by

if TYPE_CHECKING:
    from torch.export import ExportedProgram


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
        self, program: "ExportedProgram", names: NameMap | nn.Module | None, name: str = "ExportedProgram"
    ) -> None:
        # A program that was saved and loaded has two tensor objects with one storage for a tied tensor.
        first: dict[object, torch.Tensor] = {}
        state = {name: first.setdefault(view_key(tensor), tensor) for name, tensor in program.state_dict.items()}
        check_names(state, names, name)
        lifted = {spec.target for spec in program.graph_signature.input_specs if spec.target is not None}
        self.fixed = tuple(key for key in program.constants if key in lifted and key not in _buffer_names(program))
        # On meta: a reference to the tensors would keep the memory of version 1 alive.
        super().__init__(name, state_module(state), meta_clone(names) if isinstance(names, nn.Module) else names)
        module: nn.Module = program.module()
        check_inputs_by(module, lambda error: _input_error(name, error))
        hidden = {key: value for key, value in buffers_of(module).items() if key not in state}
        fixed = {key: program.constants[key] for key in self.fixed}
        on_meta = [
            key for key, value in {**hidden, **fixed}.items() if isinstance(value, torch.Tensor) and value.is_meta
        ]
        if on_meta or any(value.is_meta for value in state.values()):
            raise LiveTargetError(
                "the program was exported on the meta device, so it can answer no request",
                where=name,
                found=f"on meta: {listed([*on_meta, *state], 8)}",
                remedy="give the module values before the export: modelstate.load(model, source)",
            )
        self._first = _program(module, {**state, **hidden})
        # Copies: requests may change the buffers of version 1.
        self._hidden = _cloned(hidden)
        self._module = _with_tensors(module, {**runtime_state(self.skeleton), **self._hidden})
        for part in module.modules():  # its graph refers to it, which would keep the memory of version 1 alive
            own_parameters(part).clear()
            own_buffers(part).clear()

    def program(self, filled: nn.Module) -> Program:
        return _program(self._module, {**runtime_state(filled), **_cloned(self._hidden)})


def _program(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Program:
    version = _with_tensors(module, tensors)
    return Program(version, version)


def _buffer_names(program: "ExportedProgram") -> set[str]:
    return {str(spec.target) for spec in program.graph_signature.input_specs if spec.kind.name == "BUFFER"}


def _cloned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns copies of tensors. Names of one tensor stay names of one tensor."""
    copies = {id(tensor): tensor.clone() for tensor in tensors.values()}
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def _with_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> nn.Module:
    """Returns a shallow copy of a module tree with other parameters and buffers, by name."""
    copied = object.__new__(type(module))
    vars(copied).update(vars(module))
    tables: dict[str, dict[str, Any]] = {
        "_parameters": {key: tensors.get(prefix + key, value) for key, value in own_parameters(module).items()},
        "_buffers": {key: tensors.get(prefix + key, value) for key, value in own_buffers(module).items()},
        "_modules": {
            key: None if part is None else _with_tensors(part, tensors, f"{prefix}{key}.")
            for key, part in own_modules(module).items()
        },
    }
    vars(copied).update(tables)
    return copied


def _input_error(where: str, error: Exception) -> ProgramInputError:
    return ProgramInputError(
        "the program was not exported for these inputs",
        where=where,
        expected="inputs for which the guards of torch.export hold",
        found=f"{type(error).__name__}: {error}",
        remedy="give inputs like those of the export, or export with dynamic_shapes= that allow these",
    )
