"""Verifies that an exported program follows every change of its weights, as the module does."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import nn

from modelstate.errors import ExportedAnswerError, ExportError, NotSwappableError
from modelstate.serve.meta_clone import meta_clone, state_module
from modelstate.serve.state_names import names_by_tensor, runtime_state
from modelstate.serve.target import Target
from modelstate.torch_compat.private import flatten, own_buffers, own_parameters, unflatten

State = dict[str, torch.Tensor]

_OFFSETS = (0.0, 1.0, 8.0)
"""Distances by which values are moved away from zero, after scaling. The first one that changes the answer suffices."""
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
"""The largest difference of an element, relative to the largest element."""
_LOW_PRECISION_TOLERANCE = 2e-2
"""The tolerance for shorter dtypes."""
_VISIBLE = 10.0
"""The number of tolerances from which a change counts as visible."""

_REMEDIES = {
    "exported": "take the values from the tensors in forward(), also while it is exported",
    "aoti": "leave out the options of the compiler that fold or freeze weights; or export with kind='exported'",
}


@dataclass(frozen=True, slots=True)
class ExportVerification:
    """Properties of the tensors, which the verification finds out."""

    mutable: frozenset[str]
    """Buffers that a call has changed."""
    unseen: tuple[str, ...]
    """Weights whose change does not change any answer."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The outputs of a call, and the buffers after it."""

    values: dict[str, object]
    spec: Any
    """The structure of the outputs."""


def verify_export(
    target: Target, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
) -> ExportVerification:
    """Compares the answers of module and program: with the original weights, each tensor changed alone, all changed.

    Args:
        target: the program.
        module: the module that was exported.
        args: inputs of the calls.
        named: inputs by keyword.

    Raises:
        ExportedAnswerError: the answers differ.
        NotSwappableError: the program does not follow a change of some weights.
        ExportError: the answers of the module are random, the module raises, or elements of a weight share memory.
    """
    trial = _Trial(target, module, args, named)
    state = runtime_state(module)
    _check_own_elements(state, trial.where)
    first = trial.of_module(state)
    _check_random(trial, state, first, target.kind)
    difference = _difference(trial.of_program(state), first)
    if difference:
        raise _answer_error(trial.where, difference, "the weights that it was made with")
    unseen: list[str] = []
    wrong: dict[str, str] = {}
    changed: State = {}
    for seed, group in enumerate(names_by_tensor(state)):
        for value in perturbed_values(state[group[0]], seed):
            perturbed = state | dict.fromkeys(group, value)
            expected = trial.of_module_or_none(perturbed)
            if expected is None:
                continue
            changed.update({name: changed.get(name, value) for name in group})
            if not _is_visible(first, expected):
                continue
            difference = _difference(trial.of_program(perturbed), expected)
            if difference:
                wrong[group[0]] = difference
            break
        else:
            unseen += group
    if wrong:
        raise NotSwappableError(
            "the program does not follow changes of its weights: they were compiled into it",
            where=trial.where,
            expected="the answer of the module with the changed tensor",
            found="; ".join(f"{name}: {difference}" for name, difference in islice(wrong.items(), 8)),
            remedy=_REMEDIES[target.kind],
            names=list(wrong),
        )
    expected = trial.of_module_or_none(state | changed)
    difference = "" if expected is None else _difference(trial.of_program(state | changed), expected)
    if difference:
        raise _answer_error(trial.where, difference, "random weights")
    return ExportVerification(trial.mutable, tuple(unseen))


