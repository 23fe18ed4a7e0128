"""Saves and loads the state of an optimizer by the names of its parameters.

torch keeps the state by the positions of the parameters. After a parameter has been added, or two have changed places,
the state goes to the wrong parameters, without an error where the shapes allow it. Names do not move.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from modelstate.arguments import checked_call
from modelstate.checkpoint.open import patterns_of
from modelstate.distributed.agreement import PLANNING, READING, TIMEOUT_SECONDS, Digest, agreement_of
from modelstate.errors import OptimizerStateError, OptionError
from modelstate.formats.tree import leaf_paths, refused_in
from modelstate.loading.collective import before_call, described, text_of
from modelstate.objects.optimizer_values import (
    CLASS,
    DTYPES,
    ORDERS,
    OptimizerOptions,
    OptimizerPlan,
    Path,
    PlacedState,
    Values,
    address,
    expected_state,
    group_options,
    hidden_attributes,
    identity,
    in_memory_orders,
    into_recorded_memory,
    is_number,
    is_saved_whole,
    is_torchs,
    is_whole,
    load_values,
    memory_orders,
    parameter_names,
    place,
    placed_state,
    same_state,
    trial_state,
    value_problems,
    whole_state,
    why_not_restored,
)
from modelstate.objects.parts import class_name, imported_class, is_related, is_same_class, start_anew
from modelstate.planning.matching import Patterns, without_wrappers, wrapper_rule
from modelstate.planning.options import check_model
from modelstate.problems import OPTIMIZER_RULES, glob_patterns
from modelstate.process import deferred_signals
from modelstate.rules.optimizer import apply_to_optimizer, changed_values
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Schema, check_rules, renaming, way_back
from modelstate.spec import span
from modelstate.text_format import listed, short_repr
from modelstate.transaction.transaction import Transaction

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which torch may have been built without

_GROUPS = "param_groups"
_OTHER = "other"
"""The key of the state under other keys than parameters."""
_MAX_SHOWN = 12
SCHEDULER_OPTIONS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Options that schedulers put into groups."""
_IMPLEMENTATION_OPTIONS = {"foreach", "fused", "capturable", "differentiable"}
"""Options that do not change what is computed."""


@checked_call("ms.optimizer_state")
def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state of an optimizer by the names that the model has for its parameters.

    The layout is that of `torch.distributed.checkpoint`:
    `{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [names], "lr": ...}]}`. Added are the
    class of the optimizer (`"class": name`) and the dtypes of the parameters (`"dtypes": {name: "torch.float32"}`). The
    state of a parameter may have dicts, lists, tuples and deques of tensors and plain values. State that the optimizer
    keeps under other keys than parameters is under `"other"`.

    Args:
        model: the module that has all parameters of the optimizer.
        optimizer: the optimizer. Its class is saved as the qualified name.

    Returns:
        The state. Its tensors are the live ones, as in `state_dict()`. A parameter without state has an empty one. A
        tied parameter has one state, under its first name.

    Raises:
        OptionError: An argument is of another type.
        OptimizerStateError: A parameter is not the model's; the class of the optimizer has a `state_dict` in a layout
            of its own (`ms.save` and `Store.save` save its result); or the optimizer keeps a value that could not be
            restored, such as an array or a generator.

    Examples:
        >>> state = ms.optimizer_state(model, optimizer)
        >>> state["param_groups"][0]["params"]
        ['weight', 'bias']
    """
    names = {param: first for param, (first, *_) in parameter_names(check_model(model), optimizer).items()}
    if is_saved_whole(optimizer):
        raise OptimizerStateError(
            "the class of the optimizer has a state_dict in a layout of its own, which is not by parameter",
            where=type(optimizer).__qualname__,
            remedy="save it whole, with ms.save or Store.save: ms.save({'model': model, 'optimizer': optimizer}, path)",
        )
    groups = [
        {**group_options(group), "params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    kept = {name: optimizer.state.get(param, {}) for param, name in names.items()}
    other = {key: value for key, value in optimizer.state.items() if key not in names}
    _check_values(kept, other, names, optimizer)
    state = {name: dict(values) for name, values in kept.items()}
    orders = memory_orders(state, {name: param for param, name in names.items()})
    dtypes = {name: str(param.dtype) for param, name in names.items()}
    saved = {"state": state, _GROUPS: groups, CLASS: class_name(_computing_class(optimizer)), DTYPES: dtypes}
    return {**saved, **({_OTHER: other} if other else {}), **({ORDERS: orders} if orders else {})}


def captured_optimizer(modules: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state of an optimizer of some modules, by names, or whole where its class has a layout of its own."""
    if is_saved_whole(optimizer):
        return whole_state(optimizer, parameter_names(modules, optimizer))
    return optimizer_state(modules, optimizer)


