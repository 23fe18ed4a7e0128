"""Verifies an exported program: it has to follow every change of its weights, as the module does."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from modelstate.errors import ExportedAnswerError, ExportError, NotSwappableError
from modelstate.serve.meta_clone import meta_clone, state_module
from modelstate.serve.state_names import names_by_tensor, runtime_state
from modelstate.serve.target import Target
from modelstate.torch_compat.private import flatten, unflatten

_STEPS = (0.0, 1.0, 8.0)
"""How far values are moved away from zero, beside being scaled; the first that shows is enough."""


def perturbed_values(tensor: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Tensors like this one with other values, each farther away; none for a tensor without elements.

    Signs stay, as variances have to be positive. Whole numbers change places, as they may be indices; where all are the
    same they are counted up and down.
    """
    if not tensor.numel():
        return
    tensor = tensor.detach()
    if tensor.dtype == torch.bool:
        yield ~tensor
    elif tensor.is_floating_point() or tensor.is_complex():
        generator = torch.Generator().manual_seed(seed)
        for step in _STEPS:
            yield _scaled(tensor, step, generator)
    else:
        moved = tensor.reshape(-1).roll(1).reshape(tensor.shape)
        if not torch.equal(moved, tensor):
            yield _like(tensor, moved)
        else:
            yield _like(tensor, tensor + 1)
            yield _like(tensor, tensor - 1)


def _scaled(tensor: torch.Tensor, step: float, generator: torch.Generator) -> torch.Tensor:
    def random() -> torch.Tensor:
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64)

    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    away = torch.where(wide == 0, 0.02 + 0.04 * random(), 0.0) + step * (0.5 + random())
    sign = torch.where(wide == 0, 1.0, wide.sgn())
    return _like(tensor, (wide * (0.75 + 0.5 * random()) + sign * away).to(tensor.dtype))


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(value)


_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
"""The most that an element may differ, as a part of the greatest; for shorter dtypes it is `_SHORT`."""
_SHORT = 2e-2
_CLEAR = 10.0
"""A change is seen where it is so many tolerances wide."""

_REMEDIES = {
    "exported": "take the values from the tensors in forward(), also while it is exported",
    "aoti": "leave out the options of the compiler that fold or freeze weights; or export with kind='exported'",
}
State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExportVerification:
    """What was found out on the way."""

    mutable: frozenset[str]
    """Buffers that a call has changed."""
    unseen: tuple[str, ...]
    """Weights whose change no answer shows."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a call gives, and leaves behind."""

    values: dict[str, Any]
    spec: Any


def verify_export(
    target: Target, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
) -> ExportVerification:
    """Calls the module and the program with other weights: with each tensor changed alone, and with all of them.

    Raises `ExportedAnswerError` where the program answers in another way with the weights that it was made with, or
    with others; `NotSwappableError` for weights whose change it does not follow; `ExportError` for a module whose
    answers are random, which raises, or which has weights that cannot be given any values.
    """
    trial = _Trial(target, module, args, named)
    state = runtime_state(module)
    _check_own_elements(state, trial.where)
    first = trial.of_module(state)
    _check_random(trial, state, first, target.kind)
    found = _difference(trial.of_program(state), first)
    if found:
        raise _another_answer(type(module).__name__, found, "the weights that it was made with")
    unseen: list[str] = []
    wrong: dict[str, str] = {}
    changed: State = {}
    for seed, group in enumerate(names_by_tensor(state)):
        for value in perturbed_values(state[group[0]], seed):
            one = dict.fromkeys(group, value)
            expected = trial.of_module_or_none(state | one)
            if expected is None:
                continue
            changed.update({name: changed.get(name, value) for name in group})
            if not _is_seen(first, expected):
                continue
            found = _difference(trial.of_program(state | one), expected)
            if found:
                wrong[group[0]] = found
            break
        else:
            unseen += group
    if wrong:
        raise NotSwappableError(
            "the program does not follow changes of its weights: they were compiled into it",
            where=type(module).__name__,
            expected="the answer of the module with the changed tensor",
            found="; ".join(f"{name}: {what}" for name, what in islice(wrong.items(), 8)),
            remedy=_REMEDIES[target.kind],
            names=list(wrong),
        )
    expected = trial.of_module_or_none(state | changed)
    found = "" if expected is None else _difference(trial.of_program(state | changed), expected)
    if found:
        raise _another_answer(type(module).__name__, found, "random weights")
    return ExportVerification(trial.mutable, tuple(unseen))


