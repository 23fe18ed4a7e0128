"""From a source to a program that nobody calls yet, or into one that nobody calls now."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.errors import LiveTargetError, OptionError, PlanError, QuarantinedError, ReadFailedError
from modelstate.loading.load import Source, load, plan
from modelstate.loading.report import LoadReport
from modelstate.planning.matching import matching_part, wrapper_rule
from modelstate.problems import Missing, Problem, Unexpected, plan_error
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Schema, check_rules, renamed_by
from modelstate.serve.buffers import restorer
from modelstate.serve.checks import Kind, check_casts, check_finite, check_kinds, check_layout, dtype_error, kind_of
from modelstate.serve.state_names import runtime_state
from modelstate.serve.target import Program, Target
from modelstate.torch_compat.hooks import without_state_dict_hooks

Buffers = Literal["carry", "reset"]
State = Callable[[], Mapping[str, torch.Tensor]]

_REMEDIES: dict[type[Problem], str] = {
    Missing: "take a checkpoint that has them: a version has all of its weights. rules=[...] can make what is computed",
    Unexpected: "if they are not needed: rules=[ms.rules.Ignore(name)]; if they are missing ones in another spelling: "
    "rules=[ms.rules.Rename(name, other)]",
}


@dataclass(frozen=True, slots=True)
class SwapOptions:
    """How weights are to be brought in. Raises `OptionError`."""

    rules: Iterable[Rule] | Schema = ()
    exact: bool = True
    check_finite: bool = True
    verify: bool = False

    def __post_init__(self) -> None:
        for name in ("exact", "check_finite", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(
                    f"{name}= is a choice of two", expected="True or False", found=repr(getattr(self, name))
                )


class SwapSource:
    """Weights for a target, opened and looked at, of which no bytes have been read. Raises what opening raises."""

    def __init__(self, target: Target, source: Source, asked: SwapOptions) -> None:
        checkpoint = open_checkpoint(source)
        self._target, self._asked = target, asked
        if isinstance(asked.rules, Schema):
            self.part = matching_part(checkpoint, target.names(), asked.rules.renamings(checkpoint))
            rules: tuple[Rule, ...] = asked.rules.rules_for(self.part)
        else:
            rules = check_rules(asked.rules)
            self.part = matching_part(checkpoint, target.names(), [partial(renamed_by, rules)])
        given = {renamed_by(rules, name) for name in self.part}
        wrappers = wrapper_rule(given, target.names())
        renames = rules if wrappers is None else (*rules, wrappers)
        given = given if wrappers is None else {renamed_by(renames, name) for name in self.part}
        self._rules = (*renames, *target.rules(given))
        self._skeleton = target.skeleton(given)
        self._hooks: Callable[[nn.Module], AbstractContextManager[None]] = (
            without_state_dict_hooks if target.is_runtime(given) else lambda module: nullcontext()
        )
        self.source = self.part.source
        slots = self._slots()
        if not rules:  # which may make plain tensors of them
            kinds = {name: kind_of(slot) for name, slot in slots.items() if slot is not None}
            check_kinds({name: spec.stored for name, spec in self.part.items()}, kinds, self.source)
        if asked.exact:
            check_layout(self.part, slots, self.source)

    def stage(self, serving: Program) -> tuple[Program, LoadReport]:
        """A new program with the weights in memory of its own. Raises what `load` and the checks raise."""
        skeleton = self._skeleton
        kinds = _kinds(skeleton)
        with self._refused(), self._hooks(skeleton):
            report = load(skeleton, self.part, rules=self._rules, map=False, verify=self._asked.verify, progress=False)
        self._check_loaded(report, skeleton, kinds, lambda: runtime_state(serving.holder))
        return self._target.program(skeleton), report

    def check(self, serving: Program) -> None:
        """What can be known before a byte is read, of a swap in place. Raises `PlanError` and what the checks raise."""
        skeleton = self._skeleton
        # Buffers may be others just now: requests replace them, and `Target.renew` brings back what is loaded.
        if _parameters(skeleton) != _parameters(serving.holder) or type(skeleton) is not type(serving.holder):
            raise LiveTargetError(
                "these weights can come in through the module's own loading code only, and that not in place",
                where=self._target.name,
                remedy="swap with mode='available'; or, where hooks only rename, give names=NameMap.of(module)",
            )
        with self._refused(), self._hooks(skeleton):
            planned = plan(skeleton, self.part, rules=self._rules, map=False)
            if not planned.ok:
                raise plan_error(planned.target, planned.source, list(planned.problems))
        if self._asked.exact:
            check_casts(planned.steps, self.source)

    def overwrite(self, serving: Program, before: Mapping[str, torch.Tensor]) -> LoadReport:
        """Reads the weights into the memory of a program. Whatever it raises, that memory has to be restored."""
        kinds = _kinds(serving.holder)
        try:
            with self._hooks(serving.holder):
                report = load(
                    serving.holder,
                    self.part,
                    rules=self._rules,
                    map=False,
                    in_place=True,
                    verify=self._asked.verify,
                    progress=False,
                )
        except ReadFailedError as error:
            # It says that values are partly overwritten, which they will not be.
            raise (error.__cause__ if isinstance(error.__cause__, ReadFailedError) else error) from None
        self._check_loaded(report, serving.holder, kinds, lambda: before)
        return report

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Errors of a swap: with its own remedies, and the target's own reason for names that are too many."""
        try:
            yield
        except PlanError as error:
            dtypes = dtype_error(error.problems, self.source) if self._asked.exact else None
            if dtypes is not None:
                raise dtypes from error
            names = [one.name for one in error.problems if isinstance(one, Unexpected)]
            only = len(names) == len(error.problems)
            own = self._target.refused(names) if only else None
            if own is None:
                raise plan_error(self._target.name, self.source, error.problems, _REMEDIES) from error.__cause__
            raise own from error

    def _check_loaded(self, report: LoadReport, filled: nn.Module, kinds: Mapping[str, Kind], serving: State) -> None:
        check_kinds(runtime_state(filled), kinds, self.source)
        if self._asked.exact:
            check_casts(report.steps, self.source)
        if self._asked.check_finite:
            check_finite(filled, serving, self.source)

    def _slots(self) -> dict[str, torch.Tensor | None]:
        """Where each tensor of the source goes, as far as its name says."""
        slots = runtime_state(self._skeleton)
        return {name: slots.get(renamed_by(self._rules, name)) for name in self.part}


