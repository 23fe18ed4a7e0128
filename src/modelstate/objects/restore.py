"""Restores saved state into several objects, all or nothing: `modelstate.restore`, and its core for stores.

The modules are loaded first, in one load, so that parameters which are tied across modules stay tied. Optimizers
follow, by the names of their parameters, then objects with `load_state_dict`, and random generators last. One
transaction undoes all of it on any error.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from keyword import iskeyword
from typing import TYPE_CHECKING, Unpack

import torch
from msgspec.structs import replace

from modelstate.arguments import checked_call
from modelstate.checkpoint.checkpoint import Checkpoint, join
from modelstate.checkpoint.open import Source, open as open_checkpoint, patterns_of
from modelstate.distributed.agreement import PLANNING, Agreement, agreement_of
from modelstate.errors import KeyNotFoundError, ModelStateError, ObjectStateError, OptionError, PlanError, Remedy
from modelstate.formats.tree import deep_copy, is_container, items_of, same_value
from modelstate.loading.load import load_then
from modelstate.objects.objects import (
    ModuleArguments,
    RestoreArguments,
    Restored,
    RestoreOptions,
    RulesOf,
    Target,
    object_code,
    restore_order,
    targets_of,
    tensors_within,
)
from modelstate.objects.optimizer_state import NamedState, check_keep_options, remedies_for_names
from modelstate.objects.optimizer_values import (
    DTYPES,
    OptimizerOptions,
    OptimizerPlan,
    Replaced,
    group_options,
    into_recorded_memory,
    is_whole,
    parameter_names,
    plan_whole,
)
from modelstate.objects.parts import KEPT, Kind, Part
from modelstate.objects.per_rank import of_this_rank
from modelstate.objects.stateful import check_class, go_on_from_kept_rates, load_state, own_generator, state_of
from modelstate.planning.matching import Patterns
from modelstate.planning.options import checked_options
from modelstate.planning.planner import Planner
from modelstate.problems import RULES_FROM_SUGGEST, Problem, ProblemKind, glob_patterns, plan_error
from modelstate.rules.rule import Rule, Scoped
from modelstate.rules.schema import Schema, check_rules
from modelstate.spec import set_version_metadata
from modelstate.text_format import listed, short_repr
from modelstate.torch_compat.modules import ModuleContainer
from modelstate.transaction.transaction import Transaction, exclusive

if TYPE_CHECKING:
    from modelstate.planning.plan import LoadReport
    from modelstate.remote.cache import Cache


@checked_call("ms.restore", options=RestoreArguments, defaults=RestoreOptions())
def restore(
    objects: Mapping[str, object],
    source: Source,
    *,
    verify: bool = False,
    cache: Cache | None = None,
    **options: Unpack[RestoreArguments],
) -> Restored:
    """Restores several objects from one file that `modelstate.save` has written: all of them, or none.

    Args:
        objects: the objects, under the names that they were saved under. A plain value asks for the value that was
            saved under its name; the result has it.
        source: a path, a mapping, or a `Checkpoint`.
        rules: changes of names and tensors of the modules; optimizers follow them. A mapping from the path of a module
            gives rules, or a `Schema`, by that module's own names; else names begin with the path:
            "model.encoder.weight". A `Schema` alone is for the one module that is restored.
        allow_missing: glob patterns of what need not have been saved: paths of objects ("ema"), names in modules
            ("model.head.*"), and parameters by the path of their optimizer ("optimizer.model.head.*").
        allow_unexpected: glob patterns of what was saved and need not be among the objects.
        keep_options: glob patterns of optimizers that keep their own options: all options ("optimizer"), or some
            ("optimizer.lr"). The schedule of a scheduler of torch that is restored too goes on from a kept rate.
        device, map, verify, progress, max_memory_bytes, cache: as in `modelstate.loading.LoadOptions`.
        in_place: None reads tensors directly into the memory of the modules where the read cannot fail, as
            `modelstate.load` does; False reads all values before the first one changes. True, which `modelstate.load`
            also takes, is refused: another object may still fail when the modules have been overwritten.
        init_missing: initialises the parameters that the file lacks, as `modelstate.load` does. Optimizers have no
            state for them then.

    Returns:
        The plain values by path, the report of the load, and what was missing and unexpected.

    Raises:
        OpenError: The source cannot be opened as a checkpoint.
        ObjectStateError: An object without saved state, saved state without an object, or an object of another kind;
            or the own code of an object raised.
        OptimizerStateError: What was saved is not the state of an optimizer.
        PlanError: The modules or optimizers do not fit; the error has all problems.
        ChecksumError: With `verify`, the file is not what was saved.
        RollbackError: After another error, an object did not take its own earlier state back.

    The rules and options raise `RuleError` and `OptionError`; the load raises what `modelstate.load`
    raises.

    Examples:
        >>> ms.save({"model": model, "optimizer": optimizer, "epoch": 3}, "run.safetensors")
        >>> ms.restore({"model": model, "optimizer": optimizer, "epoch": 0}, "run.safetensors")["epoch"]
        3
    """
    with agreement_of(tensors_within(objects), call="modelstate.restore").before(PLANNING):
        targets = targets_of(objects)
        checkpoint = open_checkpoint(source, cache=cache)
        if verify:
            checkpoint.verify()
        parts = {path: _part(checkpoint, path, target) for path, target in targets.items()}
        saved = {path: part for path, part in parts.items() if part is not None}
        for path in _paths_without_target(checkpoint, targets):
            saved[path] = Part(Kind.STATEFUL, None)  # the kind is not compared, since the objects lack this path
    return restore_objects(
        objects, saved, source_name="" if isinstance(source, str | os.PathLike) else "source", **options
    )


def _part(checkpoint: Checkpoint, path: str, target: Target) -> Part | None:
    """Returns the part of the checkpoint that was saved for a target; None where it has none."""
    if target.kind is Kind.MODULE:
        with suppress(KeyNotFoundError):
            return Part(Kind.MODULE, checkpoint.select(path))
    try:
        value = checkpoint.value(path)
    except KeyNotFoundError:
        return None
    if target.kind is Kind.MODULE and value != {}:  # a module without state, as a loss function, is an empty mapping
        return None
    return Part(target.kind, value)


def _paths_without_target(checkpoint: Checkpoint, targets: Mapping[str, Target]) -> dict[str, None]:
    """Returns the paths of saved objects that are not among the targets, each cut at the first key no target has.

    A mapping that leads to no target is a value.
    """
    prefixes = {path[:at] for path in targets for at, char in enumerate(path) if char == "."}
    names, stack = list(checkpoint), list(checkpoint.extra.items())
    while stack:
        name, value = stack.pop()
        if name in prefixes and isinstance(value, Mapping) and value:
            stack += [(f"{name}.{key}", item) for key, item in value.items()]
        else:
            names.append(name)
    unmatched: dict[str, None] = {}
    for name in names:
        paths = [name[:at] for at, char in enumerate(name) if char == "."] + [name]
        if targets.keys().isdisjoint(paths):
            unmatched[next((path for path in paths if path not in prefixes), name)] = None
    return unmatched


def restore_objects(
    objects: Mapping[str, object],
    saved: Mapping[str, Part],
    *,
    source_name: str = "",
    agreement: Agreement | None = None,
    rules: RulesOf = (),
    keep_options: Iterable[str] = (),
    **arguments: Unpack[ModuleArguments],
) -> Restored:
    """Restores objects from captured or opened parts, all or nothing: the core of `restore` and `Store.restore`.

    On any error or interrupt all objects are as before: modules, optimizers and generators bit for bit; another object
    gets the copy of its `state_dict()` that was taken before.

    Args:
        objects: as `capture` takes them. A plain value asks for the value that was saved under its name.
        saved: a `Part` for each path; of a module a `Checkpoint`, or a state dict.
        source_name: the variable that stands for the source in code that an error proposes; empty for the path of the
            checkpoint.
        agreement: the ranks that restore together; None for those of the modules' meshes.
        rules, arguments: as in `restore`.
        keep_options: as in `restore`. With all options kept, an optimizer takes the state of the parameters from
            another class of optimizer, where it fits; without, such a state is refused if the optimizer would compute
            otherwise.

    Raises what `restore` raises.
    """
    if agreement is None:
        agreement = agreement_of(tensors_within(objects), call="modelstate.restore")
    with agreement.before(PLANNING):
        restoring = _Restoring(objects, saved, source_name, agreement, rules, keep_options, arguments)
    models = ModuleContainer({path: restoring.modules[path] for path in restoring.checkpoints})
    with agreement.collective(), exclusive(models), Transaction(models) as transaction:
        register_undo(restoring.targets, transaction)
        transaction.reads_values = restoring.runs_code
        report = load_then(
            transaction,
            combined_checkpoint(restoring.checkpoints),
            restoring.options,
            partial(restoring.restore_others, transaction),
            agreement=agreement if agreement.is_collective else None,
            check=restoring.plan_optimizers,
        )
    return restoring.result(report)


def _check_matched(
    targets: Mapping[str, Target], saved: Mapping[str, Part], missing: tuple[str, ...], unexpected: tuple[str, ...]
) -> None:
    """Raises where the paths and kinds of the targets are not those of the saved parts, except for what is allowed."""
    lacking = [path for path in targets if path not in saved and path not in missing]
    excess = [path for path in saved if path not in targets and path not in unexpected]
    kinds = {path: target.kind for path, target in targets.items()}
    other_kind = [path for path in targets if path in saved and saved[path].kind != kinds[path]]
    if not (lacking or excess or other_kind):
        return
    remedies = ["give the objects the names that were saved"] if lacking and excess else []
    if lacking:
        remedies.append(f"leave out what was not saved, or allow_missing={lacking!r}")
        # The kinds of a file of `torch.save`, or of one module, were not saved.
        if [*kinds.values()] == [Kind.MODULE] and all(part.kind is Kind.STATEFUL for part in saved.values()):
            remedies.append("where the file has one module without a name: ms.load(model, source)")
    if excess:
        remedies.append(f"add what was saved, or allow_unexpected={excess!r}")
    if other_kind:
        remedies.append("give objects of the kinds that were saved; a value only asks for one that was saved as such")

    def described(found: Mapping[str, Kind]) -> str:
        return ", ".join(f"{path} ({kind})" if path in other_kind else path for path, kind in found.items())

    raise ObjectStateError(
        "the objects are not those that were saved; nothing has been changed",
        expected=described({path: part.kind for path, part in saved.items()}) or "nothing",
        found=described(kinds) or "nothing",
        remedy="; or ".join(remedies),
    )


def _rules(rules: RulesOf, checkpoints: Mapping[str, Checkpoint]) -> tuple[Rule, ...]:
    """Returns the rules for names that begin with the paths of modules."""
    if isinstance(rules, Schema):
        if len(checkpoints) != 1:
            raise OptionError(
                "a Schema alone is for a restore of one module",
                where="rules=",
                expected="a mapping from the path of a module to its Schema",
                found=", ".join(checkpoints) or "no module",
                remedy=f"rules={{{next(iter(checkpoints))!r}: schema}}" if checkpoints else "leave rules= out",
            )
        rules = dict.fromkeys(checkpoints, rules)
    if not isinstance(rules, Mapping):
        return check_rules(rules)
    scoped: list[Rule] = []
    for path, of_module in rules.items():
        if path not in checkpoints:
            raise OptionError(
                "rules for a path that is not a restored module",
                expected=f"one of {', '.join(checkpoints) or 'none'}",
                found=short_repr(path),
            )
        if isinstance(of_module, Schema):
            of_module = of_module.rules_for(checkpoints[path])
        scoped += [Scoped(f"{path}.", rule) for rule in check_rules(of_module)]
    return tuple(scoped)


class _Restoring:
    """The parts of a restore before and behind the load of the modules. The arguments are those of `restore_objects`.

    Attributes:
        targets: the targets that get a saved state, in the order of the restore.
        modules: the modules among the objects, by path.
        options: those of the load of the modules.
    """

    def __init__(
        self,
        objects: Mapping[str, object],
        saved: Mapping[str, Part],
        source_name: str,
        agreement: Agreement,
        rules: RulesOf,
        keep_options: Iterable[str],
        arguments: ModuleArguments,
    ) -> None:
        targets = targets_of(objects)
        in_place: object = arguments.get("in_place")
        if not (in_place is None or in_place is False):
            raise OptionError(
                "in_place= of a restore says whether all values are read before the first one changes",
                expected="None or False",
                found=short_repr(in_place),
                remedy="leave it out: values whose read cannot fail are read in place; in_place=True is an option of "
                "modelstate.load",
            )
        options = checked_options(key="", **arguments)
        self.keep_options = patterns_of("keep_options", keep_options)
        if self.keep_options:
            names: list[str] = []
            for path, target in targets.items():
                if target.kind is Kind.OPTIMIZER:
                    options_of_groups = {str(key) for group in target.obj.param_groups for key in group_options(group)}
                    names += [path, *(f"{path}.{name}" for name in sorted(options_of_groups))]
            check_keep_options(self.keep_options, names)
        if any(part.ranks for part in saved.values()):
            saved = of_this_rank(saved, targets, agreement)
        self.saved, self.source_name = saved, source_name
        self.may_miss = Patterns("allow_missing", options.allow_missing)
        self.may_exceed = Patterns("allow_unexpected", options.allow_unexpected)
        self.missing = tuple(path for path in targets if path not in saved and self.may_miss.allow(path))
        self.unexpected = tuple(path for path in saved if path not in targets and self.may_exceed.allow(path))
        _check_matched(targets, saved, self.missing, self.unexpected)
        self.modules = {path: target.obj for path, target in targets.items() if target.kind is Kind.MODULE}
        self.checkpoints: dict[str, Checkpoint] = {}
        for path in filter(saved.__contains__, self.modules):
            with object_code(path, "its state cannot be opened"):
                self.checkpoints[path] = open_checkpoint(saved[path].tree)
        self.rules = () if rules == () else _rules(rules, self.checkpoints)
        self.targets = [
            (path, target) for path, target in restore_order(targets) if path in saved and saved[path].tree is not KEPT
        ]
        for path, target in self.targets:
            if target.kind is Kind.STATEFUL:
                check_class(path, target.obj, saved[path].tree)
        not_saved = [targets[path] for path in self.missing]
        optimizers = tuple(target.obj for target in not_saved if target.kind is Kind.OPTIMIZER)
        self.options = replace(options, rules=self.rules, optimizers=optimizers)
        self.plans: dict[str, OptimizerPlan] = {}
        self.notes: list[str] = []

    @property
    def runs_code(self) -> bool:
        """Whether the restore of an object other than a module runs code of the object."""
        return any(
            target.kind is Kind.STATEFUL or (target.kind is Kind.OPTIMIZER and is_whole(self.saved[path].tree))
            for path, target in self.targets
        )

    def plan_optimizers(self, planner: Planner) -> None:
        """Plans the optimizers when the modules are planned, and raises one error with the problems of all of them.

        Optimizers may lack the state of parameters that the load initialises.
        """
        first_error: ModelStateError | None = None
        for path, target in self.targets:
            if target.kind is Kind.OPTIMIZER:
                try:
                    with object_code(path, "its state cannot be loaded; nothing has been changed"):
                        self.plans[path] = self._plan_optimizer(path, target.obj, planner.initialised)
                except ModelStateError as error:
                    first_error = first_error or error
        used = self.may_miss.used | self.may_exceed.used
        idle = [problem for problem in planner.problems if problem.kind is ProblemKind.IDLE_PATTERN]
        if first_error is not None and len(idle) == len(planner.problems):
            raise first_error  # otherwise it may only follow from the other problems
        problems = [item for item in planner.problems if item not in idle or item.name not in used]
        if problems or any(plan.problems for plan in self.plans.values()):
            raise self._plan_error(problems)
        planner.problems.clear()

    def restore_others(self, transaction: Transaction) -> None:
        """Restores all objects except modules."""
        if self.runs_code:
            transaction.arm()
        replaced = list[Replaced]()
        if self.plans:
            transaction.at_commit(partial(into_recorded_memory, replaced))
        generators = [target.obj for _, target in self.targets if target.is_restored_last]
        for path, target in self.targets:
            with object_code(path, "its state cannot be loaded; nothing has been changed"):
                if target.kind is Kind.OPTIMIZER:
                    plan = self.plans[path]
                    replaced += plan.load(transaction)
                    self.notes += [f"{path}: {plan.note}"] if plan.note else []
                elif target.kind is Kind.STATEFUL:
                    state = deep_copy(self.saved[path].tree)  # the object may keep the state that it is given
                    with transaction.model_code():
                        load_state(target.obj, state, generators)
                elif target.kind is Kind.GENERATOR:
                    target.obj.set_state(self.saved[path].tree)
        others = {path: target.obj for path, target in self.targets if target.kind is Kind.STATEFUL}
        for path, target in self.targets:
            if target.kind is Kind.OPTIMIZER:
                go_on_from_kept_rates(path, target.obj, others, self._optimizer_options(path).keeps)

    def result(self, report: LoadReport) -> Restored:
        """Returns the result, with the report of the load of the modules."""
        saved = self.saved
        drawn_from = tuple(
            (path, target, saved[path].tree)
            for path, target in self.targets
            if target.is_restored_last or (target.kind is Kind.STATEFUL and own_generator(target.obj) is not None)
        )
        kept = [path for path, part in saved.items() if part.tree is KEPT]
        notes = [f"{path}: no state was saved for this rank; it is unchanged" for path in kept]
        return Restored(
            {path: saved[path].tree for path, target in self.targets if target.kind is Kind.VALUE},
            replace(report, notes=(*report.notes, *notes, *self.notes)),
            self.missing,
            self.unexpected,
            drawn_from,
        )

    def _optimizer_options(self, path: str, initialised: Container[str] = ()) -> OptimizerOptions:
        return OptimizerOptions(self.keep_options, self.may_miss, self.may_exceed, path, initialised)

    def _plan_optimizer(
        self, path: str, optimizer: torch.optim.Optimizer, initialised: Container[str]
    ) -> OptimizerPlan:
        state, options = self.saved[path].tree, self._optimizer_options(path, initialised)
        models = ModuleContainer(self.modules)
        if is_whole(state):
            return plan_whole(optimizer, parameter_names(models, optimizer), state, self.rules, options)
        if isinstance(state, Mapping) and DTYPES not in state:  # a file of another tool
            dtypes = {
                f"{of_module}.{name}": spec.dtype
                for of_module, checkpoint in self.checkpoints.items()
                for name, spec in checkpoint.items()
            }
            state = {**state, DTYPES: dtypes}
        return NamedState(models, optimizer, state, self.rules, options, [*self.modules]).plan()

    def _plan_error(self, module_problems: Sequence[Problem]) -> PlanError:
        """Returns the error of the modules in terms of several objects, with the problems of the optimizers added."""
        misshapen = {
            problem.name
            for problem in module_problems
            if problem.kind in (ProblemKind.WRONG_SHAPE, ProblemKind.OTHER_DIMENSIONS)
        }
        problems = list(module_problems)
        for path, plan in self.plans.items():
            for line in plan.problems:
                name, _, why = line.partition(": ")
                if " " in name or not why:  # a line about the optimizer, not about a parameter
                    problems.append(Problem(ProblemKind.OPTIMIZER_MISFIT, path, why=line))
                elif name not in misshapen:  # else its state has the shape of the checkpoint's parameter
                    problems.append(Problem(ProblemKind.OPTIMIZER_MISFIT, f"{path}.{name}", why=why))
        missing, unexpected = (
            [problem.name for problem in problems if problem.kind is kind]
            for kind in (ProblemKind.MISSING, ProblemKind.UNEXPECTED)
        )
        renamed = [
            path
            for path in self.checkpoints
            if all(any(name.startswith(f"{path}.") for name in names) for names in (missing, unexpected))
        ]
        missing += [f"{path}.{name}" for path, plan in self.plans.items() for name in plan.missing]
        unexpected += [f"{path}.{name}" for path, plan in self.plans.items() for name in plan.unexpected]
        remedies = [remedy for plan in self.plans.values() for remedy in plan.remedies]
        if any(problem.kind is ProblemKind.OTHER_NAMES for problem in problems):
            remedies.append("pass the rule above: optimizers follow rules")
        else:
            remedies += remedies_for_names(missing, unexpected, f"allow_unexpected={glob_patterns(unexpected)!r}")
        checkpoints = self.checkpoints
        sources = list(dict.fromkeys(checkpoint.source for checkpoint in checkpoints.values()))
        code = ", ".join(f"{path!r}: {_suggest_code(path, checkpoints[path], self.source_name)}" for path in renamed)
        return plan_error(
            ", ".join(checkpoints) or "the objects",
            listed(sources, 3) or "the saved state",
            problems,
            {ProblemKind.OPTIMIZER_MISFIT: "; ".join(remedies)},
            Remedy(f"work out rules: rules={{{code}}}") if code else RULES_FROM_SUGGEST,
        )


def _suggest_code(path: str, checkpoint: Checkpoint, source_name: str) -> str:
    """Returns the call that works out rules for the module at a path; its variable is the last key of the path.

    The checkpoint is a file, a part of a file, or the state dict of a `Part`.
    """
    name = path.rpartition(".")[2]
    variable = name if name.isidentifier() and not iskeyword(name) else "model"
    if source_name:
        return f"ms.suggest({variable}, {source_name}, key={path!r})"
    if checkpoint.format == "mapping":
        return f"ms.suggest({variable}, saved[{path!r}].tree)"
    return f"ms.suggest({variable}, {checkpoint.source!r}{f', key={checkpoint.key!r}' if checkpoint.key else ''})"


def combined_checkpoint(checkpoints: Mapping[str, Checkpoint]) -> Checkpoint:
    """Returns the checkpoints of modules as the checkpoint of their `ModuleContainer`.

    Raises `ReadFailedError` where a file changed between the opening of two of the checkpoints.
    """
    tree: OrderedDict[str, object] = OrderedDict()
    versions: dict[str, object] = {}
    for path, checkpoint in checkpoints.items():
        flat, whole = checkpoint.flat, checkpoint.tree
        items = items_of(whole) if is_container(whole) else (*flat.tensors.items(), *flat.values.items())
        for name, node in items:
            tree[f"{path}.{name}"] = node
        for name, version in (checkpoint.versions or {}).items():
            versions[f"{path}.{name}" if name else path] = version
    set_version_metadata(tree, versions)
    opened = list(checkpoints.values())
    formats = {checkpoint.format for checkpoint in opened}
    sources = {checkpoint.source: None for checkpoint in opened}
    source = listed(sources, 3) if len(sources) > 1 else next(iter(sources), "mapping")
    return join(opened, tree, source, format=formats.pop() if len(formats) == 1 else "mapping")


def register_undo(targets: list[tuple[str, Target]], transaction: Transaction) -> None:
    """Registers with the transaction how to undo a restore of the targets, which come in the order of the restore.

    The plan of an optimizer registers its own undo. Code of other objects may change optimizers, too.

    Raises `ObjectStateError` for an object whose state cannot be copied.
    """
    transaction.others += [target.obj for _, target in targets if target.kind is Kind.OPTIMIZER]
    transaction.register_undo(partial(torch.set_rng_state, torch.get_rng_state()))
    with torch.random.fork_rng(devices=[]):  # an object may draw a seed when it is asked for its state
        # Reversed: generators are captured before another object draws from them, and undone after it.
        for path, target in reversed(targets):
            if target.kind is Kind.STATEFUL:
                transaction.register_undo(_undo_of_stateful(path, target.obj))
            elif target.kind is Kind.GENERATOR:
                transaction.register_undo(partial(target.obj.set_state, target.obj.get_state()))


def _undo_of_stateful(path: str, obj: object) -> Callable[[], None]:
    generator = own_generator(obj)
    random = None if generator is None else generator.get_state()
    with object_code(
        path, "its state cannot be copied, so that a restore could not be undone; nothing has been changed"
    ):
        before = deep_copy(state_of(obj))
    attributes: dict[str, object] = getattr(obj, "__dict__", {})
    bindings = dict(attributes)

    def undo() -> None:
        attributes.clear()
        attributes.update(bindings)
        if generator is not None and random is not None:
            generator.set_state(random)
        with suppress(Exception):
            if same_value(state_of(obj), before):
                return  # unchanged, or restored with its attributes
        with object_code(path, "its load_state_dict does not take what its own state_dict gave before"):
            load_state(obj, before)

    return undo