class _Trial:
    """The module and the program, called with the same inputs and with weights that are given."""

    def __init__(self, target: Target, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._target, self._inputs = target, (args, dict(named))
        self.where = type(module).__name__
        self._skeleton = meta_clone(module)
        self._first: Any = target.first()
        self.mutable: frozenset[str] = frozenset()

    def of_module(self, state: State, seed: int = 0) -> _Answer:
        """The answer of the module. Raises what that raises."""
        module = meta_clone(self._skeleton)
        own = _copies(state)
        for name, value in own.items():
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            (owner._parameters if last in owner._parameters else owner._buffers)[last] = value  # type: ignore[assignment]
        before = {name: value.clone() for name, value in module.named_buffers()}
        answer = self._answer(module, lambda: dict(module.named_buffers()), seed)
        after = dict(module.named_buffers())
        self.mutable |= {name for name, value in before.items() if not _is_same(value, after.get(name))}
        return answer

    def of_module_or_none(self, state: State) -> _Answer | None:
        """None where the module cannot be called with such weights."""
        try:
            return self.of_module(state)
        except Exception:
            return None

    def of_program(self, state: State) -> _Answer:
        """The answer of a version of the program."""
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
        args, named = unflatten([one.clone() if isinstance(one, torch.Tensor) else one for one in leaves], spec)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            values, spec = flatten(call(*args, **named))
        found = {f"output {index}": value for index, value in enumerate(values)}
        return _Answer(found | {f"buffer {name}": value for name, value in buffers().items()}, spec)


def _copies(state: State) -> State:
    """The same in memory of its own, tied as it was."""
    made: dict[int, torch.Tensor] = {}
    for one in state.values():
        if id(one) not in made:
            copy = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device).copy_(one.detach())
            made[id(one)] = nn.Parameter(copy, requires_grad=False) if isinstance(one, nn.Parameter) else copy
    return {name: made[id(one)] for name, one in state.items()}


def _check_own_elements(state: State, where: str) -> None:
    expanded = [
        name
        for name, one in state.items()
        if any(size > 1 and not stride for size, stride in zip(one.shape, one.stride(), strict=True))
    ]
    if expanded:
        raise ExportError(
            "elements of a weight share their memory, so that it can be given no other weight's values",
            where=where,
            found=", ".join(expanded[:8]),
            remedy="give it memory of its own, as nn.Parameter(value.detach().contiguous())",
        )


def _check_random(trial: _Trial, state: State, first: _Answer, kind: str) -> None:
    """An exported program draws the numbers that the module draws; a compiled one draws others."""
    if kind == "aoti" and _difference(trial.of_module(state, seed=1), first):
        raise ExportError(
            "the answers of the module are random, so that nothing can be proved of a compiled program",
            where=trial.where,
            remedy="call module.eval() before it is exported, or export with kind='exported'",
        )


def _difference(found: _Answer, expected: _Answer) -> str:
    """What differs most; nothing where all is the same, as far as the dtype tells."""
    if found.spec != expected.spec:
        return f"the answer has another structure: {found.spec} and not {expected.spec}"
    for name, value in expected.values.items():
        other = found.values.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            if name in found.values and value != other:
                return f"{name} is {other!r} and not {value!r}"
            continue
        if value.shape != other.shape or value.dtype != other.dtype:
            return f"{name} is {other.dtype} {list(other.shape)} and not {value.dtype} {list(value.shape)}"
        apart = _apart(value, other)
        if not apart <= 1:
            return f"{name} differs by {apart:.3g} times what its dtype allows"
    return ""


def _is_seen(first: _Answer, changed: _Answer) -> bool:
    """Whether two answers of the module differ clearly."""
    for name, value in first.values.items():
        other = changed.values.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        if value.shape != other.shape or not _apart(value, other) <= _CLEAR:
            return True
    return False


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far two tensors are apart, in tolerances of their dtype."""
    if not one.numel():
        return 0.0
    one, other = one.detach(), other.detach()
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else float("inf")
    wide = torch.complex128 if one.is_complex() else torch.float64
    tolerance = _TOLERANCE.get(one.dtype, _SHORT)
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


def _another_answer(where: str, found: str, which: str) -> ExportedAnswerError:
    return ExportedAnswerError(
        f"the program does not answer as the module does, with {which}",
        where=where,
        expected="the same answer, within the tolerance of its dtype",
        found=found,
        remedy="export it with other options, or serve the module",
    )