def _kinds(module: nn.Module) -> dict[str, Kind]:
    return {name: kind_of(one) for name, one in runtime_state(module).items()}


def _parameters(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises `OptionError` for an argument that is none of its values."""
    if value not in choices:
        raise OptionError(f"{name}= is none of its values", expected=" or ".join(map(repr, choices)), found=repr(value))


class Undo:
    """A copy of a program's weights and buffers, which a call puts back.

    It may be called again where that was interrupted. Raises `QuarantinedError` where it fails.
    """

    def __init__(self, program: Program) -> None:
        self._tensors = {**runtime_state(program.holder), **program.buffers}
        self._copies: dict[int, torch.Tensor] = {id(one): one.detach().clone() for one in self._tensors.values()}
        self._parameters, self._restore = list(program.holder.parameters()), restorer(program, self._copies)

    @property
    def before(self) -> dict[str, torch.Tensor]:
        """The copies, by name."""
        return {name: self._copies[id(one)] for name, one in self._tensors.items()}

    def __call__(self) -> None:
        after = _under_way()
        try:
            with torch.no_grad():
                for one in self._parameters:
                    one.detach().copy_(self._copies[id(one)])
            self._restore()  # a canary's request may have put others in their place
        except Exception as failure:
            raise QuarantinedError(
                "a swap in place failed, and the weights could not be put back: no version can serve",
                found=f"{type(failure).__name__}: {failure}{after}",
                remedy="swap in weights that are known to be good",
            ) from failure


def _under_way() -> str:
    """What is being handled just now."""
    error = sys.exc_info()[1]
    return "" if error is None else f", after {type(error).__name__}: {error}"
