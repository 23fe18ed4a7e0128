"""Serves exported programs: all versions share one lifted graph, which is called with the weights of a version."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from modelstate.errors import LiveTargetError
from modelstate.serve.inputs import Inputs, conditions
from modelstate.serve.meta_clone import meta_clone, runtime_state, state_module
from modelstate.serve.state_names import NameMap, view_key
from modelstate.serve.targets import Program, Target, check_names, cloned
from modelstate.text_format import listed
from modelstate.torch_compat.private import argument_names, guard_function, guards_of, unflatten

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.graph_signature import ExportGraphSignature

_WEIGHTS = ("PARAMETER", "BUFFER")
_WRITTEN = ("BUFFER_MUTATION", "PARAMETER_MUTATION", "USER_INPUT_MUTATION")


class ExportedTarget(Target):
    """A `torch.export.ExportedProgram`.

    Args:
        program: the exported program.
        names: a map from the names of eager checkpoints, or the module that was exported.
        name: the target's name in reports and errors.

    Raises:
        LiveTargetError: the graph or its inputs have a part that cannot be served, or `names` is of another module.
    """

    kind = "exported"

    def __init__(
        self, program: "ExportedProgram", names: NameMap | nn.Module | None, name: str = "ExportedProgram"
    ) -> None:
        # A program that was saved and loaded has two tensor objects with one storage for a tied tensor.
        first: dict[object, torch.Tensor] = {}
        state = {name: first.setdefault(view_key(tensor), tensor) for name, tensor in program.state_dict.items()}
        check_names(state, names, name)
        # On meta: a reference to the tensors would keep the memory of version 1 alive.
        super().__init__(name, state_module(state), meta_clone(names) if isinstance(names, nn.Module) else names)
        self._graph = _Graph(program, name)
        lacking = [name for name, _ in self._graph.lifted if name and name not in {*state, *self._graph.hidden}]
        if lacking:
            raise _unsupported(self.name, f"inputs that its state lacks: {listed(lacking, 8)}")
        self.fixed = tuple(self._graph.constants)
        self._first = ExportedVersion(self._graph, state_module(state, meta=False), self._graph.hidden)
        # Copies: requests may change the buffers of version 1.
        self.hidden = cloned(self._graph.hidden)

    @property
    def inputs(self) -> Inputs:
        """The structure of the program's inputs, and the checks of a call."""
        return self._graph.inputs

    def program(self, filled: nn.Module) -> "ExportedVersion":
        weights = state_module(runtime_state(filled), meta=False)  # without the code of the exported module
        hidden = cloned(self.hidden)
        return ExportedVersion(self._graph, weights, hidden)


class ExportedVersion(Program):
    """One version: the weights, and the graph that all versions share."""

    __slots__ = ("_graph", "_weights")

    def __init__(self, graph: "_Graph", weights: nn.Module, hidden: dict[str, torch.Tensor]) -> None:
        super().__init__(weights, hidden)
        self._graph = graph
        state = hidden | runtime_state(weights)
        self._weights = tuple(value if name is None else state[name] for name, value in graph.lifted)

    def __call__(self, *args: object, **named: object) -> object:
        graph = self._graph
        inputs = graph.inputs.flat(args, named)
        outputs: list[torch.Tensor] = list(graph.run(*self._weights, *inputs))
        for index in graph.returned_weights:
            outputs[index] = outputs[index].detach()  # a swap in place moves the weight itself to other memory
        if graph.written:  # a lifted graph returns new values of buffers and inputs instead of writing them
            with torch.no_grad():
                for value, (index, is_input) in zip(outputs, graph.written, strict=False):
                    target = inputs[index] if is_input else self._weights[index]
                    cast(torch.Tensor, target).copy_(value)
        return unflatten(outputs[len(graph.written) :], graph.out_spec)


