"""`modelstate.restore`: the state of several objects back into them, all or nothing."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from keyword import iskeyword
from typing import Any

import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import argument_order, is_objects, is_source
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.errors import (
    KeyNotFoundError,
    MissingObjectError,
    ObjectKindError,
    OptimizerStateError,
    OptionError,
    PlanError,
    UnexpectedObjectError,
)
from modelstate.loading.load import load_then
from modelstate.loading.options import options_of, patterns_of
from modelstate.loading.report import LoadReport
from modelstate.objects.loaders import load_state, own_generator, rewind
from modelstate.objects.objects import (
    GENERATOR,
    KINDS,
    MODULE,
    OPTIMIZER,
    STATEFUL,
    VALUE,
    Objects,
    Part,
    Target,
    bundle,
    bundled,
    check_owners,
    code_of,
    modules_of,
    register_undo,
    restore_order,
    targets_of,
)
from modelstate.objects.optimizer_state import OptimizerPlan, check_keep_options, misfit, plan_by_name, remedy_of
from modelstate.planning.coverage import Patterns
from modelstate.problems import Missing, OptimizerMisfit, OtherNames, Unexpected, WrongShape, plan_error
from modelstate.rules.rule import Rule, Scoped
from modelstate.rules.schema import Schema, check_rules
from modelstate.transaction.exclusive import exclusive
from modelstate.transaction.journal import Journal

RulesOf = Iterable[Rule] | Schema | Mapping[str, Iterable[Rule] | Schema]


@dataclass(frozen=True, slots=True, eq=False)
class Restored(Mapping[str, Any]):
    """What came back: the plain values that were asked for, by their paths. Made by `restore_objects`."""

    plain: Mapping[str, Any] = field(repr=False)
    """The plain values, by path, as this object has them itself."""
    report: LoadReport = field(repr=False)
    """What happened to the tensors of all modules, whose names begin with the paths of the modules."""
    missing: tuple[str, ...] = ()
    """Objects that nothing was saved for, as `allow_missing` allows. They are what they were."""
    unexpected: tuple[str, ...] = ()
    """What was saved for objects that are not there, as `allow_unexpected` allows."""
    _drawn_from: tuple[tuple[str, Target, Any], ...] = field(default=(), repr=False)
    """The random generators, and the loaders that have their own, with what was saved for them."""

    def rewind_generators(self) -> None:
        """Sets the random generators among the objects to their saved states once more.

        Call it before the first step where random numbers are drawn between the restore and that step, as when a
        validation pass is made or another model is initialised. `modelstate.resumable` does it by itself. Generators
        are `torch.Generator`s, `RNG`s, objects whose class says `restored_last`, and those that loaders were given.

        Raises `RandomStateError` and `ObjectStateError` where a generator does not take its state.

            restored = store.restore({"model": model, "rng": ms.RNG()})
            validate(model)
            restored.rewind_generators()
        """
        for path, target, tree in self._drawn_from:
            with code_of(path, "the generator does not take the state"):
                if target.kind == GENERATOR:
                    target.it.set_state(tree)
                elif target.is_late:
                    target.it.load_state_dict(deepcopy(tree))
                else:
                    rewind(target.it, tree)

    def __bool__(self) -> bool:
        """Always true: something was restored, whether plain values were asked for or not."""
        return True

    def __getitem__(self, path: str) -> Any:
        return self.plain[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)


def restore_objects(
    objects: Mapping[str, Any],
    saved: Mapping[str, Part],
    *,
    rules: RulesOf = (),
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    keep_options: Iterable[str] = (),
    device: torch.device | str | None = None,
    map: bool | None = None,
    verify: bool = False,
    progress: bool | None = None,
    max_memory_bytes: int | None = None,
    prefault: bool | None = None,
    source_name: str = "",
    init_missing: bool = False,
) -> Restored:
    """Gives objects the state that was saved for them, all or nothing.

    The modules come first, in one load, so that what is tied across them stays tied; then optimizers, by the names of
    their parameters; then objects with `load_state_dict`; generators last. A plain value among the objects only says
    that the value is wanted: what was saved for it is in the result. Whatever raises, an interrupt included, all
    objects are what they were: modules, optimizers and generators bit for bit; other objects are given the copy of
    their `state_dict()` that was taken before.

    Args:
        objects: as `captured` takes them.
        saved: a `Part` for each path; of a module a `Checkpoint`, or a state dict.
        rules: changes of names and tensors. A mapping from the path of a module gives rules, or a `Schema`, by that
            module's own names; else names begin with the path: "model.encoder.weight". A `Schema` alone is for the one
            module that is restored. Optimizers follow.
        allow_missing: glob patterns of what need not have been saved: paths of objects ("ema"), names in modules
            ("model.head.*"), and parameters by the path of their optimizer ("optimizer.model.head.*").
        allow_unexpected: the same for what was saved and need not be there.
        keep_options: glob patterns of optimizers that keep their own options: all of them ("optimizer"), or some
            ("optimizer.lr"). With all of them, an optimizer takes the state of the parameters from another class of
            optimizer, where it fits; without, such a state is refused if the optimizer would compute otherwise.
        device, map, verify, progress, max_memory_bytes, prefault: as `modelstate.load` has them, for the modules.
        source_name: what an error calls the source in code that it proposes; without it, the path of the checkpoint.
        init_missing: as `modelstate.load` has it. Optimizers have no state for the parameters that are initialised.

    Raises `MissingObjectError`, `UnexpectedObjectError` and `ObjectKindError` for what does not go together,
    `ObjectStateError` where an object's own code raises, `OptimizerStateError`, `RuleError`, `OptionError`, and what
    `modelstate.load` raises. `RollbackError` where an object does not take its own state back.
    """
    targets = targets_of(objects)
    check_owners(targets, modules_of(targets))
    sources = _checked(saved)
    options = options_of("", (), allow_missing, allow_unexpected, None, device, None, map, False, init_missing)
    kept_options = patterns_of("keep_options", keep_options)
    check_keep_options(kept_options, [name for path, target in targets.items() for name in _option_names(path, target)])
    may_miss = Patterns("allow_missing", options.allow_missing)
    may_exceed = Patterns("allow_unexpected", options.allow_unexpected)
    missing = _allowed([path for path in targets if path not in sources], may_miss)
    unexpected = _allowed([path for path in sources if path not in targets], may_exceed)
    _check_matched(targets, sources, missing, unexpected)
    checkpoints = {
        path: _opened(path, sources[path].tree)
        for path, target in targets.items()
        if target.kind == MODULE and path in sources
    }
    options = replace(options, rules=_rules(rules, checkpoints))
    restoring = _Restoring(targets, sources, options.rules, may_miss, may_exceed, kept_options)
    restoring.note_use()
    for checkpoint in dict.fromkeys(checkpoints.values()) if verify else ():
        checkpoint.verify()
    journal = Journal(bundle({path: targets[path].it for path in checkpoints}))
    with exclusive(journal.root):
        try:
            register_undo(restoring.turn, journal)
            report = load_then(
                journal,
                bundled(checkpoints),
                replace(options, of_use=frozenset(may_miss.used | may_exceed.used)),
                partial(restoring.others, journal),
                optimizers=[targets[path].it for path in missing if targets[path].kind == OPTIMIZER],
                progress=progress,
                max_memory_bytes=max_memory_bytes,
                prefault=prefault,
            )
        except BaseException as error:
            try:
                journal.rollback()
            finally:
                journal.rollback()
            if isinstance(error, PlanError):
                raise restoring.plan_error(error, checkpoints, source_name, init_missing) from error.__cause__
            raise
    plain = {path: sources[path].tree for path, target in restoring.turn if target.kind == VALUE}
    report = replace(report, notes=(*report.notes, *restoring.notes))
    return Restored(plain, report, missing, unexpected, restoring.drawn_from)


class _Restoring:
    """What is to be done beside the load of the modules."""

    def __init__(
        self,
        targets: Mapping[str, Target],
        sources: Mapping[str, Part],
        rules: tuple[Rule, ...],
        may_miss: Patterns,
        may_exceed: Patterns,
        keep_options: tuple[str, ...],
    ) -> None:
        self.modules: Objects = modules_of(targets)
        self.turn = [(path, target) for path, target in restore_order(targets) if path in sources]
        """The targets that get a state, in the order in which they do."""
        self._sources, self._rules = sources, rules
        self._may_miss, self._may_exceed, self._keep_options = may_miss, may_exceed, keep_options
        self.notes: list[str] = []
        """What is worth knowing of the optimizers that have got their states."""
        self.drawn_from = tuple(
            (path, target, sources[path].tree)
            for path, target in self.turn
            if target.is_late or own_generator(target.it) is not None
        )

    def note_use(self) -> None:
        """Patterns that have to do with parameters of optimizers need not match anything else."""
        names = [name for name, _ in self.modules.named_parameters()]
        for path, target in self.turn:
            if target.kind == OPTIMIZER:
                state = self._sources[path].tree
                listed = state.get("state", ()) if isinstance(state, Mapping) else ()
                for name in names:
                    self._may_miss.allow(f"{path}.{name}")
                for name in listed:
                    self._may_exceed.allow(f"{path}.{name}")

    def others(self, journal: Journal, initialised: Set[str]) -> None:
        """Gives all objects but the modules their states. Optimizers may lack those of initialised parameters."""
        if any(target.kind == STATEFUL for _, target in self.turn):
            journal.arm()  # the modules may hold optimizers, which are about to be changed
        planned = []
        for path, target in self.turn:
            if target.kind == OPTIMIZER:
                with code_of(path, "its state cannot be loaded; nothing has been changed"):
                    planned.append(self._plan_optimizer(path, target.it, initialised.__contains__))
        if any(one.plan.problems for one in planned):
            raise _misfits([one for one in planned if one.plan.problems])
        for one in planned:
            with code_of(one.path, "its state cannot be loaded; nothing has been changed"):
                one.plan.load()
            self.notes += [f"{one.path}: {one.plan.note}"] if one.plan.note else []
        generators = [target.it for _, target in self.turn if target.is_late]
        for path, target in self.turn:
            if target.kind == STATEFUL:
                with code_of(path, "its load_state_dict raised; nothing has been changed"), journal.model_code():
                    # A copy, since the object may keep what it is given.
                    load_state(target.it, deepcopy(self._sources[path].tree), generators)
            elif target.kind == GENERATOR:
                with code_of(path, "the generator does not take the state; nothing has been changed"):
                    target.it.set_state(self._sources[path].tree)

    def _plan_optimizer(
        self, path: str, optimizer: torch.optim.Optimizer, is_new: Callable[[str], bool]
    ) -> "_PathPlan":
        lacking: list[str] = []
        over: list[str] = []

        def asked(patterns: Patterns, refused: list[str], name: str) -> bool:
            is_allowed = patterns.allow(f"{path}.{name}")
            if not is_allowed:
                refused.append(f"{path}.{name}")
            return is_allowed

        def keeps(option: str) -> bool:
            return any(
                fnmatchcase(path, pattern) or fnmatchcase(f"{path}.{option}", pattern) for pattern in self._keep_options
            )

        plan = plan_by_name(
            self.modules,
            optimizer,
            self._sources[path].tree,
            rules=self._rules,
            may_miss=lambda name: is_new(name) or asked(self._may_miss, lacking, name),
            may_exceed=partial(asked, self._may_exceed, over),
            keeps=keeps,
        )
        return _PathPlan(path, type(optimizer).__name__, plan, lacking, over)

    def plan_error(
        self, error: PlanError, checkpoints: Mapping[str, Checkpoint], source_name: str, init_missing: bool
    ) -> PlanError:
        """The error of the modules in the terms of several objects, with the problems of the optimizers beside it.

        With `init_missing` any parameter may be one that the load would have initialised.
        """
        misshapen = {problem.name for problem in error.problems if isinstance(problem, WrongShape)}
        planned, problems = [], []
        for path, target in self.turn:
            if target.kind == OPTIMIZER:
                with suppress(Exception):  # what raises for a model that was not loaded says nothing of its own
                    planned.append(self._plan_optimizer(path, target.it, lambda _: init_missing))
        for one in planned:
            for line in one.plan.problems:
                name, _, why = line.partition(": ")
                if name not in misshapen:  # its state has the shape of the checkpoint's parameter
                    problems.append(OptimizerMisfit(f"{one.path}.{name}" if why else one.path, why=why or line))
        lacking = [problem.name for problem in error.problems if isinstance(problem, Missing)]
        over = [problem.name for problem in error.problems if isinstance(problem, Unexpected)]
        for one in planned:
            lacking += one.lacking
            over += one.over
        has_rule = any(isinstance(problem, OtherNames) for problem in error.problems)
        remedies = [_class_remedy(one) for one in planned if one.plan.other_class]
        if has_rule:
            remedies.append("pass the rule above: optimizers follow rules")
        elif lacking or over or not remedies:
            remedies.append(_remedy(lacking, over))
        sources = list(dict.fromkeys(checkpoint.source for checkpoint in checkpoints.values()))
        renamed = [
            path
            for path in checkpoints
            if all(
                any(type(problem) is cause and problem.name.startswith(f"{path}.") for problem in error.problems)
                for cause in (Missing, Unexpected)
            )
        ]
        suggested = ", ".join(f"{path!r}: {_suggest_code(path, checkpoints[path], source_name)}" for path in renamed)
        return plan_error(
            ", ".join(checkpoints),
            ", ".join(sources[:3]),
            [*error.problems, *problems],
            {OptimizerMisfit: "; ".join(remedies)},
            *([f"work out rules: rules={{{suggested}}}"] if suggested else []),
        )


@dataclass(frozen=True, slots=True)
class _PathPlan:
    """The plan of the optimizer at a path."""

    path: str
    kind: str
    plan: OptimizerPlan
    lacking: list[str]
    """Names of parameters, with the path before them, that nothing was saved for."""
    over: list[str]
    """Names that were saved, and that the optimizer lacks."""


def _misfits(planned: list[_PathPlan]) -> OptimizerStateError:
    """One error for all optimizers that their states do not fit."""
    lacking = [name for one in planned for name in one.lacking]
    over = [name for one in planned for name in one.over]
    remedies = [_class_remedy(one) for one in planned if one.plan.other_class]
    if lacking or over:
        remedies.append(_remedy(lacking, over))
    several = len(planned) > 1
    found = [(one, line) for one in planned for line in one.plan.problems]
    found.sort(key=lambda pair: pair[0].plan.other_class is None or pair[0].plan.other_class.text != pair[1])
    lines = [f"{one.path}: {line}" if several else line for one, line in found]
    remedy = "; ".join(remedies) or remedy_of(f'["{planned[0].path}.NAME"]')
    return misfit(", ".join(f"{one.path}: {one.kind}" for one in planned), lines, remedy)


def _class_remedy(planned: _PathPlan) -> str:
    """For the state of another class of optimizer."""
    other, path, new = planned.plan.other_class, planned.path, f"{planned.path}_new"
    assert other is not None
    return other.remedy(
        f"[{path!r}]", f"call it {new!r} among the objects, with allow_missing=[{new!r}], allow_unexpected=[{path!r}]"
    )


def _option_names(path: str, target: Target) -> list[str]:
    """What `keep_options` may match of an object."""
    if target.kind != OPTIMIZER:
        return []
    options = {str(key) for group in target.it.param_groups for key in group} - {"params", "param_names"}
    return [path, *(f"{path}.{option}" for option in sorted(options))]


def _remedy(lacking: list[str], over: list[str]) -> str:
    """With the patterns that allow these names to be missing and to be too many."""
    remedies = [OptimizerMisfit.remedy]
    if lacking:
        remedies.append(f"for parameters that are new: allow_missing={_patterns(lacking)!r}")
    if over:
        remedies.append(f"for those that are gone or frozen: allow_unexpected={_patterns(over)!r}")
    return "; ".join(remedies)


def _suggest_code(path: str, checkpoint: Checkpoint, source_name: str) -> str:
    """The call that works out rules for the module of a path, with the last part of the path as its variable.

    The checkpoint is a file, the part of one, or the state dict of a `Part`.
    """
    name = path.rpartition(".")[2]
    variable = name if name.isidentifier() and not iskeyword(name) else "model"
    if source_name:
        return f"ms.suggest({variable}, {source_name}, key={path!r})"
    if checkpoint.format == "mapping":
        return f"ms.suggest({variable}, saved[{path!r}].tree)"
    return f"ms.suggest({variable}, {checkpoint.source!r}{f', key={checkpoint.key!r}' if checkpoint.key else ''})"


def _patterns(names: list[str]) -> list[str]:
    """One for what stands side by side."""
    beside: dict[str, set[str]] = {}
    for name in names:
        beside.setdefault(name.rpartition(".")[0], set()).add(name)
    return [above + ".*" if len(several) > 1 else min(several) for above, several in beside.items()]


def _checked(saved: Mapping[str, Part]) -> Mapping[str, Part]:
    wrong = [path for path, part in saved.items() if not isinstance(part, Part) or part.kind not in KINDS]
    if wrong:
        raise OptionError(
            "not the state of an object", where=wrong[0], expected="a Part", found=repr(saved[wrong[0]])[:200]
        )
    return saved


def _opened(path: str, tree: Any) -> Checkpoint:
    with code_of(path, "its state cannot be opened"):
        return open_checkpoint(tree)


def _allowed(paths: list[str], patterns: Patterns) -> tuple[str, ...]:
    """Those of the paths that the patterns allow."""
    return tuple(path for path in paths if patterns.allow(path))


def _check_matched(
    targets: Mapping[str, Target], sources: Mapping[str, Part], missing: tuple[str, ...], unexpected: tuple[str, ...]
) -> None:
    lacking = [path for path in targets if path not in sources and path not in missing]
    over = [path for path in sources if path not in targets and path not in unexpected]
    also = f"; and there is no object for {', '.join(over)}, which was saved" if over else ""
    if lacking:
        raise MissingObjectError(
            "nothing was saved for these objects; nothing has been changed",
            expected=", ".join(lacking),
            found=(", ".join(sources) or "nothing") + also,
            remedy=f"leave them out, or allow_missing={lacking!r}",
        )
    if over:
        raise UnexpectedObjectError(
            "these were saved, and are not among the objects; nothing has been changed",
            expected=", ".join(targets) or "nothing",
            found=", ".join(over),
            remedy=f"add them, or allow_unexpected={over!r}",
        )
    other = [path for path in targets if path in sources and sources[path].kind != targets[path].kind]
    if other:
        raise ObjectKindError(
            "these are of other kinds than what was saved; nothing has been changed",
            where=", ".join(other),
            expected=", ".join(sources[path].kind for path in other),
            found=", ".join(f"{targets[path].kind} ({type(targets[path].it).__name__})" for path in other),
            remedy="give objects of the kinds that were saved; a plain value only asks for one that was saved as such",
        )


def _rules(given: RulesOf, checkpoints: Mapping[str, Checkpoint]) -> tuple[Rule, ...]:
    """The rules by names that begin with the paths of modules."""
    if isinstance(given, Schema):
        if len(checkpoints) != 1:
            raise OptionError(
                "a Schema alone is for one module, and several are restored"
                if checkpoints
                else "no module is restored",
                where="rules=",
                expected="a mapping from the path of a module to its Schema",
                found=", ".join(checkpoints) or "none",
                remedy=f"rules={{{next(iter(checkpoints))!r}: schema}}" if checkpoints else "leave rules= out",
            )
        given = dict.fromkeys(checkpoints, given)
    if not isinstance(given, Mapping):
        return check_rules(given)
    found: list[Rule] = []
    for path, rules in given.items():
        if path not in checkpoints:
            raise OptionError(
                "rules for what is no module that is restored",
                expected=f"one of {', '.join(checkpoints) or 'none'}",
                found=repr(path),
            )
        several = rules.rules_for(checkpoints[path]) if isinstance(rules, Schema) else rules
        found += [Scoped(f"{path}.", rule) for rule in check_rules(several)]
    return tuple(found)


Source = str | os.PathLike[str] | Mapping[str, Any] | Checkpoint


@argument_order("ms.restore", is_objects, is_source)
def restore(
    objects: Mapping[str, Any],
    source: Source,
    *,
    rules: RulesOf = (),
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    keep_options: Iterable[str] = (),
    device: torch.device | str | None = None,
    map: bool | None = None,
    verify: bool = False,
    progress: bool | None = None,
    max_memory_bytes: int | None = None,
    init_missing: bool = False,
) -> Restored:
    """Gives several objects back what `modelstate.save` has written of them to one file: all of them, or none.

    The objects are found under the names that they were saved under. A plain value among them says that the value is
    wanted; it comes back in the result. The other arguments are those of `modelstate.load`, where patterns of names
    begin with the path of an object; `init_missing` initialises the parameters that the file lacks, for which the
    optimizers then have no state.

    Raises what opening raises, and what `restore_objects` raises; `ChecksumError` with `verify`.
    """
    targets = targets_of(objects)
    checkpoint = open_checkpoint(source)
    if verify:
        checkpoint.verify()
    saved = {path: part for path, target in targets.items() if (part := _part(checkpoint, path, target)) is not None}
    for path in _others([*checkpoint, *_extra_names(checkpoint.extra, targets)], targets):
        saved[path] = Part(STATEFUL, None)  # its kind makes no difference: there is no object for it
    return restore_objects(
        objects,
        saved,
        rules=rules,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        keep_options=keep_options,
        device=device,
        map=map,
        progress=progress,
        max_memory_bytes=max_memory_bytes,
        source_name="" if isinstance(source, str | os.PathLike) else "source",
        init_missing=init_missing,
    )


def _extra_names(extra: Mapping[str, Any], targets: Mapping[str, Target]) -> Iterator[str]:
    """The names of values, down to the objects: what holds no tensors is one value, however much is in it."""
    above = _above(targets)
    left = list(extra.items())
    while left:
        name, value = left.pop()
        if name in above and isinstance(value, Mapping) and value:
            left += [(f"{name}.{key}", one) for key, one in value.items()]
        else:
            yield name


def _above(targets: Mapping[str, Target]) -> set[str]:
    """What leads to the targets."""
    return {path[:at] for path in targets for at, char in enumerate(path) if char == "."}


def _others(names: Iterable[str], targets: Mapping[str, Target]) -> dict[str, None]:
    """Where the names lead that belong to none of the targets: to the first key that no target has."""
    above = _above(targets)
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        paths = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        if targets.keys().isdisjoint(paths):
            found[next((path for path in paths if path not in above), name)] = None
    return found


def _module_state(checkpoint: Checkpoint, path: str) -> Checkpoint | Mapping[str, Any]:
    try:
        return checkpoint.select(path)
    except KeyNotFoundError:
        state = checkpoint.value(path)
        if state == {}:  # it had nothing to save, as a loss function
            return {}
        raise


def _part(checkpoint: Checkpoint, path: str, target: Target) -> Part | None:
    try:
        if target.kind == MODULE:
            return Part(MODULE, _module_state(checkpoint, path))
        value = checkpoint.value(path)
    except KeyNotFoundError:
        return None
    if target.kind == OPTIMIZER and not isinstance(value, Mapping):
        raise ObjectKindError(
            "what was saved is not the state of an optimizer",
            where=f"{checkpoint.source}: {path}",
            expected="a mapping with state and param_groups",
            found=type(value).__name__,
            remedy="look at what the file has there: modelstate.open(path).value(name)",
        )
    return Part(target.kind, value)