class _Trial:
    """Calls the module and the program with the same inputs and with any weights."""

    def __init__(self, target: Target, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._target, self._inputs = target, (args, dict(named))
        self.where = type(module).__name__
        self._skeleton = meta_clone(module)
        self._first = target.first()
        self.mutable: frozenset[str] = frozenset()

    def of_module(self, state: State, seed: int = 0) -> _Answer:
        """Returns the answer of the module with these weights. Raises what the module raises."""
        module = meta_clone(self._skeleton)
        for name, value in _copies(state).items():
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            if last in own_parameters(owner):
                own_parameters(owner)[last] = cast(nn.Parameter, value)
            else:
                own_buffers(owner)[last] = value
        before = {name: value.clone() for name, value in module.named_buffers()}
        answer = self._answer(module, lambda: dict(module.named_buffers()), seed)
        after = dict(module.named_buffers())
        self.mutable |= {name for name, value in before.items() if not _is_same(value, after.get(name))}
        return answer

    def of_module_or_none(self, state: State) -> _Answer | None:
        """Returns the answer of the module; None where it cannot be called with these weights."""
        try:
            return self.of_module(state)
        except Exception:
            return None

    def of_program(self, state: State) -> _Answer:
        """Returns the answer of a version of the program. Raises `ExportedAnswerError` where the program raises."""
        program = self._target.program(state_module(_copies(state), meta=False))
        try:
            if self._target.runners is not None:
                self._target.runners.attach(program, self._first)
            return self._answer(program, lambda: program.buffers, 0)
        except Exception as error:
            raise ExportedAnswerError(
                "the program raised where the module does not",
                where=self.where,
                found=f"{type(error).__name__}: {error}",
                remedy="export it with other options, or serve the module",
            ) from error
        finally:
            program.end()

    def _answer(self, call: Callable[..., Any], buffers: Callable[[], State], seed: int) -> _Answer:
        leaves, spec = flatten(self._inputs)
        args, named = unflatten([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            outputs, spec = flatten(call(*args, **named))
        values: dict[str, object] = {f"output {index}": value for index, value in enumerate(outputs)}
        return _Answer(values | {f"buffer {name}": value for name, value in buffers().items()}, spec)


def perturbed_values(tensor: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Yields tensors with other values, each farther from the original; none for a tensor without elements.

    Signs are preserved, since variances have to be positive. Integers are permuted, since they may be indices; where
    all are equal they are incremented and decremented.
    """
    if not tensor.numel():
        return
    tensor = tensor.detach()
    if tensor.dtype == torch.bool:
        yield ~tensor
    elif tensor.is_floating_point() or tensor.is_complex():
        generator = torch.Generator().manual_seed(seed)
        for offset in _OFFSETS:
            yield _scaled(tensor, offset, generator)
    else:
        permuted = tensor.reshape(-1).roll(1).reshape(tensor.shape)
        if not torch.equal(permuted, tensor):
            yield _like(tensor, permuted)
        else:
            yield _like(tensor, tensor + 1)
            yield _like(tensor, tensor - 1)


def _scaled(tensor: torch.Tensor, offset: float, generator: torch.Generator) -> torch.Tensor:
    def random() -> torch.Tensor:
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64)

    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    away = torch.where(wide == 0, 0.02 + 0.04 * random(), 0.0) + offset * (0.5 + random())
    sign = torch.where(wide == 0, 1.0, wide.sgn())
    return _like(tensor, (wide * (0.75 + 0.5 * random()) + sign * away).to(tensor.dtype))


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copies a value into a new tensor with the strides, dtype and device of another."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(value)


def _copies(state: State) -> State:
    """Copies a state, with its ties."""
    copies: dict[int, torch.Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in copies:
            copy = _like(tensor, tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(copy, requires_grad=False) if is_parameter else copy
    return {name: copies[id(tensor)] for name, tensor in state.items()}


def _check_own_elements(state: State, where: str) -> None:
    """Raises `ExportError` for expanded tensors, whose elements cannot have different values."""
    expanded = [
        name
        for name, tensor in state.items()
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ]
    if expanded:
        raise ExportError(
            "elements of a weight share their memory, so that it can be given no other weight's values",
            where=where,
            found=", ".join(expanded[:8]),
            remedy="give it memory of its own, as nn.Parameter(value.detach().contiguous())",
        )


def _check_random(trial: _Trial, state: State, first: _Answer, kind: str) -> None:
    """Raises `ExportError` where a compiled program would draw other random numbers than the module.

    An exported program draws the same numbers.
    """
    if kind == "aoti" and _difference(trial.of_module(state, seed=1), first):
        raise ExportError(
            "the answers of the module are random, so that nothing can be proved of a compiled program",
            where=trial.where,
            remedy="call module.eval() before it is exported, or export with kind='exported'",
        )


def _difference(answer: _Answer, expected: _Answer) -> str:
    """Describes the first difference beyond the tolerance of the dtype; empty where there is none."""
    if answer.spec != expected.spec:
        return f"the answer has another structure: {answer.spec} and not {expected.spec}"
    for name, value in expected.values.items():
        other = answer.values.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            if name in answer.values and value != other:
                return f"{name} is {other!r} and not {value!r}"
            continue
        if value.shape != other.shape or value.dtype != other.dtype:
            return f"{name} is {other.dtype} {list(other.shape)} and not {value.dtype} {list(value.shape)}"
        distance = _distance(value, other)
        if not distance <= 1:
            return f"{name} differs by {distance:.3g} times what its dtype allows"
    return ""


def _is_visible(first: _Answer, changed: _Answer) -> bool:
    """Whether two answers of the module differ by more than `_VISIBLE` tolerances."""
    for name, value in first.values.items():
        other = changed.values.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        if value.shape != other.shape or not _distance(value, other) <= _VISIBLE:
            return True
    return False


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors, in tolerances of their dtype."""
    if not one.numel():
        return 0.0
    one, other = one.detach(), other.detach()
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else float("inf")
    wide = torch.complex128 if one.is_complex() else torch.float64
    tolerance = _TOLERANCE.get(one.dtype, _LOW_PRECISION_TOLERANCE)
    one, other = one.to(wide), other.to(wide)
    if not torch.equal(torch.isfinite(one), torch.isfinite(other)):
        return float("inf")
    finite = torch.isfinite(one)
    if not torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num()):
        return float("inf")
    one, other = one[finite], other[finite]
    if not one.numel():
        return 0.0
    scale = max(float(one.abs().max()), 1e-6)
    return float((one - other).abs().max()) / (scale * tolerance)


def _is_same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def _answer_error(where: str, found: str, which: str) -> ExportedAnswerError:
    return ExportedAnswerError(
        f"the program does not answer as the module does, with {which}",
        where=where,
        expected="the same answer, within the tolerance of its dtype",
        found=found,
        remedy="export it with other options, or serve the module",
    )