class _Graph:
    """The graph of a program, its inputs and its constants, which all versions share."""

    def __init__(self, program: "ExportedProgram", where: str) -> None:
        signature, constants = program.graph_signature, program.constants
        self.run: Callable[..., tuple[torch.Tensor, ...]] = program.graph_module.forward
        self.out_spec = program.call_spec.out_spec
        self.hidden: dict[str, torch.Tensor] = {}
        """Non-persistent buffers. Each version has a copy, since requests may change them."""
        self.lifted: list[tuple[str | None, object]] = []
        """The first inputs of the graph: each is the name of a weight, or None with a constant."""
        self.constants: list[str] = []
        """The names of the constants."""
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        values: list[tuple[str, object]] = []
        indices: dict[str, int] = {}
        for spec in signature.input_specs:
            kind, name = spec.kind.name, getattr(spec.arg, "name", "")
            if kind == "USER_INPUT":
                node = nodes.get(name)
                is_constant = hasattr(spec.arg, "value")
                values.append((name, spec.arg.value if node is None or is_constant else node.meta.get("val")))
                continue
            if kind == "TOKEN" or values:
                raise _unsupported(where, f"an input of kind {kind} at {name}")
            indices[spec.target] = len(self.lifted)
            if kind in _WEIGHTS and (kind == "PARAMETER" or spec.persistent):
                self.lifted.append((spec.target, None))
            elif kind == "BUFFER":
                self.hidden[spec.target] = constants[spec.target]
                self.lifted.append((spec.target, None))
            else:
                self.lifted.append((None, constants[spec.target]))
                self.constants.append(spec.target)
        fixed = {name: constants[name] for name in self.constants}
        candidates = (*values, *self.hidden.items(), *fixed.items())
        on_meta = [name for name, value in candidates if isinstance(value, torch.Tensor) and value.is_meta]
        if on_meta:
            raise LiveTargetError(
                "the program was exported on the meta device, so it can answer no request",
                where=where,
                found=f"on meta: {listed(on_meta, 8)}",
                remedy="give the module values before the export: modelstate.load(model, source)",
            )
        try:
            self.inputs = Inputs(where, program.call_spec.in_spec, values, program.range_constraints)
        except ValueError as error:
            raise _unsupported(where, f"sizes that cannot be checked: {error}") from error
        self._require_guards(program, where)
        weights = {spec.arg.name for spec in signature.input_specs if spec.kind.name in _WEIGHTS}
        self.returned_weights = [
            index
            for index, spec in enumerate(signature.output_specs)
            if spec.kind.name == "USER_OUTPUT" and getattr(spec.arg, "name", None) in weights
        ]
        """The indices of outputs that are weights."""
        self.written = _written(signature, indices, [name for name, _ in values], where)

    def _require_guards(self, program: "ExportedProgram", where: str) -> None:
        """Adds the guards that `torch.export` has found to the checks of inputs: other inputs get wrong answers."""
        try:
            self.inputs.require(
                conditions(guards_of(program), program.call_spec.in_spec, argument_names(program), self.inputs.names)
            )
        except ValueError:  # guards of other things than sizes, or in an unknown notation
            try:
                self.inputs.guard_function = guard_function(program)
            except Exception as error:
                raise _unsupported(where, f"guards that cannot be checked: {error}") from error


def _written(
    signature: "ExportGraphSignature", indices: Mapping[str, int], inputs: list[str], where: str
) -> list[tuple[int, bool]]:
    """Returns the destination of each written output: its index, and whether it counts inputs or lifted weights."""
    written: list[tuple[int, bool]] = []
    for spec in signature.output_specs:
        kind, target = spec.kind.name, str(spec.target)
        if kind in _WRITTEN:
            is_input = kind == "USER_INPUT_MUTATION"
            written.append((inputs.index(target) if is_input else indices[target], is_input))
        elif kind != "USER_OUTPUT":
            raise _unsupported(where, f"an output of kind {kind}")
    return written


def _unsupported(where: str, what: str) -> LiveTargetError:
    return LiveTargetError(
        "the exported program has a part that cannot be served in versions",
        where=where,
        found=what,
        remedy="serve the eager module, or export the program without it",
    )
