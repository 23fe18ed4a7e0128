"""Saves and loads the state of an optimizer by the names of its parameters.

torch keeps the state by the positions of the parameters. After a parameter has been added, or two have changed places,
the state goes to the wrong parameters, without an error where the shapes allow it. Names do not move.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from modelstate.checkpoint.open import checked_call, is_module, patterns_of
from modelstate.distributed.agreement import TIMEOUT_SECONDS, agreement_of
from modelstate.distributed.reports import Digest
from modelstate.errors import OptimizerStateError, OptionError
from modelstate.formats.tree import same_value
from modelstate.loading.collective import before_call, described, text_of
from modelstate.objects.optimizer_class import (
    CLASS,
    SCHEDULER_OPTIONS,
    Group,
    OtherClass,
    class_name,
    computing_class,
    group_options,
    other_class,
)
from modelstate.objects.recorded_memory import Recorded, into_recorded_memory, recorded_by_graphs
from modelstate.planning.differences import wrapper_rule
from modelstate.planning.matching import Patterns, check_model
from modelstate.planning.sharded import ShardedSlot, sharded_slot
from modelstate.process import deferred_signals
from modelstate.rules.expression import Read, values_of
from modelstate.rules.optimizer import apply_to_optimizer
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Schema, check_rules, renaming, way_back
from modelstate.text_format import listed, short_repr
from modelstate.torch_compat.plain import is_sharded
from modelstate.torch_compat.sharding import dtensor_like, local_tensor
from modelstate.transaction.optimizers import check_optimizers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which torch may have been built without

_GROUPS = "param_groups"
_MAX_SHOWN = 12

_Values = Mapping[str, object]
"""The state of one parameter, such as "exp_avg" and "step"."""


def _is_optimizer(value: object) -> bool:
    return isinstance(value, torch.optim.Optimizer)


@checked_call("ms.optimizer_state", is_module, _is_optimizer)
def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state of an optimizer by the names that the model has for its parameters.

    The layout is that of `torch.distributed.checkpoint`, with the class of the optimizer added:
    `{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [names], "lr": ...}], "class": name}`.

    Args:
        model: the module that has all parameters of the optimizer.
        optimizer: the optimizer. Its class is saved as the qualified name.

    Returns:
        The state. Its tensors are the live ones, as in `state_dict()`. A parameter without state has an empty one. A
        tied parameter has one state, under its first name.

    Raises:
        OptionError: An argument is of another type.
        OptimizerStateError: A parameter is not the model's, or the optimizer keeps state beside that of parameters.

    Examples:
        >>> state = ms.optimizer_state(model, optimizer)
        >>> state["param_groups"][0]["params"]
        ['weight', 'bias']
    """
    names = _parameter_names(check_model(model), optimizer)
    _check_no_other_state(optimizer)
    groups = [
        {**group_options(group), "params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {name: dict(optimizer.state.get(param, {})) for param, name in names.items()}
    return {"state": state, _GROUPS: groups, CLASS: class_name(computing_class(optimizer))}


@checked_call(
    "ms.load_optimizer_state", is_module, _is_optimizer, within=before_call("modelstate.load_optimizer_state")
)
def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, object],
    *,
    rules: Rule | Iterable[Rule] | Schema = (),
    allow_missing: Iterable[str] = (),
    keep_options: Iterable[str] = (),
    process_group: "ProcessGroup | None" = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    """Loads the result of `optimizer_state` by the names of the parameters, all or nothing.

    An optimizer over DTensors (FSDP2, tensor parallelism) is loaded by all ranks of their mesh together. The state may
    have whole tensors (each rank takes its part of them), or DTensors that are placed as the parameters are, as
    `get_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict` returns them.

    Tensors take the device of their parameter. Tensors that torch's optimizers keep for each element of a parameter
    also take its dtype; `step` stays where the optimizer keeps it. A parameter with an empty saved state has no state
    afterwards. LBFGS, which keeps all parameters in one vector, takes only the same ones in the same order.

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
        ProcessGroupError: The model has DTensors, and there is no process group of all ranks of their mesh.
        OptimizerStateError: The state does not fit. The error has every name, shape, group, option and class that does
            not.
        RuleError: A rule cannot be applied.
        SchemaError: The version of the state cannot be found.
        OptionError: An argument is of another type, or a pattern matches no option.

    Examples:
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> ms.load_optimizer_state(model, optimizer, state_of_adam, keep_options=["*"])
    """
    given_model = model if isinstance(model, nn.Module) else ()
    agreement = agreement_of(given_model, process_group, timeout_seconds, "modelstate.load_optimizer_state")
    text = f"state of {type(optimizer).__name__}"
    with agreement.held():
        with agreement.phase("planning", lambda: [Digest.of("the states and options", text, described(given))]):
            model = check_model(model)
            patterns = patterns_of("keep_options", keep_options)
            rules = rules if isinstance(rules, Schema) else check_rules(rules)
            may_miss = patterns_of("allow_missing", allow_missing)
            given = [state, patterns, may_miss, text_of(rules)]
            planned = plan_by_name(
                model,
                optimizer,
                state,
                rules=rules,
                may_miss=Patterns("allow_missing", may_miss).allow,
                may_exceed=lambda _: False,
                keeps=lambda option: any(fnmatchcase(option, pattern) for pattern in patterns),
            )
            check_keep_options(patterns, [str(key) for group in optimizer.param_groups for key in group_options(group)])
            if planned.problems:
                other = planned.other_class
                remedy = remedy_of("['NAME']") if other is None else other.remedy('["*"]', "do not load this state")
                raise misfit(type(optimizer).__name__, planned.problems, remedy)
        into_recorded_memory(planned.load(agreement.phase("reading", decides=True)))


def check_keep_options(patterns: Iterable[str], options: Sequence[str]) -> None:
    """Raises `OptionError` for a pattern that matches none of the options."""
    for pattern in patterns:
        if not any(fnmatchcase(option, pattern) for option in options):
            raise OptionError(
                "a pattern matches no option of an optimizer",
                where=f"keep_options={pattern!r}",
                expected=", ".join(dict.fromkeys(options)) or "an optimizer",
            )


def remedy_of(allow_missing: str) -> str:
    """Returns the remedy for state that does not fit; `allow_missing` is the value that it proposes."""
    return (
        "give the rules by which the model was loaded: rules=[...]; for parameters that are new in the model: "
        f"allow_missing={allow_missing}"
    )


def misfit(where: str, problems: Sequence[str], remedy: str) -> OptimizerStateError:
    """Returns the error for optimizer state that does not fit."""
    return OptimizerStateError(
        "the state does not fit the optimizer; nothing has been changed",
        where=where,
        found=listed(problems, _MAX_SHOWN, "\n    "),
        remedy=remedy,
    )


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerPlan:
    """The plan of loading the state of an optimizer. Made by `plan_by_name`."""

    problems: list[str]
    """A line of text for each thing that does not fit."""
    missing: list[str]
    """Names of parameters that lack saved state, and may not."""
    unexpected: list[str]
    """Saved names that the optimizer does not have, and may not be there."""
    other_class: OtherClass | None
    """Set where the class of the saved state is one of the problems."""
    note: str
    """Set where the state is of another class and is loaded all the same."""
    optimizer: torch.optim.Optimizer
    values: Mapping[torch.Tensor, _Values]
    """The saved state of each parameter that has some."""
    options: Sequence[tuple[dict[str, Any], dict[str, Any]]]
    """Groups of the optimizer, each with the saved options that it gets."""
    layout: "_StateLayout"

    def load(self, copying: AbstractContextManager[None] | None = None) -> list[Recorded]:
        """Loads the state, all or nothing. Call it only where there are no problems.

        Args:
            copying: the context within which the values are copied. They take effect after it.

        Returns:
            What is for `into_recorded_memory` when all else has succeeded.

        Raises:
            OptimizerStateError: A value cannot be copied.
        """
        optimizer = self.optimizer
        with ExitStack() as uninterrupted:
            with copying or nullcontext():
                try:
                    new_state: dict[torch.Tensor, dict[str, object]] = {
                        param: _placed(values, param, self.layout) for param, values in self.values.items()
                    }
                    new_options = [(group, _placed_options(options, group)) for group, options in self.options]
                except Exception as error:
                    raise OptimizerStateError(
                        "a value of the state cannot be copied; nothing has been changed",
                        where=type(optimizer).__name__,
                        found=error,
                    ) from error
                # A rank that is interrupted behind the vote would be the only one that keeps its old state.
                uninterrupted.enter_context(deferred_signals())
            recorded: list[Recorded] = []
            for group in optimizer.param_groups:
                for param in group["params"]:
                    new = new_state.get(param, {})
                    recorded += recorded_by_graphs(optimizer.state.pop(param, {}), new, new)
            optimizer.state.update(new_state)
            for group, options in new_options:
                recorded += recorded_by_graphs(group, options, group)
                group.update(options)
        return recorded


def plan_by_name(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, object],
    *,
    rules: Rule | Iterable[Rule] | Schema,
    may_miss: Callable[[str], bool],
    may_exceed: Callable[[str], bool],
    keeps: Callable[[str], bool],
) -> OptimizerPlan:
    """Plans `load_optimizer_state`, and changes nothing.

    Args:
        model, optimizer, state, rules: as in `load_optimizer_state`.
        may_miss: whether the state of the parameter of this name may be missing.
        may_exceed: whether the saved state of this name may belong to no parameter.
        keeps: whether the optimizer keeps its own value of the option of this name.
    """
    model = check_model(model)
    names = _parameter_names(model, optimizer)
    params = {name: param for name, param in model.named_parameters(remove_duplicate=False) if param in names}
    by_name, groups = _state_and_groups(state)
    grouped = [name for group in groups for name in group["params"]]
    in_groups, saved_names = set(grouped), [*by_name, *grouped]
    if isinstance(rules, Schema):
        rules = rules.rules(rules.version_of_names(saved_names, type(optimizer).__name__))
    checked = check_rules(rules)
    wrappers = wrapper_rule(set(map(renaming(checked), saved_names)), params)
    checked = checked if wrappers is None else (*checked, wrappers)
    origins: dict[str, tuple[str, ...]] = {}
    if checked:
        by_name, origins = apply_to_optimizer(checked, by_name)
    sources = _sources(params, groups, checked, origins)
    known = set().union(*sources.values())
    foreign = [name for name in by_name if name not in params] + sorted(in_groups - known)
    unexpected = [name for name in dict.fromkeys(foreign) if not may_exceed(name)]
    problems = [f"{name}: the optimizer has no such parameter" for name in unexpected]
    new = {param: name for param, name in names.items() if sources[param].isdisjoint(in_groups)}
    missing = [name for name in new.values() if not may_miss(name)]
    problems += [f"{name}: nothing was saved for it" for name in missing]
    matched = _matched_groups(groups, optimizer, sources, problems, keeps)
    if isinstance(optimizer, torch.optim.LBFGS):
        live = [param for group in optimizer.param_groups for param in group["params"]]
        if len(grouped) != len(live) or any(
            name not in sources[param] for name, param in zip(grouped, live, strict=True)
        ):
            problems.append("LBFGS has all parameters in one vector, which only fits the same ones in the same order")
    if any(by_name.values()):
        present = {params[name] for name in by_name if name in params}
        lost = [name for param, name in names.items() if not (param in present or param in new or may_miss(name))]
        problems += [f"{name}: its state is not there" for name in lost]
        missing += lost
    by_param: dict[torch.Tensor, _Values] = {}
    for name, values in by_name.items():
        if name in params and values and not _same_state(by_param.setdefault(params[name], values), values):
            problems.append(f"{name}: its state differs from that of another name of {names[params[name]]}")
    layout = _StateLayout(optimizer, matched)
    cls = computing_class(optimizer)
    may_add = not _is_torchs(cls) and state.get(CLASS) == class_name(cls)
    option_problems = [line for group, options in matched for line in _option_problems(options, group, may_add)]
    value_problems = [
        line
        for param, values in by_param.items()
        for line in _value_problems(names[param], values, param, optimizer, layout.values_of(param))
    ]
    other, note = other_class(state, groups, optimizer, keeps, bool(option_problems), bool(value_problems))
    problems = [*([other.text] if other else []), *problems, *option_problems, *value_problems]
    problems = list(dict.fromkeys(problems))
    return OptimizerPlan(problems, missing, unexpected, other, note, optimizer, by_param, matched, layout)