@checked_call("ms.load_optimizer_state", within=before_call("modelstate.load_optimizer_state"))
def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, object],
    *,
    rules: Rule | Iterable[Rule] | Schema = (),
    allow_missing: Iterable[str] = (),
    keep_options: Iterable[str] = (),
    process_group: ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    """Loads the result of `optimizer_state` by the names of the parameters, all or nothing.

    An optimizer over DTensors (FSDP2, tensor parallelism) is loaded by all ranks of their mesh together. The state may
    have whole tensors (each rank takes its part of them), or DTensors that are placed as the parameters are, as
    `get_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict` returns them.

    Tensors take the device of their parameter; `step` stays where the optimizer keeps it. Tensors keep the dtype that
    was saved: momentum in float32 beside weights in bfloat16 stays in float32. Where the parameter had another dtype
    when its state was saved, tensors that had the parameter's dtype get the new one. A `state_dict()` of torch does not
    have that dtype; tensors of its optimizers get the parameter's dtype, as from torch's own `load_state_dict`. A
    parameter with an empty saved state has no state afterwards. LBFGS, which keeps all parameters in one vector, takes
    only the same ones in the same order.

    The state of another class of optimizer is refused where it does not fit, and where the saved options would change
    what this optimizer computes: the state of an `Adam` would turn off the decoupled weight decay of an `AdamW`. With
    `keep_options=["*"]` the moments are loaded, and the optimizer computes as it was built to.

    Args:
        model: the module that has all parameters of the optimizer.
        optimizer: the optimizer that gets the state.
        state: the result of `optimizer_state`; or a `state_dict()` of an optimizer that was built with names
            (`torch.optim.Adam(model.named_parameters())`).
        rules: the rules by which the checkpoint was loaded into the model. State for each element of a parameter is
            split, joined and moved with it. Of a `Schema`, predicates are called with the parameter names in the
            state, since it has no version of its own. Where the predicates need other names, of buffers or frozen
            parameters, take the version of the model's checkpoint:
            `rules=schema.rules_for(modelstate.open("model.safetensors"))`.
        allow_missing: glob patterns of names of parameters that may lack a saved state.
        keep_options: glob patterns of options of a group that stay what they are: `["lr"]` goes on with the learning
            rate of this optimizer, `["*"]` loads no options at all. All other options are loaded.
        process_group: the ranks that load together, where the parameters are DTensors; None for the ranks of their
            mesh.
        timeout_seconds: how long a rank waits for the others.

    Raises:
        RankLostError: A rank has not taken part within `timeout_seconds`.
        DistributedError: The model has DTensors, and there is no process group of all ranks of their mesh.
        OptimizerStateError: The state does not fit. The error has every name, shape, group, option and class that does
            not.
        RuleError: A rule cannot be applied, or the version of the state cannot be found.
        OptionError: An argument is of another type, or a pattern matches no option.

    Examples:
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> ms.load_optimizer_state(model, optimizer, state_of_adam, keep_options=["*"])
    """
    given_model = model if isinstance(model, nn.Module) else ()
    agreement = agreement_of(given_model, process_group, timeout_seconds, "modelstate.load_optimizer_state")
    text = f"state of {type(optimizer).__name__}"
    with agreement.collective():
        with agreement.phase(PLANNING, lambda: [Digest.of("the states and options", text, described(given))]):
            model = check_model(model)
            patterns = patterns_of("keep_options", keep_options)
            rules = rules if isinstance(rules, Schema) else check_rules(rules)
            may_miss = patterns_of("allow_missing", allow_missing)
            given = [state, patterns, may_miss, text_of(rules)]
            if found := refused_in(state):
                from modelstate.formats.construct import refusal

                raise refusal(found, "the state")
            options = OptimizerOptions(patterns, Patterns("allow_missing", may_miss), Patterns("allow_unexpected", ()))
            planned = NamedState(model, optimizer, state, rules, options).plan()
            check_keep_options(patterns, [str(key) for group in optimizer.param_groups for key in group_options(group)])
            if planned.problems:
                names = remedies_for_names(planned.missing, planned.unexpected, "take them out of the state")
                raise OptimizerStateError(
                    "the state does not fit the optimizer; nothing has been changed",
                    where=type(optimizer).__name__,
                    found=listed(planned.problems, _MAX_SHOWN, "\n    "),
                    remedy="; or ".join([*planned.remedies, *names]),
                )
        with ExitStack() as held, Transaction(model) as transaction:
            with agreement.phase(READING, decides=True):
                replaced = planned.load(transaction)
                # A rank that is interrupted behind the vote would be the only one that keeps its old state.
                held.enter_context(deferred_signals())
            transaction.at_commit(partial(into_recorded_memory, replaced))
            transaction.commit()


