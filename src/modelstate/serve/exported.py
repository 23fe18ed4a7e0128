"""Exported programs: one lifted graph, called with the weights of a version."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from modelstate.errors import LiveTargetError
from modelstate.serve.inputs import Inputs, conditions
from modelstate.serve.meta_clone import state_module
from modelstate.serve.state_names import NamedTargetMixin, NameMap, StateNames, check_names, place_of, runtime_state
from modelstate.torch_compat.private import argument_names, guard_function, guards_of, unflatten

_WEIGHTS = ("PARAMETER", "BUFFER")
_WRITTEN = ("BUFFER_MUTATION", "PARAMETER_MUTATION", "USER_INPUT_MUTATION")


class ExportedProgramVersion:
    """The graph of a program with the weights of one version. All versions have one graph."""

    __slots__ = ("_graph", "_hidden", "_weights", "weights_module")
    module = None

    def __init__(self, graph: "_Graph", filled: nn.Module, hidden: dict[str, torch.Tensor]) -> None:
        self._graph, self._hidden = graph, hidden
        self.weights_module = filled
        state = hidden | runtime_state(filled)
        self._weights = tuple(value if name is None else state[name] for name, value in graph.lifted)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        return {**dict(self.weights_module.named_buffers()), **self._hidden}

    def end(self) -> None:
        pass

    def __call__(self, *args: Any, **named: Any) -> Any:
        graph = self._graph
        inputs = graph.inputs.flat(args, named)
        out = graph.run(*self._weights, *inputs)
        if graph.returned:  # not the weight itself, which a swap in place gives new memory
            out = tuple(one.detach() if place in graph.returned else one for place, one in enumerate(out))
        if graph.written:
            return self._write_back(out, inputs)
        return unflatten(list(out), graph.out_spec)

    def _write_back(self, out: tuple[Any, ...], inputs: list[Any]) -> Any:
        """What the graph returns in the place of writing it into a buffer or an input."""
        graph = self._graph
        with torch.no_grad():
            for value, (place, is_input) in zip(out, graph.written, strict=False):
                (inputs if is_input else self._weights)[place].copy_(value)
        return unflatten(list(out[len(graph.written) :]), graph.out_spec)


class _Graph:
    """What all versions of a program have in common."""

    def __init__(self, program: Any, where: str) -> None:
        signature, constants = program.graph_signature, program.constants
        self.run: Callable[..., tuple[Any, ...]] = program.graph_module.forward
        self.out_spec = program.call_spec.out_spec
        self.hidden: dict[str, torch.Tensor] = {}
        """Non-persistent buffers: a copy for each version, as a request may change them."""
        self.lifted: list[tuple[str | None, Any]] = []
        """The first inputs of the graph: the name of a weight, or a constant that all versions share."""
        self.constants: list[str] = []
        """The names of those constants."""
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        values: list[tuple[str, Any]] = []
        places: dict[str, int] = {}
        for one in signature.input_specs:
            kind, name = one.kind.name, getattr(one.arg, "name", "")
            if kind == "USER_INPUT":
                node = nodes.get(name)
                constant = hasattr(one.arg, "value")
                values.append((name, one.arg.value if node is None or constant else node.meta.get("val")))
                continue
            if kind == "TOKEN" or values:
                raise _unsupported(where, f"an input of kind {kind} at {name}")
            places[one.target] = len(self.lifted)
            if kind in _WEIGHTS and (kind == "PARAMETER" or one.persistent):
                self.lifted.append((one.target, None))
            elif kind == "BUFFER":
                self.hidden[one.target] = constants[one.target]
                self.lifted.append((one.target, None))
            else:
                self.lifted.append((None, constants[one.target]))
                self.constants.append(one.target)
        try:
            self.inputs = Inputs(where, program.call_spec.in_spec, values, program.range_constraints)
        except ValueError as error:
            raise _unsupported(where, f"sizes that cannot be checked: {error}") from error
        self._require(program, where)
        names = {one.arg.name for one in signature.input_specs if one.kind.name in _WEIGHTS}
        self.returned = {
            place
            for place, one in enumerate(signature.output_specs)
            if one.kind.name == "USER_OUTPUT" and getattr(one.arg, "name", None) in names
        }
        """The outputs that are weights."""
        self.written = _written(signature, places, [name for name, _ in values], where)

    def _require(self, program: Any, where: str) -> None:
        """Has the inputs fulfil what `torch.export` has found: its answers are wrong for others."""
        try:
            self.inputs.require(
                conditions(guards_of(program), program.call_spec.in_spec, argument_names(program), self.inputs.names)
            )
        except ValueError:  # not of sizes alone, or in words that are new
            try:
                self.inputs.require_by(guard_function(program))
            except Exception as error:
                raise _unsupported(where, f"guards that cannot be checked: {error}") from error


def _written(signature: Any, places: Mapping[str, int], inputs: list[str], where: str) -> list[tuple[int, bool]]:
    """Where each of the first outputs goes: its place, among the inputs or among the weights."""
    found: list[tuple[int, bool]] = []
    for one in signature.output_specs:
        kind = one.kind.name
        if kind in _WRITTEN:
            is_input = kind == "USER_INPUT_MUTATION"
            found.append((inputs.index(one.target) if is_input else places[one.target], is_input))
        elif kind != "USER_OUTPUT":
            raise _unsupported(where, f"an output of kind {kind}")
    return found


class ExportedTarget(NamedTargetMixin):
    """A `torch.export.ExportedProgram`. `names` leads from the names of eager checkpoints, or is the module itself."""

    kind = "exported"
    runners = None

    def __init__(self, program: Any, names: NameMap | nn.Module | None, name: str = "ExportedProgram") -> None:
        self.name = name
        first: dict[object, torch.Tensor] = {}
        # A program that was saved and loaded has two tensors of a tied one, in one place.
        state = {name: first.setdefault(place_of(one), one) for name, one in program.state_dict.items()}
        shown = runtime_state(state_module(state))
        self._state = {name: shown[name] for name in state}
        """Without memory: that of the first version is the first version's."""
        self._graph = _Graph(program, self.name)
        lacking = [name for name, _ in self._graph.lifted if name and name not in {*self._state, *self._graph.hidden}]
        if lacking:
            raise _unsupported(self.name, f"inputs that its state lacks: {', '.join(lacking[:8])}")
        self.fixed: tuple[str, ...] = tuple(self._graph.constants)
        self._first: ExportedProgramVersion | None = ExportedProgramVersion(
            self._graph, state_module(state, meta=False), self._graph.hidden
        )
        # A request may change them in the first version, whose own they are.
        self._hidden = {name: value.clone() for name, value in self._graph.hidden.items()}
        check_names(self._state, names, self.name)
        self._spellings = StateNames(self._state, names)

    @property
    def inputs(self) -> Inputs:
        """What it has to be called with."""
        return self._graph.inputs

    def first(self) -> ExportedProgramVersion:
        given, self._first = self._first, None
        assert given is not None
        return given

    def unexpected_error(self, unexpected: list[str]) -> None:
        return None

    def program(self, filled: nn.Module) -> ExportedProgramVersion:
        filled = state_module(runtime_state(filled), meta=False)  # of the exported module only the weights are wanted
        hidden = {name: value.clone() for name, value in self._hidden.items()}
        return ExportedProgramVersion(self._graph, filled, hidden)


def _unsupported(where: str, what: str) -> LiveTargetError:
    return LiveTargetError(
        "the exported program has a part that cannot be served in versions",
        where=where,
        found=what,
        remedy="serve the eager module, or export the program without it",
    )