# Names, state and groups.


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    check_optimizers([optimizer], model)
    all_names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = sum(param not in all_names for param in params)
    if foreign:
        raise OptimizerStateError(
            "the optimizer has parameters that the model has not, so they have no names",
            where=type(optimizer).__name__,
            found=f"{foreign} of {len(params)}",
            remedy="give the module that holds all of its parameters",
        )
    return {param: all_names[param] for param in params}


def _check_no_other_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises for state that belongs to no parameter, which would be lost silently."""
    other: list[object] = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        other += [key for key in optimizer.state_dict() if key not in ("state", _GROUPS)]
    if other:
        raise OptimizerStateError(
            "the optimizer keeps state that belongs to no parameter, which has no place here",
            where=type(optimizer).__qualname__,
            found=listed(map(repr, other), 8),
            remedy="save it as an object of its own: one whose state_dict and load_state_dict call the optimizer's",
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
            found=f"a mapping with {', '.join(map(repr, state))}"
            if isinstance(state, Mapping)
            else type(state).__name__,
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


def _sources(
    params: Mapping[str, torch.Tensor],
    groups: Sequence[Group],
    rules: Sequence[Rule],
    origins: Mapping[str, tuple[str, ...]],
) -> dict[torch.Tensor, set[str]]:
    """Returns the saved names that each parameter may have had."""
    sources: dict[torch.Tensor, set[str]] = {param: set() for param in params.values()}
    renamed, renamed_back = renaming(rules), renaming(way_back(rules))
    for name, param in params.items():
        sources[param].update(origins.get(name, ()), [renamed_back(name)])
    for group in groups:
        for saved in group["params"]:
            if (name := renamed(saved)) in params:
                sources[params[name]].add(saved)
    return sources


def _matched_groups(
    groups: Sequence[Group],
    optimizer: torch.optim.Optimizer,
    sources: Mapping[torch.Tensor, set[str]],
    problems: list[str],
    keeps: Callable[[str], bool],
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns each group of the optimizer with the saved options for it that it does not keep; adds to `problems`."""
    matched = []
    groups_of: dict[str, list[int]] = {}
    for index, saved in enumerate(groups):
        for name in saved["params"]:
            groups_of.setdefault(name, []).append(index)
    for group in optimizer.param_groups:
        wanted = {source for param in group["params"] for source in sources[param]}
        candidates = [
            {key: value for key, value in group_options(groups[index]).items() if not keeps(str(key))}
            for index in sorted({index for name in wanted for index in groups_of.get(name, ())})
        ]
        if any(options != candidates[0] for options in candidates):
            problems.append(
                f"the group of {min(wanted)}: its parameters were in {len(candidates)} groups with other options"
            )
        elif candidates:
            matched.append((group, candidates[0]))
    return matched