def check_keep_options(patterns: Iterable[str], options: Sequence[str]) -> None:
    """Raises `OptionError` for a pattern that matches none of the options."""
    for pattern in patterns:
        if not any(fnmatchcase(option, pattern) for option in options):
            raise OptionError(
                "a pattern matches no option of an optimizer",
                where=f"keep_options={pattern!r}",
                expected=", ".join(dict.fromkeys(options)) or "an optimizer",
            )


def remedies_for_names(missing: Sequence[str], unexpected: Sequence[str], gone: str) -> list[str]:
    """Returns the remedies for names that do not match.

    Args:
        missing: The parameters that lack state, as `allow_missing` names them.
        unexpected: The saved names that the optimizer does not have.
        gone: What to do with these where their parameters are gone.
    """
    if not missing and not unexpected:
        return []
    remedies = [OPTIMIZER_RULES]
    if missing:
        remedies.append(f"for parameters that are new: allow_missing={glob_patterns(missing)!r}")
    if unexpected:
        remedies.append(f"for those that are gone or frozen: {gone}")
    return remedies


class NamedState:
    """A saved state, by the names that its parameters have after the rules, beside the optimizer that gets it.

    Args:
        model, optimizer, state, rules: as in `load_optimizer_state`.
        options: what the optimizer keeps, and what may be missing.
        paths: the paths of modules in `model`, where the state may have the names that these modules have alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, object],
        rules: Rule | Iterable[Rule] | Schema,
        options: OptimizerOptions,
        paths: Sequence[str] = (),
    ) -> None:
        all_names = parameter_names(check_model(model), optimizer)
        self.names = {param: first for param, (first, *_) in all_names.items()}
        self.params = {name: param for param, of_param in all_names.items() for name in of_param}
        self._optimizer, self._given = optimizer, options
        self._saved_class, self._live_class = state.get(CLASS), _computing_class(optimizer)
        self.is_same_class = self._saved_class == class_name(self._live_class)
        self.may_add = self.is_same_class and not is_torchs(self._live_class)
        """Whether the class may add options and state when it steps, as a counter of the steps of a group."""
        by_name, self._groups = _state_and_groups(state)
        by_name = in_memory_orders(by_name, state.get(ORDERS))
        self.dtypes = cast(Mapping[str, object], state.get(DTYPES, {}))
        """The dtypes that the parameters had, by their saved names."""
        self.other = cast(Mapping[str, object], state.get(_OTHER, {}))
        """The state under other keys than parameters."""
        names = [*by_name, *(name for group in self._groups for name in group["params"])]
        if isinstance(rules, Schema):
            rules = rules.rules(rules.version_of_names(names, type(optimizer).__name__))
        self._rules = check_rules(rules)
        if paths:
            path_of = self._path_of_names(by_name, paths)
            names = [path_of(name) for name in names]
            by_name = {path_of(name): values for name, values in by_name.items()}
            self._groups = [{**group, "params": [*map(path_of, group["params"])]} for group in self._groups]
            if self._saved_class is not None:
                self.dtypes = {path_of(name): dtype for name, dtype in self.dtypes.items()}
        if (wrappers := wrapper_rule(set(map(renaming(self._rules), names)), self.params)) is not None:
            self._rules = (*self._rules, wrappers)
        self.saved_names = names
        """The saved names, before the rules."""
        self.grouped = names[len(by_name) :]
        """Those in groups."""
        origins: Mapping[str, tuple[str, ...]] = {}
        self.by_name: Mapping[str, Values] = by_name
        """The state of each parameter, after the rules."""
        if self._rules:
            self.by_name, origins = apply_to_optimizer(self._rules, by_name)
        renamed, renamed_back = renaming(self._rules), renaming(way_back(self._rules))
        self.sources = {param: set[str]() for param in self.names}
        """The saved names that each parameter may have had."""
        for name, param in self.params.items():
            self.sources[param].update(origins.get(name, ()), [renamed_back(name)])
        for old in self.grouped:
            if (name := renamed(old)) in self.params:
                self.sources[self.params[name]].add(old)

    def plan(self) -> OptimizerPlan:
        """Plans `load_optimizer_state`, and changes nothing."""
        names, params, by_name, given = self.names, self.params, self.by_name, self._given

        # The names of parameters.
        foreign = [name for name in by_name if name not in params]
        foreign += sorted(set(self.grouped).difference(*self.sources.values()))
        may_be_gone = {name for name in (*self.saved_names, *foreign) if given.may_exceed(name)}
        unexpected = [name for name in dict.fromkeys(foreign) if name not in may_be_gone]
        present = {params[name] for name in by_name if name in params} if any(by_name.values()) else {*names}
        missing = [
            name
            for param, name in names.items()
            if not given.may_miss(name) and (param not in present or self.sources[param].isdisjoint(self.grouped))
        ]

        # Options and values.
        options, option_problems = self.matched_groups()
        by_param: dict[torch.Tensor, Values] = {}
        unfit: list[str] = []
        for name, values in by_name.items():
            if name in params and values and not same_state(by_param.setdefault(params[name], values), values):
                unfit.append(f"{name}: its state differs from that of another name of {names[params[name]]}")
        unfit += self.order_problems()
        saved_options = {id(group): of_group for group, of_group in options}
        states: dict[torch.Tensor, PlacedState] = {}
        for group in self._optimizer.param_groups:
            new_options = {**group, **saved_options.get(id(group), {})}
            trial = cache(partial(trial_state, type(self._optimizer), options=new_options))
            for param in group["params"]:
                if param in by_param:
                    expected = None if self.may_add else expected_state(self._optimizer, param, trial(param.dim()))
                    unfit += value_problems(names[param], by_param[param], param, expected, self.is_same_class)
                    dtypes = {str(self.dtypes[name]) for name in self.sources[param] if name in self.dtypes}
                    dtype = dtypes.pop() if len(dtypes) == 1 else None
                    states[param] = partial(
                        placed_state, self._optimizer, param, by_param[param], dtype, new_options, expected
                    )

        keep = f"keep_options=[{path!r}]" if (path := given.path) else 'keep_options=["*"]'
        class_problem, remedies, note = self.class_problem(bool(option_problems or unfit), "" if unfit else keep)
        if not class_problem and (unfit or option_problems):
            is_by_option = not (unfit or missing or unexpected)
            remedies = [f"to keep this optimizer's own options: {keep}"] if is_by_option else []
            remedies.append(f"to begin without the saved state: {start_anew(given.path)}")
        lines = [class_problem] if class_problem else []
        lines += [f"{name}: the optimizer has no such parameter" for name in unexpected]
        lines += [f"{name}: nothing was saved for it" for name in missing]
        return OptimizerPlan(
            load=partial(load_values, self._optimizer, states, self.other, options),
            problems=list(dict.fromkeys([*lines, *option_problems, *unfit])),
            remedies=remedies,
            note=note,
            missing=missing,
            unexpected=unexpected,
        )

    def _path_of_names(self, saved: Iterable[str], paths: Sequence[str]) -> Callable[[str], str]:
        """Returns what puts the path of a module before saved names that are those of the module alone.

        A state that `modelstate.save` has written has names with paths; those of torch's optimizers and of
        `torch.distributed.checkpoint` have none. The way in which more names fit the parameters is taken.
        """
        of_params = [path for path in paths if any(name.startswith(f"{path}.") for name in self.params)]
        if len(of_params) != 1:
            return str
        (path,) = of_params
        bare_params, renamed = {without_wrappers(name) for name in self.params}, renaming(self._rules)
        as_saved, below_path = (
            sum(without_wrappers(renamed(f"{prefix}{name}")) in bare_params for name in saved)
            for prefix in ("", f"{path}.")
        )
        has_paths = self._saved_class is not None if as_saved == below_path else as_saved > below_path
        return str if has_paths else f"{path}.{{}}".format

    def matched_groups(self) -> tuple[list[tuple[dict[str, object], dict[str, object]]], list[str]]:
        """Returns each group of the optimizer with the saved options for it that it does not keep, and problems."""
        matched, problems = [], list[str]()
        groups_of: dict[str, list[int]] = {}
        for index, saved in enumerate(self._groups):
            for name in saved["params"]:
                groups_of.setdefault(name, []).append(index)
        for group in self._optimizer.param_groups:
            wanted = {source for param in group["params"] for source in self.sources[param]}
            candidates = [
                {key: value for key, value in group_options(self._groups[index]).items() if not self._given.keeps(key)}
                for index in sorted({index for name in wanted for index in groups_of.get(name, ())})
            ]
            if any(options != candidates[0] for options in candidates):
                problems.append(
                    f"the group of {min(wanted)}: its parameters were in {len(candidates)} groups with other options"
                )
            elif candidates:
                matched.append((group, candidates[0]))
                unknown = (
                    [] if self.may_add else sorted(candidates[0].keys() - group.keys() - SCHEDULER_OPTIONS, key=str)
                )
                if unknown:
                    noun = "option" if len(unknown) == 1 else "options"
                    problems.append(f"the optimizer does not have the saved {noun} {', '.join(map(str, unknown))}")
                problems += [
                    f"the option {key} is {value!r}, where the optimizer has {group[key]!r}"
                    for key, value in candidates[0].items()
                    if key in group and not _same_kind(value, group[key])
                ]
        return matched, problems

    def order_problems(self) -> Iterator[str]:
        """Yields what prevents a restore of state that is of all parameters together, in their order."""
        optimizer, name, keys = self._optimizer, type(self._optimizer).__name__, listed(map(repr, self.other), 8)
        if isinstance(optimizer, torch.optim.LBFGS) or self.other:
            sources = [self.sources[param] for group in optimizer.param_groups for param in group["params"]]
            if len(self.grouped) != len(sources) or any(
                old not in of_param for old, of_param in zip(self.grouped, sources, strict=True)
            ):
                what = f"has state under {keys}" if self.other else "has one vector"
                yield f"{name} {what} for all parameters: it fits the same ones in order"
        if is_saved_whole(optimizer):
            yield f"the state is by name, and {name} has one in a layout of its own"
        if self.other:
            yield from changed_values(self._rules, self.grouped)
            if not self.is_same_class:
                yield f"{self._live_class.__name__} has no state under {keys}"

    def class_problem(self, has_problems: bool, keep: str) -> tuple[str, list[str], str]:
        """Compares the classes of the state and the optimizer. Returns a problem, its remedies, and a note.

        A class and one that is derived from it may take each other's state, unless an option differs that one of the
        two sets by itself. Other classes need `keep_options` for all options: the same names may mean something else in
        it. Of a file that does not name the class, only options that the live class sets by itself are compared.

        Args:
            has_problems: whether the state has other problems.
            keep: the option with which the optimizer takes the state of the parameters; empty where it cannot.
        """
        live, saved = self._live_class, self._saved_class
        if is_same_class(saved, live):
            return "", [], ""
        imported = imported_class(saved)
        classes = [live, imported] if imported is not None and issubclass(imported, torch.optim.Optimizer) else [live]
        options = [group_options(group) for group in self._groups]
        names = {str(key) for group in options for key in group} - SCHEDULER_OPTIONS
        fixed = {name for cls in classes for name in _fixed_options(cls, names)}
        changed = {
            f"{key} {group[key]!r} -> {saved_group[key]!r}": None
            for key in sorted(fixed)
            for saved_group in options
            for group in self._optimizer.param_groups
            if key in saved_group
            and isinstance(group.get(key), bool | str)
            and saved_group[key] != group[key]
            and not self._given.keeps(key)
        }
        changes = f"the saved options would change what it computes ({', '.join(changed)})" if changed else ""
        if isinstance(saved, str):
            related = is_related(saved, live)
            may_load = not changed if related else all(self._given.keeps(key) for group in options for key in group)
            if may_load and (related or not has_problems):
                return "", [], f"the state of {saved} is loaded into {class_name(live)}"
            problem = f"the state is of {saved}, the optimizer is {class_name(live)}" + (
                f"; {changes}" if changes else ""
            )
            remedies = [f"build the optimizer that was saved: {saved}"]
        elif changes:
            problem, remedies = f"{class_name(live)}: {changes}", ["build the optimizer that was saved"]
        else:
            return "", [], ""
        if keep:
            remedies.append(f"load the state of the parameters alone, with this optimizer's own options: {keep}")
        return problem, [*remedies, f"to begin with a new {class_name(live)}: {start_anew(self._given.path)}"], ""


# The class of the optimizer.


def _computing_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Returns the class of an optimizer; of a wrapper that shares its groups, as accelerate's, the inner class."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and inner.param_groups is optimizer.param_groups:
        return type(inner)
    return type(optimizer)


def _fixed_options(cls: type[torch.optim.Optimizer], names: set[str]) -> set[str]:
    """Returns the options that change what is computed and that the constructor does not take: the class sets them."""
    fixed: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(torch.optim.Optimizer)]:
        if "__init__" in vars(base):
            params = inspect.signature(base.__init__).parameters  # type: ignore[misc]
            if not any(param.kind is param.VAR_KEYWORD for param in params.values()):
                fixed |= names - params.keys()
    return fixed - _IMPLEMENTATION_OPTIONS


# Names, state and groups.


def _check_values(
    state: Mapping[str, Values],
    other: Mapping[Any, object],
    names: Mapping[torch.Tensor, str],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Raises for what a restore could not bring back."""
    places = {address(param) for param in names} - {0}
    problems = [f"{name}: something else than a dict" for name, of in state.items() if not isinstance(of, Mapping)]
    if hidden := hidden_attributes(optimizer):
        problems.append(f"tensors or another optimizer in attributes that its state_dict leaves out: {listed(hidden)}")
    if foreign := sum(isinstance(key, torch.Tensor) for key in other):
        problems.append(f"state for {foreign} tensors that are not its parameters, and have no names")
    views: dict[object, tuple[int, int, Path]] = {}
    """The memory of each tensor that has some: where it begins and ends."""
    for path, leaf in [*leaf_paths(dict(state)), *leaf_paths({_OTHER: dict(other)})]:
        why = why_not_restored(leaf)
        if isinstance(leaf, torch.Tensor):
            if leaf in names or address(leaf) in places:
                why = "shares the memory of a parameter, which a restore would not share"
            if (begin := address(leaf)) and leaf.numel():
                nbytes = span(leaf.shape, leaf.stride()) * leaf.itemsize
                views.setdefault(identity(leaf), (begin, begin + nbytes, path))
        if why:
            problems.append(f"{path[0]}: {place(path[1:])} {why}")
    ordered = sorted(views.values(), key=lambda view: (view[0], -view[1]))
    problems += [
        f"{path[0]}: {place(path[1:])} shares memory with {place(before)}, which a restore would not share"
        for (_, end, before), (begin, _, path) in pairwise(ordered)
        if begin < end
    ]
    if problems:
        raise OptimizerStateError(
            "the optimizer keeps state that could not be restored",
            where=type(optimizer).__qualname__,
            found=listed(problems, 8, "\n    "),
            remedy="keep it as tensors or plain values in the dict of a parameter; or outside of the optimizer, as an "
            "object of its own with state_dict and load_state_dict; or define both in the class of the optimizer, so "
            "that they have it",
        )


def _state_and_groups(state: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the saved state and groups by names, from state by names or by positions with names."""
    saved_groups = state.get(_GROUPS) if isinstance(state, Mapping) else None
    if (
        not isinstance(state, Mapping)
        or not isinstance(state.get("state"), Mapping)
        or not isinstance(saved_groups, Sequence)
        or isinstance(saved_groups, str)
        or not all(isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in saved_groups)
    ):
        raise OptimizerStateError(
            "not the state of an optimizer",
            expected='a mapping with "state" and "param_groups", as modelstate.optimizer_state gives it',
            remedy="restore it with its model: ms.restore({...}, path), or Store.restore" if is_whole(state) else "",
            found=f"a mapping with {listed(map(repr, state))}" if isinstance(state, Mapping) else type(state).__name__,
        )
    groups = [dict(group) for group in saved_groups]
    for name, values in state["state"].items():
        if not isinstance(values, Mapping):
            raise OptimizerStateError("not the state of a parameter", where=name, found=short_repr(values))
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return {str(name): dict(values) for name, values in state["state"].items()}, groups
    names: dict[int, str] = {}
    for group in groups:
        param_names = group.pop("param_names", None)
        are_names = isinstance(param_names, list | tuple) and all(isinstance(name, str) for name in param_names)
        if param_names is None or not are_names or len(param_names) != len(group["params"]):
            raise OptimizerStateError(
                "the state has the positions of the parameters, and not their names",
                expected="the names: a result of modelstate.optimizer_state, or the state of an optimizer over "
                "named_parameters()",
                found="positions",
                remedy="where model and optimizer are built as for the run that saved: "
                "optimizer.load_state_dict(state); then take it by name: modelstate.optimizer_state(model, optimizer)",
            )
        names.update(zip(group["params"], param_names, strict=True))
        group["params"] = list(param_names)
    return {name: dict(state["state"].get(number, {})) for number, name in names.items()}, groups


def _same_kind(saved: object, live: object) -> bool:
    """Whether two values of an option are of one kind. None is of every kind, since an option may be optional."""
    if isinstance(saved, tuple | list) and isinstance(live, tuple | list):
        return len(saved) == len(live) and all(map(_same_kind, saved, live))
    if is_number(live) and not isinstance(live, bool):  # a choice such as fused= may also be None
        return is_number(saved)
    return saved is None or live is None or isinstance(saved, type(live)) or isinstance(live, type(saved))