def _option_problems(saved: Mapping[str, object], group: Group, may_add: bool) -> list[str]:
    """Returns a line for the saved options that the optimizer does not have, and for each that is of another kind.

    With `may_add`, the class of the optimizer adds options when it steps, as a counter of the steps of a group.
    """
    unknown = [] if may_add else sorted(set(saved) - set(group) - SCHEDULER_OPTIONS, key=str)
    noun = "option" if len(unknown) == 1 else "options"
    problems = [f"the optimizer does not have the saved {noun} {', '.join(map(str, unknown))}"] if unknown else []
    return problems + [
        f"the option {key} is {value!r}, where the optimizer has {group[key]!r}"
        for key, value in saved.items()
        if key in group and not _same_kind(value, group[key])
    ]


def _same_kind(saved: object, live: object) -> bool:
    """Whether two values of an option are of one kind. None is of every kind, since an option may be optional."""
    if isinstance(saved, tuple | list) and isinstance(live, tuple | list):
        return len(saved) == len(live) and all(map(_same_kind, saved, live))
    if _is_number(live) and not isinstance(live, bool):  # a choice such as fused= may also be None
        return _is_number(saved)
    return saved is None or live is None or isinstance(saved, type(live)) or isinstance(live, type(saved))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


# Values of the state.


def _same_state(first: _Values, second: _Values) -> bool:
    """Whether two names of a tied parameter have the same state, on this rank."""

    def local(value: object) -> object:
        return local_tensor(value) if isinstance(value, torch.Tensor) and is_sharded(value) else value

    is_same = first.keys() == second.keys()
    return first is second or (is_same and all(same_value(local(first[key]), local(second[key])) for key in first))


def _is_torchs(cls: type) -> bool:
    return cls.__module__.startswith("torch.optim")


class _StateLayout:
    """The state that an optimizer keeps, or would keep, for each of its parameters."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, matched: Iterable[tuple[dict[str, object], dict[str, object]]]
    ) -> None:
        self.group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
        self.casts = _is_torchs(type(optimizer))
        """Whether state for the elements of a parameter has the parameter's dtype; unknown for foreign optimizers."""
        self._optimizer = optimizer
        self._new_options = {id(group): options for group, options in matched}
        """The options that each group is going to have, by the id of the group."""
        self._trials: dict[tuple[int, int], _Values | None] = {}

    def values_of(self, param: torch.Tensor) -> _Values | None:
        """Returns the state of a parameter, else what it would be with the new options; None where that is unknown."""
        if isinstance(self._optimizer, torch.optim.LBFGS):
            return None  # its names depend on the steps that were taken: `al` is added by the second direction
        values: _Values | None = self._optimizer.state.get(param)
        if values:
            return values
        group = self.group_of[param]
        key = id(group), param.dim()
        if key not in self._trials:
            self._trials[key] = _trial_state(self._optimizer, self.options_of(param), param.dim())
        return self._trials[key]

    def options_of(self, param: torch.Tensor) -> dict[str, object]:
        """Returns the options that the group of a parameter is going to have."""
        group = self.group_of[param]
        return {**group, **self._new_options.get(id(group), {})}


def _trial_state(optimizer: torch.optim.Optimizer, options: Mapping[str, object], dims: int) -> _Values | None:
    """Returns the state of a small parameter after a step of an optimizer of torch's; None where it cannot step."""
    build: Any = type(optimizer)
    if not _is_torchs(build):
        return None
    arguments = {key: options[key] for key in inspect.signature(build).parameters if key in options and key != "params"}
    if "capturable" in arguments:
        arguments["capturable"] = False  # the trial runs on the CPU
    param = nn.Parameter(torch.zeros([2] * dims, device="cpu"))
    param.grad = torch.ones_like(param)
    try:
        trial: torch.optim.Optimizer = build([param], **arguments)
        trial.step()
    except Exception:  # it needs a closure, sparse gradients, or another device
        return None
    return dict(trial.state.get(param, {}))


def _value_problems(
    name: str, values: _Values, param: torch.Tensor, optimizer: torch.optim.Optimizer, expected: _Values | None
) -> list[str]:
    """Returns a line for each saved value of a parameter that does not fit; `expected` is the state that it has."""
    known = {} if expected is None else expected
    unknown = [] if expected is None else [str(key) for key in values if key not in expected]
    problems = [f"{name}: the optimizer does not keep the saved {', '.join(unknown)}"] if unknown else []
    problems += [f"{name}: {key} is lacking" for key in known if key not in values]
    for key, value in values.items():
        why = _unfit_for_param(value, param, optimizer) or (_unlike(value, known[key]) if key in known else "")
        if why:
            problems.append(f"{name}: {key} {why}")
    return problems


def _unfit_for_param(value: object, param: torch.Tensor, optimizer: torch.optim.Optimizer) -> str:
    """Returns why a value cannot be state of a parameter; empty where it can."""
    if isinstance(value, torch.Tensor) and (is_sharded(value) or (is_sharded(param) and value.dim())):
        return _unfit_for_shard(value, param)
    if not isinstance(value, torch.Tensor):
        return "" if value is None or isinstance(value, int | float | list | tuple) else f"is {type(value).__name__}"
    if value.layout is not torch.strided or value.is_meta:
        return f"has no values that could be copied: {value.layout} on {value.device}"
    if value.is_complex() and not param.is_complex():
        return "is complex, and the parameter is not"
    if not value.dim() or isinstance(optimizer, torch.optim.LBFGS):
        return ""
    if not _is_torchs(type(optimizer)):
        return ""  # a foreign optimizer may keep state of any shape
    fits = value.shape == param.shape
    if isinstance(optimizer, torch.optim.Adafactor):  # one value for each element, or for each row or column
        fits = _is_reduced(value, param)
    return "" if fits else f"has the shape {list(value.shape)}, the parameter {list(param.shape)}"


def _unfit_for_shard(value: torch.Tensor, param: torch.Tensor) -> str:
    """Returns why a rank cannot take its part of a value for a DTensor; empty where it can."""
    if not is_sharded(param):
        return "is a DTensor, and the parameter is not"
    if value.shape != param.shape:
        text = f"has the shape {list(value.shape)}, the parameter {list(param.shape)}"
        if _is_reduced(value, param):
            text += ": one value for each row or column, which is not split over the ranks of a DTensor"
        return text
    slot = sharded_slot("", param, value, None)
    return "" if isinstance(slot, ShardedSlot) else f"cannot be split over the ranks: {slot.title}"


def _is_reduced(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether each size is that of the parameter, or 1 where a value stands for a whole row or column."""
    return value.dim() == param.dim() and all(a in (1, b) for a, b in zip(value.shape, param.shape, strict=True))


def _unlike(value: object, expected: object) -> str:
    """Returns how a value differs from what the optimizer keeps; a number and a tensor of one element are alike."""
    if value is None or expected is None or (_is_number(value) and _is_number(expected)):
        return ""
    if isinstance(value, torch.Tensor) != isinstance(expected, torch.Tensor):
        return f"is {type(value).__name__}, where the optimizer has {type(expected).__name__}"
    if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
        if value.dim() != expected.dim():
            return f"has {value.dim()} dimensions, where the optimizer has {expected.dim()}"
        if value.is_floating_point() != expected.is_floating_point():
            return f"is {value.dtype}, where the optimizer has {expected.dtype}"
    return ""


@torch.inference_mode(False)  # a tensor made in that mode could never be updated
def _placed(values: _Values, param: torch.Tensor, layout: _StateLayout) -> dict[str, object]:
    """Returns copies of the values on the device, and in the dtype, that the optimizer needs for the parameter."""
    options = layout.options_of(param)
    step_on_device = bool(options.get("capturable") or options.get("fused"))
    dtype = param.dtype if param.is_floating_point() and layout.casts else None
    placed = {key: _copied(key, value, param, dtype, step_on_device) for key, value in values.items()}
    step = placed.get("step")
    if isinstance((layout.values_of(param) or {}).get("step"), torch.Tensor) and isinstance(step, int | float):
        device = param.device if step_on_device else "cpu"
        placed["step"] = torch.tensor(float(step), device=device)  # torch keeps it as a tensor since 1.12
    return placed


def _placed_options(options: Mapping[str, object], group: Group) -> dict[str, object]:
    """Returns copies of options for a group.

    A tensor gets the device of the one that it replaces; without one, that of the first parameter, since files have no
    devices.
    """
    placed = deepcopy(dict(options))
    for key, value in placed.items():
        live = next(iter(group["params"]), None) if key not in group else group[key]
        if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
            placed[key] = value.to(live.device)
    return placed


def _copied(key: str, value: object, param: torch.Tensor, dtype: torch.dtype | None, step_on_device: bool) -> Any:
    """Copies a value. Floating-point state for the elements of the parameter is cast to `dtype`.

    torch's own loading also casts single numbers and integers, which would no longer be what was saved.
    """
    if isinstance(value, torch.Tensor):
        if key == "step":
            step = value.detach().clone()
            return step.to(torch.float32).to(param.device) if step_on_device else step
        to = dtype if dtype is not None and value.dim() and value.is_floating_point() else value.dtype
        if is_sharded(param) and value.dim():
            slot = sharded_slot("", param, value, None)
            assert isinstance(slot, ShardedSlot)
            source = slot.local(value).stored
            assert source is not None
            local = values_of(source, cast(Read, torch.Tensor.detach))
            return dtensor_like(param, local.to(local_tensor(param).device, to, copy=True).contiguous())
        plain = type(value) is torch.Tensor and type(param.detach()) is torch.Tensor
        if plain and value.shape == param.shape and value.stride() != param.stride():
            return torch.empty_like(param.detach(), dtype=to).copy_(value.detach())  # files have no strides
        return value.detach().to(param.device, to, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_copied(key, item, param, dtype, step_on_device) for item in value)
    return deepcopy(value)
